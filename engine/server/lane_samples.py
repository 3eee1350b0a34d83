"""One lane's figures at a moment, by the names of `metric_table`: what a scrape takes from the engine's thread."""

from collections.abc import Mapping

from engine.server.histogram import Histogram
from engine.server.lanes import Lane
from engine.server.tally import Tally
from policies.core.blocks import BlockPool, BlockState
from policies.core.events import Kind, Reason
from policies.core.state import State
from policies.spec import policy_digest

Value = float | Histogram
Samples = Mapping[str, list[tuple[tuple[str, ...], Value]]]  # name -> (values of its own labels, value)
FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = (Reason.NEVER_FITS, Reason.TOO_LONG, Reason.EMPTY_PROMPT, Reason.BAD_MAX_TOKENS)


def lane_samples(lane: Lane, tally: Tally) -> Samples:
    """The figures of now, copied; on the engine's thread, after everything so far has been counted."""
    state = lane.engine.scheduler.state
    return {
        name: value if isinstance(value, list) else [((), value)]
        for name, value in (
            _of_pool(state) | _of_requests(state, tally) | _of_times(tally) | _of_lane(lane, tally)
        ).items()
    }


_Found = dict[str, Value | list[tuple[tuple[str, ...], Value]]]


def _by(values: Mapping[str, Value]) -> list[tuple[tuple[str, ...], Value]]:
    return [((label,), value) for label, value in values.items()]


def _of_pool(state: State) -> _Found:
    limits, pool = state.limits, state.pool
    return {
        "vllm:kv_cache_usage_perc": pool.num_used / pool.num_blocks,
        "vllm:cache_config_info": [
            ((str(limits.block_size), str(limits.num_blocks), str(state.policy.prefix.enabled)), 1.0)
        ],
        "zlab:blocks": _by({name.name.lower(): float(count) for name, count in blocks_by_state(pool).items()}),
        "zlab:query_slots_used": float(state.slots.num_slots - state.slots.num_free),
        "zlab:query_slots": float(state.slots.num_slots),
    }


def blocks_by_state(pool: BlockPool) -> dict[BlockState, int]:
    """How many blocks are in each state; looks at single blocks only where some are shared or copied."""
    busy = pool.held | pool.targets
    shared = 0
    if pool.num_shared_extra:
        shared = sum(1 for refs in pool.refs if refs > 1) - sum(1 for block in busy if pool.refs[block] > 1)
    return {
        BlockState.FREE: pool.num_free - pool.num_cached,
        BlockState.OWNED: pool.num_used - shared - len(busy),
        BlockState.SHARED: shared,
        BlockState.CACHED: pool.num_cached,
        BlockState.TARGET: len(pool.targets - pool.held),
        BlockState.HELD: len(pool.held),
    }


def _of_requests(state: State, tally: Tally) -> _Found:
    swaps = int(tally.of_kind[Kind.SWAP_OUT])
    preemptions = int(tally.of_kind[Kind.PREEMPTED])
    leaving = sum(task.out for task in state.swapping)  # preempted, and not in the line yet
    readmission = len(tally.preempted) - leaving
    return {
        "vllm:num_requests_running": float(len(state.running)),
        "vllm:num_requests_waiting": float(len(state.waiting)),
        "zlab:requests_waiting": _by(
            {
                "admission": float(len(state.waiting) - readmission),
                "readmission": float(readmission),
                "slot": float(state.num_waiting_for_slot),
                "block": float(len(state.stalled) - state.num_waiting_for_slot),
                "step": float(len(state.paused)),
                "copy": float(len(state.compressing) + len(state.swapping)),
            }
        ),
        "vllm:prompt_tokens": float(tally.prompt_tokens),
        "vllm:generation_tokens": float(tally.generation_tokens),
        "vllm:prefix_cache_queries": float(tally.prefix_queries),
        "vllm:prefix_cache_hits": float(tally.prefix_hits),
        "vllm:num_preemptions": float(preemptions),
        "zlab:preemptions": _by({"recompute": float(preemptions - swaps), "swap": float(swaps)}),
        "vllm:request_success": _by({reason: float(tally.ended[reason]) for reason in FINISH_REASONS}),
        "zlab:requests_refused": _by(
            {reason.name.lower(): float(tally.refused[reason.name.lower()]) for reason in REFUSALS}
        ),
        "zlab:compressions": float(tally.of_kind[Kind.COMPRESSED]),
        "zlab:compression_source_tokens": float(tally.compression_source_tokens),
        "zlab:compression_kept_tokens": float(tally.compression_kept_tokens),
        "zlab:prefix_blocks_lost": float(tally.prefix_blocks_lost),
        "zlab:recomputed_tokens": float(tally.recomputed_tokens),
        "zlab:policy_changes": float(tally.of_kind[Kind.POLICY]),
    }


def _of_times(tally: Tally) -> _Found:
    return {
        **{f"vllm:{name}_seconds": histogram.copy() for name, histogram in tally.seconds.items()},
        "vllm:inter_token_latency_seconds": tally.gaps.histogram.copy(),
        "vllm:request_time_per_output_token_seconds": tally.time_per_output_token.copy(),
        "vllm:iteration_tokens_total": tally.step_tokens.copy(),
        "vllm:request_prompt_tokens": tally.prompt_lengths.copy(),
        "vllm:request_generation_tokens": tally.output_lengths.copy(),
        "vllm:request_params_max_tokens": tally.allowed_lengths.copy(),
        "zlab:steps": float(tally.steps),
        "zlab:step_seconds": tally.step_seconds.copy(),
        "zlab:request_phase_seconds": _by(
            {phase.name.lower(): histogram.copy() for phase, histogram in tally.phases.items()}
        ),
    }


def _of_lane(lane: Lane, tally: Tally) -> _Found:
    policy = lane.policy
    if tally.policy is not policy:
        tally.policy, tally.policy_digest = policy, policy_digest(policy)
    return {
        "zlab:policy_info": [((policy.name, tally.policy_digest), 1.0)],
        "zlab:policy_since_seconds": lane.since_unix_s,
        "zlab:lane_share": lane.share,
        "zlab:engines_rebuilt": float(lane.num_rebuilt),
    }
