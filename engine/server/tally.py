"""What one lane's engine has done, counted from its journal, its steps and its ended requests.

Nothing here looks at every request, or at anything in every step: journal rows and steps are counted in bulk, about
once a second and when somebody asks; a request costs a few additions when it ends, a step one comparison of lists.
"""

from collections import Counter
from typing import Any

import numpy as np

from engine.server.histogram import LATENCY_S, STEP_S, STEP_TOKENS, Histogram, lengths_up_to
from policies.core.events import Int64Array, Kind, Reason
from policies.core.policy import Policy
from policies.core.request import Phase, Request, Status

NS = 1e-9
# Kinds that come a few times in a request's life, and are looked at one by one.
BY_REQUEST = (Kind.ADMITTED, Kind.HIT, Kind.FIRST, Kind.PREEMPTED, Kind.SWAP_IN, Kind.ARRIVED)
ENDS = (Kind.FINISHED, Kind.ABORTED, Kind.FAILED, Kind.REFUSED)
_IS_BY_REQUEST = np.zeros(len(Kind) + 2, dtype=bool)
_IS_BY_REQUEST[[*BY_REQUEST, *ENDS]] = True
PHASES = tuple(phase for phase in Phase if phase is not Phase.DONE)


class TokenGaps:
    """Time between consecutive tokens of each output; a step like the one before costs one comparison of two lists."""

    def __init__(self, histogram: Histogram) -> None:
        self.histogram = histogram
        self._numbers: list[int] = []
        self._end_ns = 0
        self._last_ns: dict[int, int] = {}  # of live requests that got no token in the newest step
        self._gone: set[int] = set()  # ended since the newest step

    def step(self, numbers: list[int], end_ns: int) -> None:
        """These requests got a token each."""
        if not numbers:
            return
        if numbers == self._numbers:
            self.histogram.add((end_ns - self._end_ns) * NS, len(numbers))
        else:
            self._mixed(numbers, end_ns)
        self._numbers, self._end_ns = numbers, end_ns

    def _mixed(self, numbers: list[int], end_ns: int) -> None:
        former, now = set(self._numbers), set(numbers)
        last = self._last_ns
        last.update(dict.fromkeys(former - now - self._gone, self._end_ns))
        self._gone.clear()
        joined = now - former
        self.histogram.add((end_ns - self._end_ns) * NS, len(now) - len(joined))
        for number in joined:
            moment_ns = last.pop(number, None)
            if moment_ns is not None:  # otherwise its first token
                self.histogram.add((end_ns - moment_ns) * NS)

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._last_ns.pop(number, None)
        self._gone.add(number)


