"""Which Triton kernels are made ready, and when: there must be none once requests are served."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from triton import knobs


@dataclass(frozen=True)
class Compilation:
    """A kernel that was ready at that moment (`time.perf_counter_ns`), compiled or taken from Triton's disk cache."""

    kernel: str
    ready_ns: int
    from_disk: bool


class Compilations:
    """While entered, `made` receives every kernel that this process compiles or loads.

    By the listener of Triton's compiler (Triton 3.4 and later), which a kernel passes once for each of its
    specialisations: a launch of one that is there already does not. A listener that was there before still hears.
    """

    def __init__(self) -> None:
        self.made: list[Compilation] = []
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._hear
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        knobs.compilation.listener = self._before

    def since(self, moment_ns: int) -> list[Compilation]:
        """Those that were not ready at that moment."""
        return [one for one in self.made if one.ready_ns >= moment_ns]

    def _hear(self, *, src: Any, cache_hit: bool, **more: Any) -> None:
        self.made.append(Compilation(str(src.name), time.perf_counter_ns(), cache_hit))
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **more)
