"""A stand-in for the GPU's memory: which token lies where, so that a wrong block is seen by its
content.
"""

from zlab.policies.core.plan import CompressionTask, SchedulerLimits, StepPlan
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.traces.schema import Phase

Token = object


class Shadow:
    """Writes what each step would write, as late as it may be written, and reads what it would
    read.
    """

    def __init__(self, limits: SchedulerLimits, scheduler: Scheduler) -> None:
        self._size = limits.block_size
        self._scheduler = scheduler
        self._cells: list[list[Token]] = [
            [None] * limits.block_size for _ in range(limits.num_blocks)
        ]
        self._reading: dict[int, tuple[CompressionTask, list[list[Token]]]] = {}
        self._kept: dict[int, list[Token]] = {}  # number -> tokens left by its last compression
        self._since: dict[int, int] = {}  # number -> text position of the first token after them
        self._host: dict[int, list[Token]] = {}
        self._swaps: list[tuple[Request, list[int], list[list[Token]]]] = []
        self._arriving: list[tuple[list[int], list[Token]]] = []
        self._chains: dict[
            tuple[int, Token], int
        ] = {}  # (what comes before, content) -> number of that history
        self._histories: dict[int, list[int]] = {}

    def planned(self, plan: StepPlan) -> None:
        """Copies that end with this plan, then those that begin: they read until they end."""
        self._end_copies()
        for task in plan.compressions:
            contents = [list(self._cells[block]) for block in task.sources]
            self._same(task.request, [token for cells in contents for token in cells])
            self._reading[task.request.number] = task, contents
        for swap in plan.swaps:
            request = swap.request
            if swap.out:
                contents = [list(self._cells[block]) for block in swap.blocks]
                self._host[request.number] = [token for cells in contents for token in cells]
                self._swaps.append((request, list(swap.blocks), contents))
            else:
                self._arriving.append((list(swap.blocks), self._host.pop(request.number)))
        for task in plan.joined:
            if task.request.number in self._reading:  # joined in the step that started it
                self._end_compression(task.request.number)

    def ran(self, plan: StepPlan) -> None:
        """What the step reads is there and right; what it writes is written."""
        for chunk in plan.prefills:
            request, end = chunk.request, chunk.start + chunk.count
            self._same(request, self._read(request.table, chunk.start))
            self._write(
                request.table,
                chunk.start,
                [self._token(request, at) for at in range(chunk.start, end)],
            )
        if not plan.num_decodes:
            return
        for request in self._scheduler.live():
            if request.phase is Phase.DECODE:
                used, generated = self._scheduler.state.decoding.tokens(request)
                self._same(request, self._read(request.table, used - 1))
                newest = self._token(request, request.prompt_tokens + generated - 1)
                self._write(request.table, used - 1, [newest])

    def _end_copies(self) -> None:
        compressing = {task.request.number for task in self._scheduler.state.compressing}
        for number in [number for number in self._reading if number not in compressing]:
            self._end_compression(number)
        for request, blocks, before in self._swaps:
            assert [self._cells[block] for block in blocks] == before, (
                f"{request.id}: written during its way out"
            )
        for blocks, tokens in self._arriving:
            self._write(blocks, 0, tokens)
        self._swaps.clear()
        self._arriving.clear()

    def _end_compression(self, number: int) -> None:
        """The sources are still what they were; the targets are written only now."""
        task, before = self._reading.pop(number)
        request = task.request
        assert [self._cells[block] for block in task.sources] == before, (
            f"{request.id}: a source was written"
        )
        if request.to_abort:
            return
        flat = [token for cells in before for token in cells]
        kept = flat[: task.kept_tokens - 1] + flat[-1:]
        self._write(task.targets, 0, kept)
        text = self._text_before(request) + len(flat)
        self._kept[number], self._since[number] = kept, text - len(kept)

    def _text_before(self, request: Request) -> int:
        """Text positions that its cache lacks."""
        return self._since.get(request.number, 0)

    def _token(self, request: Request, at: int) -> Token:
        """The token at text position `at`: equal only after equal tokens."""
        index = at // self._size
        if index >= request.content.num_blocks:
            return request.number, at
        history = self._histories.setdefault(request.number, [])
        while len(history) <= index:
            key = (history[-1] if history else -1, request.content[len(history)])
            history.append(self._chains.setdefault(key, len(self._chains)))
        return "prompt", history[index], at % self._size

    def _same(self, request: Request, found: list[Token]) -> None:
        kept = self._kept.get(request.number, [])
        shift = self._text_before(request)
        wanted = kept + [self._token(request, at + shift) for at in range(len(kept), len(found))]
        assert found == wanted[: len(found)], (
            f"{request.id} reads {found}, its tokens are {wanted[: len(found)]}"
        )

    def _read(self, table: list[int], count: int) -> list[Token]:
        size = self._size
        return [self._cells[table[at // size]][at % size] for at in range(count)]

    def _write(self, table: list[int], start: int, tokens: list[Token]) -> None:
        for at, token in enumerate(tokens, start):
            if at < len(table) * self._size:
                self._cells[table[at // self._size]][at % self._size] = token
