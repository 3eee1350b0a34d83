"""A second scheduler, written from the text of vLLM's rules and from nothing else.

It recomputes everything in every step and shares no code with the product, so that random workloads
compare two independent readings of `../shared/design/vllm-scheduling.md`. Section numbers are those
of that text.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.policies.vllm_goldens import Row, VllmRequest


@dataclass
class Living:
    """A request and what section 0 says that it has."""

    given: VllmRequest
    order: int  # of submission: the arrival time
    tokens: list[Any]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    registered: int = 0
    pending: int = 0
    outputs: int = 0  # that have returned
    catches_up: bool = True  # has not reached its newest token since its admission
    done: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.given.priority, self.order)

    @property
    def n(self) -> int:
        return len(self.tokens) + self.pending - self.computed


class Model:
    """The state of section 0 and the rules of sections 1 to 5."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.size: int = config["block_size"]
        self.free = deque(range(1, config["num_blocks"]))
        self.owners = dict.fromkeys(range(config["num_blocks"]), 0)
        self.found: dict[Any, list[int]] = {}
        self.content: dict[int, Any] = {}
        self.waiting: list[Living] = []
        self.running: list[Living] = []
        self.log: list[Row] = []
        self.in_flight: deque[list[tuple[Living, bool]]] = deque()
        self.num_submitted = 0

    # the driver's side

    def submit(self, request: VllmRequest) -> None:
        self.waiting.append(Living(request, self.num_submitted, list(request.prompt)))
        self.num_submitted += 1
        self._sort()

    def abort(self, id_: Any) -> None:
        """End a request between two steps."""
        for line in (self.running, self.waiting):
            for request in list(line):
                if request.given.id == id_:
                    line.remove(request)
                    self._give_up(request)
                    request.done = True

    def run(self, requests: list[VllmRequest], limit: int = 5000) -> list[Row]:
        """Run to the end (5.5); an empty log line ends it, as in the goldens."""
        coming = sorted(requests, key=lambda request: request.arrival_step)
        while len(self.log) < limit:
            while coming and coming[0].arrival_step <= len(self.log) + 1:
                self.submit(coming.pop(0))
            unfinished = bool(self.waiting or self.running)
            self.in_flight.append(self._schedule())
            if self.config["async_scheduling"] and len(self.in_flight) < 2 and unfinished:
                continue
            self._update(self.in_flight.popleft())
            empty = not self.log[-1][1] and not self.log[-1][2]
            if empty and not (unfinished or coming):
                return self.log
        raise AssertionError("the model does not end")

    # section 1

    def _schedule(self) -> list[tuple[Living, bool]]:
        config = self.config
        budget = config["max_num_batched_tokens"]
        planned: dict[int, int] = {}  # order of submission -> tokens
        prefills: dict[int, list[Any]] = {}
        preempted: list[Living] = []
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            n = min(self._n(request, request.n), budget)
            n = min(n, config["max_model_len"] - request.computed - 1)
            if request.pending > 0:
                last = len(request.given.prompt) + request.given.output_len
                if request.computed + 2 - request.pending >= last:
                    n = 0
            if n <= 0:
                index += 1
                continue
            stopped = False
            while not self._allocate(request, n, [], admission=False):
                victim = self.running[-1]
                if config["policy"] == "priority":
                    victim = max(self.running, key=lambda other: other.key)
                if victim.order in planned:
                    budget += planned.pop(victim.order)
                    prefills.pop(victim.order, None)
                place = self.running.index(victim)
                self.running.remove(victim)
                preempted.append(victim)
                self._give_up(victim)
                victim.computed, victim.registered, victim.catches_up = 0, 0, True
                self.waiting.insert(0, victim)
                self._sort()
                if victim is request:
                    stopped = True
                    break
                if place < index:
                    index -= 1
            if stopped:
                break
            planned[request.order] = n
            if request.catches_up:
                prefills[request.order] = [request.given.id, n, -1]
            budget -= n
            index += 1
        while (
            not preempted
            and self.waiting
            and budget > 0
            and len(self.running) < config["max_num_seqs"]
        ):
            request = self.waiting[0]
            hits = self._lookup(request)
            start = len(hits) * self.size
            n = min(self._n(request, len(request.tokens) - start), budget)
            if not self._allocate(request, n, hits, admission=True):
                break
            self.waiting.pop(0)
            self.running.append(request)
            request.computed = start
            request.catches_up = True
            planned[request.order] = n
            prefills[request.order] = [request.given.id, n, start]
            budget -= n
        batch = []
        for request in self.running:
            if request.order not in planned:
                continue
            request.computed += planned[request.order]
            samples = request.computed == len(request.tokens) + request.pending
            if samples:
                request.pending += 1
                request.catches_up = False
            batch.append((request, samples))
        # prefills are named in the order of scheduling: running requests, then admitted ones
        named = [prefills[request.order] for request, _ in batch if request.order in prefills]
        self.log.append(
            [
                len(self.log) + 1,
                named,
                len(planned) - len(named),
                [victim.given.id for victim in preempted],
                len(self.free),
                len(self.running),
                len(self.waiting),
            ]
        )
        return batch

    def _n(self, request: Living, n: int) -> int:
        threshold = self.config["long_prefill_token_threshold"]
        return threshold if 0 < threshold < n else n

    def _sort(self) -> None:
        if self.config["policy"] == "priority":
            self.waiting.sort(key=lambda request: request.key)

    # sections 1c.1, 2 and 3

    def _hash(self, request: Living, block: int) -> Any:
        return tuple(request.tokens[: (block + 1) * self.size])

    def _lookup(self, request: Living) -> list[int]:
        hits: list[int] = []
        if not self.config["prefix_caching"]:
            return hits
        for block in range((len(request.tokens) - 1) // self.size):
            holders = self.found.get(self._hash(request, block))
            if not holders:
                break
            hits.append(holders[0])
        return hits

    def _allocate(self, request: Living, n: int, hits: list[int], admission: bool) -> bool:
        held = len(request.table)
        unowned = sum(1 for block in hits if not self.owners[block])

        def need(tokens: int) -> int:
            return max(-(-tokens // self.size) - held - len(hits), 0) + unowned

        watermark = 0
        if admission and self.running:
            watermark = int(self.config["watermark"] * self.config["num_blocks"])
        whole = admission and self.config["scheduler_reserve_full_isl"]
        if whole and need(len(request.tokens)) + watermark > len(self.free):
            return False
        computed = len(hits) * self.size if admission else request.computed
        if need(computed + n) + watermark > len(self.free):
            return False
        for block in hits:
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] += 1
        request.table += hits
        if admission:
            request.registered = len(hits)
        while len(request.table) * self.size < computed + n:
            block = self.free.popleft()
            self._forget(block)
            self.owners[block] = 1
            request.table.append(block)
        self._register(request, min(computed + n, len(request.tokens)))
        return True

    def _forget(self, block: int) -> None:
        hash_ = self.content.pop(block, None)
        if hash_ is not None:
            self.found[hash_].remove(block)

    def _register(self, request: Living, tokens: int) -> None:
        if not self.config["prefix_caching"]:
            return
        for place in range(request.registered, tokens // self.size):
            hash_, block = self._hash(request, place), request.table[place]
            self.found.setdefault(hash_, []).append(block)
            self.content[block] = hash_
            request.registered = place + 1

    def _give_up(self, request: Living) -> None:
        bare = []
        for block in reversed(request.table):
            self.owners[block] -= 1
            if self.owners[block]:
                continue
            if block in self.content:
                self.free.append(block)
            else:
                bare.append(block)
        self.free.extendleft(reversed(bare))
        request.table = []

    # sections 4 and 5

    def _update(self, batch: list[tuple[Living, bool]]) -> None:
        for request, samples in batch:
            if not samples or request.done:
                continue
            request.pending -= 1
            token = ("output", request.order, request.outputs)
            request.tokens.append(token)
            request.outputs += 1
            if request in self.running and request.computed:
                # 5.3, before a stopped request gives its blocks up; planning did so if synchronous
                self._register(request, request.computed - request.pending)
            ended = request.outputs >= request.given.output_len
            if ended or len(request.tokens) >= self.config["max_model_len"]:
                request.done = True
                self._give_up(request)
                (self.running if request in self.running else self.waiting).remove(request)
