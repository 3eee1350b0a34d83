"""An engine that is driven step by step, so that a step does exactly what a measurement wants it to do."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.build import EngineSettings, build_engine
from engine.loading import LoadedModel
from engine.sampling_params import SamplingParams
from engine.submitting import submit
from policies.core.request import Status
from traces.workload import TraceRequest

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
COUNTS = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs", "compressions")


@dataclass(frozen=True)
class Steps:
    """Steps in a row. `seconds[i]` is from the end of step i - 1 to the end of step i, whatever happens in between;
    NaN for a first step, or one that followed a pause.
    """

    seconds: npt.NDArray[np.float64]
    counts: dict[str, npt.NDArray[np.int64]]  # by the names of COUNTS

    def where(self, **wanted: int) -> npt.NDArray[np.bool_]:
        """The steps with these counts and a known time."""
        found = ~np.isnan(self.seconds)
        for name, value in wanted.items():
            found &= self.counts[name] == value
        return found


class Stage:
    """One engine, its prompts and its steps. Everything submitted has a forced length, so nothing but lengths decides.

    Prompts come in lines: two prompts of one line share their beginning, which the prefix cache then finds.
    """

    def __init__(self, settings: EngineSettings, loaded: LoadedModel, seed: int = 0) -> None:
        """On a CPU a step is over when it has been launched; there it is taken in before the next is planned."""
        self.plans_ahead = settings.device != "cpu"
        self.engine = build_engine(replace(settings, overlap=self.plans_ahead), loaded)
        self.block_size = self.engine.limits.block_size
        self.longest = self.engine.limits.max_model_len
        self._vocab_size = loaded.config.vocab_size
        self._seed = seed
        self._lines: dict[int, list[int]] = {}
        self._next = 0
        self._num_fresh = 0
        self._paused = True
        self._after_pause: list[int] = []  # steps whose time would hold the pause before them

    def line(self, number: int, num_tokens: int) -> list[int]:
        """The first tokens of a line, the same every time."""
        known = self._lines.setdefault(number, [])
        while len(known) < num_tokens:
            generator = torch.Generator().manual_seed(self._seed + 1_000_003 * number + len(known))
            known += torch.randint(0, self._vocab_size, (8192,), generator=generator).tolist()
        return known[:num_tokens]

    def fresh(self, num_tokens: int) -> list[int]:
        """Tokens nobody has seen."""
        self._num_fresh += 1
        generator = torch.Generator().manual_seed(self._seed + 500_009 * self._num_fresh)
        found: list[int] = torch.randint(0, self._vocab_size, (num_tokens,), generator=generator).tolist()
        return found

    def submit(self, prompt_ids: Sequence[int], output_tokens: int, params: SamplingParams = GREEDY) -> str:
        """Hand a request in for the next step; returns its id. It must be one that can be served."""
        id = str(self._next)
        self._next += 1
        asked = TraceRequest(
            id=id,
            prompt_tokens=len(prompt_ids),
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            prompt_ids=tuple(prompt_ids),
        )
        request = submit(self.engine, asked, prompt_ids, params, with_text=False).request
        assert request.status is not Status.REFUSED, request.message
        return id

    def step(self, times: int = 1) -> None:
        """Take so many steps, or fewer when nothing is left to do."""
        for _ in range(times):
            if self._paused:
                self._after_pause.append(self.engine.scheduler.next_step)
                self._paused = False
            if not self.engine.loop.step():
                self._paused = True
                return

    def empty(self, *ids: str) -> None:
        """End these requests (all that live if none is named) and take the steps under way in."""
        for id in ids or [request.id for request in self.engine.scheduler.live()]:
            self.engine.loop.abort(id)
        self.pause()

    def pause(self) -> None:
        """Let the device come to rest."""
        self.engine.loop.drain()
        self._paused = True

    def play(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.scheduler.state.requests:
            self.step()

    def take(self) -> Steps:
        """All steps since last time; the device comes to rest first."""
        self.pause()
        self.engine.loop.ended.clear()
        columns: dict[str, Any] | None = self.engine.steps.take()
        if columns is None:
            return Steps(np.empty(0), {name: np.empty(0, dtype=np.int64) for name in COUNTS})
        ends = np.asarray(columns["end_s"], dtype=np.float64)
        seconds = np.diff(ends, prepend=np.nan)
        seconds[np.isin(columns["step"], self._after_pause)] = np.nan
        self._after_pause.clear()
        return Steps(seconds, {name: np.asarray(columns[name], dtype=np.int64) for name in COUNTS})


def spread(seconds: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Repeats of one measurement: their median, how far they lie apart, how many they are."""
    low, median, high = np.percentile(np.asarray(seconds, dtype=np.float64), (10, 50, 90))
    return {"median": float(median), "low": float(low), "high": float(high), "count": len(seconds)}


def free_memory() -> None:
    """Let go of the last engine's cache (its parts refer to one another) before the next is made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Deadline:
    """A time after which nothing new is begun."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._limit_s = seconds

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return self.seconds > self._limit_s
