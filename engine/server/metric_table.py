"""Every metric of `/metrics`: its name, what it means, and how it stands to vLLM's.

The prefix says whether a board or an autoscaler made for vLLM may read it: `vllm:` where the meaning is vLLM's own (V1
engine, `vllm/v1/metrics`), so that such a board works unchanged; `zlab:` for everything else, so that nothing is taken
for what it is not. Every sample has the labels `model_name` (as vLLM) and `lane`. docs/SERVE_METRICS.md is the same
table for readers.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
COMMON_LABELS = ("model_name", "lane")


@dataclass(frozen=True)
class Family:
    """One metric. A counter's samples end in `_total`, which its name here leaves out.

    `vllm`: for a `zlab:` metric, vLLM's nearest one and how it differs; empty if there is none.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    vllm: str = ""


FAMILIES: tuple[Family, ...] = (
    Family("vllm:num_requests_running", "gauge", "Requests that hold blocks"),
    Family("vllm:num_requests_waiting", "gauge", "Requests in the scheduler's waiting line, preempted ones included"),
    Family("vllm:kv_cache_usage_perc", "gauge", "Share of blocks that requests own, 0..1; cached ones count as free"),
    Family(
        "vllm:cache_config_info", "gauge", "Always 1; the cache's sizes as labels",
        ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
    ),
    Family("vllm:prompt_tokens", "counter", "Prompt tokens of requests whose prompt is computed, cached ones included"),
    Family("vllm:generation_tokens", "counter", "Output tokens"),
    Family("vllm:prefix_cache_queries", "counter", "Tokens looked up in the prefix cache, at a request's admission"),
    Family("vllm:prefix_cache_hits", "counter", "Tokens found in the prefix cache, at a request's admission"),
    Family("vllm:num_preemptions", "counter", "Times a running request gave way"),
    Family(
        "vllm:request_success", "counter", "Outputs that ended, by reason: stop, length, abort, error",
        ("finished_reason",),
    ),
    Family("vllm:iteration_tokens_total", "histogram", "Tokens of a step: prompt tokens computed and output tokens"),
    Family("vllm:time_to_first_token_seconds", "histogram", "From arrival to the first token on the host"),
    Family("vllm:inter_token_latency_seconds", "histogram", "Between two tokens of one output, on the host"),
    Family("vllm:request_time_per_output_token_seconds", "histogram", "Mean of those over one finished output"),
    Family("vllm:e2e_request_latency_seconds", "histogram", "From arrival to the end of a finished output"),
    Family("vllm:request_queue_time_seconds", "histogram", "From arrival to the first admission"),
    Family("vllm:request_prefill_time_seconds", "histogram", "From the first admission to the first token"),
    Family("vllm:request_decode_time_seconds", "histogram", "From the first token to the last"),
    Family("vllm:request_inference_time_seconds", "histogram", "From the first admission to the last token"),
    Family("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a finished output"),
    Family("vllm:request_generation_tokens", "histogram", "Tokens of a finished output"),
    Family("vllm:request_params_max_tokens", "histogram", "The output length that a finished request was allowed"),
    Family("zlab:blocks", "gauge", "Blocks of the pool by state", ("state",)),
    Family("zlab:query_slots_used", "gauge", "Query slots that requests hold"),
    Family("zlab:query_slots", "gauge", "Query slots there are"),
    Family(
        "zlab:requests_waiting", "gauge",
        "Requests that would go on but for: admission (new), readmission (preempted), slot, block, step (takes no more "
        "requests), copy (a compression or swap in flight)",
        ("reason",),
        "vllm:num_requests_waiting_by_reason splits the waiting line alone, into capacity and deferred",
    ),
    Family(
        "zlab:preemptions", "counter", "Times a running request gave way, by how it comes back", ("kind",),
        "vllm:num_preemptions is the sum; vLLM knows recompute only",
    ),
    Family("zlab:compressions", "counter", "Compressions that were joined"),
    Family("zlab:compression_source_tokens", "counter", "Tokens of the requests that these compressions began with"),
    Family("zlab:compression_kept_tokens", "counter", "Tokens that they kept"),
    Family("zlab:prefix_blocks_lost", "counter", "Matchable blocks overwritten by a compression"),
    Family(
        "zlab:request_phase_seconds", "histogram",
        "What an output that ended spent in each phase; waits_for_slot is the time waited for a query slot",
        ("phase",),
        "the queue, prefill and decode times of vLLM run on through stalls and preemptions",
    ),
    Family(
        "zlab:requests_refused", "counter", "Requests that can never be served, by reason", ("reason",),
        "vLLM answers 400 and counts nothing",
    ),
    Family("zlab:recomputed_tokens", "counter", "Tokens computed again after a preemption, of outputs that ended"),
    Family("zlab:steps", "counter", "Steps"),
    Family("zlab:step_seconds", "histogram", "How long a step took"),
    Family("zlab:policy_info", "gauge", "Always 1; the policy that decides", ("policy", "digest")),
    Family("zlab:policy_since_seconds", "gauge", "Unix time at which it took over"),
    Family("zlab:policy_changes", "counter", "Times another policy took over in this lane"),
    Family("zlab:lane_share", "gauge", "Share of requests that fall to the lane, 0..1"),
    Family("zlab:engines_rebuilt", "counter", "Times a failed step cost the lane its engine"),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

SERVER_FAMILIES: tuple[Family, ...] = (
    Family(
        "zlab:http_responses", "counter", "Responses by route and status; 429, 413, 400 are those turned away",
        ("route", "status"),
    ),
    Family("zlab:snapshot_age_seconds", "gauge", "Age of the lanes' figures; 0 unless the engine hangs"),
    Family("zlab:recording_failed", "gauge", "1 if the recording was given up: the disk failed or was too slow"),
)  # fmt: skip
"""Metrics of the server as a whole; they have the label `model_name` only."""