class Tally:
    """Counts of one lane, through all engines that it has had."""

    def __init__(self, max_model_len: int) -> None:
        lengths = lengths_up_to(max_model_len)
        self.of_kind = np.zeros(len(Kind) + 2, dtype=np.int64)
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()  # by finish reason
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.compression_source_tokens = 0
        self.compression_kept_tokens = 0
        self.prefix_blocks_lost = 0
        self.recomputed_tokens = 0
        self.steps = 0
        self.looks_up = True  # whether admissions look into a prefix cache
        self.policy: Policy | None = None  # of which `policy_digest` is
        self.policy_digest = ""
        self.seconds = {
            name: Histogram(LATENCY_S)
            for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                         "request_decode_time", "request_inference_time")
        }  # fmt: skip
        self.time_per_output_token = Histogram(STEP_S)
        self.phases = {phase: Histogram(LATENCY_S) for phase in PHASES}
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_seconds = Histogram(STEP_S)
        self.prompt_lengths, self.output_lengths, self.allowed_lengths = (Histogram(lengths) for _ in range(3))
        self.gaps = TokenGaps(Histogram(STEP_S))
        self._prompt_tokens: dict[int, int] = {}  # of live requests whose prompt is not computed yet
        self._source_tokens: dict[int, int] = {}  # of compressions in flight
        self._admitted: set[int] = set()  # live requests that have been admitted before
        self.preempted: set[int] = set()  # live requests that gave way and wait to come back

    def new_engine(self) -> None:
        """The old engine's requests are gone; request numbers begin anew."""
        for kept in (self._prompt_tokens, self._source_tokens, self._admitted, self.preempted):
            kept.clear()
        self.gaps = TokenGaps(self.gaps.histogram)

    # in bulk

    def rows(self, rows: Int64Array, _: Int64Array) -> None:
        """Journal rows, in order."""
        kinds = rows[:, 1]
        self.of_kind += np.bincount(kinds, minlength=len(self.of_kind))
        self.prefix_blocks_lost += int(rows[kinds == Kind.PREFIX_LOST, 3].sum())
        looked_at = _IS_BY_REQUEST[kinds] | (kinds == Kind.COMPRESSING) | (kinds == Kind.COMPRESSED)
        for kind, number, value in rows[looked_at][:, 1:4].tolist():
            self._row(kind, number, value)

    def _row(self, kind: int, number: int, value: int) -> None:
        if kind == Kind.ARRIVED:
            self._prompt_tokens[number] = value
        elif kind == Kind.ADMITTED:
            self.preempted.discard(number)
            if self.looks_up and number not in self._admitted:
                self.prefix_queries += value
        elif kind == Kind.HIT:
            if number not in self._admitted:
                self.prefix_hits += value
        elif kind == Kind.FIRST:
            self._admitted.add(number)
            self.prompt_tokens += self._prompt_tokens.pop(number, 0)
        elif kind == Kind.PREEMPTED:
            self.preempted.add(number)
            self._admitted.add(number)
        elif kind == Kind.SWAP_IN:
            self.preempted.discard(number)
        elif kind == Kind.COMPRESSING:
            self._source_tokens[number] = value
        elif kind == Kind.COMPRESSED:
            self.compression_source_tokens += self._source_tokens.pop(number, 0)
            self.compression_kept_tokens += value
        else:
            self._end_row(kind, number, value)

    def _end_row(self, kind: int, number: int, value: int) -> None:
        if kind == Kind.REFUSED:
            self.refused[Reason(value).name.lower()] += 1
        for kept in (self._prompt_tokens, self._source_tokens):
            kept.pop(number, None)
        self._admitted.discard(number)
        self.preempted.discard(number)

    def take_steps(self, columns: dict[str, Any]) -> None:
        """Steps that ran, as columns of a recording's table."""
        output = columns["output_tokens"]
        self.steps += len(output)
        self.generation_tokens += int(output.sum())
        self.step_tokens.add_all((output + columns["prefill_tokens"]).astype(np.float64))
        self.step_seconds.add_all(columns["end_s"] - columns["start_s"])

    # one by one

    def first_token(self, arrival_ns: int, now_ns: int) -> None:
        """A request's first token has come to the host."""
        self.seconds["time_to_first_token"].add((now_ns - arrival_ns) * NS)

    def end(self, request: Request, finish_reason: str) -> None:
        """An output's only terminal event."""
        self.gaps.forget(request.number)
        if finish_reason == "refused":
            return
        self.ended[finish_reason] += 1
        self.recomputed_tokens += request.recomputed_tokens
        if request.phase is Phase.DONE:  # its engine broke otherwise, and nobody closed its account
            for phase, histogram in self.phases.items():
                histogram.add(request.phase_ns[phase] * NS)
        if request.status is Status.FINISHED:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        arrival, admitted, finish = request.arrival_ns, request.first_admitted_ns, request.finish_ns
        spans = {
            "e2e_request_latency": finish - arrival,
            "request_queue_time": admitted - arrival,
            "request_inference_time": finish - admitted,
        }
        if request.first_token_ns >= 0:
            spans["request_prefill_time"] = request.first_token_ns - admitted
            spans["request_decode_time"] = finish - request.first_token_ns
        for name, span_ns in spans.items():
            self.seconds[name].add(span_ns * NS)
        if request.generated > 1:
            self.time_per_output_token.add(spans["request_decode_time"] * NS / (request.generated - 1))
        self.prompt_lengths.add(request.prompt_tokens)
        self.output_lengths.add(request.generated)
        self.allowed_lengths.add(request.target_tokens if request.max_tokens is None else request.max_tokens)
