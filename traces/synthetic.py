"""Synthetic workloads: reasoning, chat sessions, shared prefixes, fixed lengths, bursts.

The same arguments and seed give the same requests on any machine: all values come from one PCG64
generator in a fixed order. Rows of chat and shared-prefix workloads are computed on access from a
few numbers, so a million requests take about 100 bytes each.

Arrival processes are Poisson, gamma and on/off. Times count from the first request (at 0) and are
whole ticks of 100 ns, so that they can be written and read back exactly and do not depend on the
last bit of a machine's logarithm.

`make_workload` makes a workload by its name, `synth:KIND?key=value&...`. The name is in the
manifest of a run, so that its workload can be made again.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zlab.traces.choices import unknown_choice
from zlab.traces.workload import (
    Constant,
    FieldValues,
    NamedBy,
    Numbered,
    OptionalFloats,
    PrefixRanges,
    RequestTable,
    TraceError,
    TraceRequest,
    TurnNames,
    Workload,
    WorkloadMeta,
    plain_array,
)

FIRST_TOKEN_ID = 1000
END_TOKEN_ID = 150_000
"""Made-up token ids lie in this range: inside the vocabulary of Qwen3 (151,936), past most special
tokens.
"""
Ints = npt.NDArray[np.int64]


def generator(seed: int) -> np.random.Generator:
    """Return the random generator of a synthetic workload. Raise `TraceError` for a bad seed."""
    if type(seed) is not int or seed < 0:
        raise TraceError(f"seed is {seed!r}, must be a whole number >= 0")
    return np.random.Generator(np.random.PCG64(seed))


def at_least(name: str, value: int, lowest: int = 1) -> None:
    """Raise `TraceError` unless a setting is a whole number of at least `lowest`.

    Args:
        name: Name of the setting, for the error.
        value: Its value.
        lowest: Smallest allowed value.
    """
    if type(value) is not int or value < lowest:
        raise TraceError(f"{name} is {value!r}, must be a whole number >= {lowest}")


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens whose logarithm is normal(mu, sigma), rounded and clipped to [lowest,
    cap].
    """

    mu: float
    sigma: float
    cap: int
    lowest: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < 10 and -20 < self.mu < 20):
            raise TraceError(
                f"lognormal mu {self.mu!r}, sigma {self.sigma!r}: must lie in -20..20 and 0..10"
            )
        at_least("lowest", self.lowest)
        at_least("cap", self.cap, self.lowest)

    def from_normal(self, normal: npt.NDArray[np.float64]) -> Ints:
        """Return the lengths for standard normal values of any shape."""
        return np.clip(
            np.rint(np.exp(self.mu + self.sigma * normal)), self.lowest, self.cap
        ).astype(np.int64)

    def sample(self, rng: np.random.Generator, num: int) -> Ints:
        """Return `num` independent lengths."""
        return self.from_normal(rng.standard_normal(num))


def made(name: str, recipe: str, seed: int, num_requests: int) -> WorkloadMeta:
    """Return the metadata of a synthetic workload. Its recipe takes the place of a file's source.

    Args:
        name: Name of the workload.
        recipe: The generator with its arguments.
        seed: Seed of the random numbers.
        num_requests: Number of requests.
    """
    return WorkloadMeta(
        name=name,
        source=f"synthetic {recipe}, seed {seed}",
        rows_read=num_requests,
        rows_kept=num_requests,
    )


Seconds = npt.NDArray[np.float64]
TICKS_PER_S = 10_000_000


def positive(name: str, value: float) -> None:
    """Raise `TraceError` unless the setting is a finite number above 0."""
    if not 0 < value < float("inf"):
        raise TraceError(f"{name} is {value!r}, must be a finite number above 0")


def on_ticks(seconds: Seconds) -> Seconds:
    """Return the times rounded to whole ticks of 100 ns."""
    return np.rint(seconds * TICKS_PER_S) / TICKS_PER_S


class Arrivals(Protocol):
    """An arrival process."""

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Return the arrival times in seconds, ascending from 0. Shape [num_requests]."""
        ...


@dataclass(frozen=True)
class Together:
    """All requests arrive at t = 0."""

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Return zeros."""
        return np.zeros(num_requests)


@dataclass(frozen=True)
class Gamma:
    """Independent gamma gaps with mean 1/rate and coefficient of variation `cv`. Above 1, arrivals
    are burstier than Poisson.
    """

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)
        positive("cv", self.cv)

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Return cumulated gaps of shape 1/cv^2 and scale cv^2/rate."""
        shape = self.cv**-2
        return _from_gaps(rng.gamma(shape, 1 / (self.rate_per_s * shape), num_requests))


@dataclass(frozen=True)
class Poisson:
    """Independent exponential gaps with mean 1/rate."""

    rate_per_s: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Return cumulated exponential gaps."""
        return _from_gaps(rng.exponential(1 / self.rate_per_s, num_requests))


@dataclass(frozen=True)
class OnOff:
    """Poisson arrivals whose rate switches between two values. Each phase has an exponential
    duration (a two-state MMPP).
    """

    on_rate_per_s: float
    mean_on_s: float
    mean_off_s: float
    off_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("on_rate_per_s", "mean_on_s", "mean_off_s"):
            positive(name, getattr(self, name))
        if not 0 <= self.off_rate_per_s <= self.on_rate_per_s:
            raise TraceError(
                f"off_rate_per_s is {self.off_rate_per_s!r}, must be 0..{self.on_rate_per_s} "
                f"(the on rate)"
            )

    def times(self, rng: np.random.Generator, num_requests: int) -> Seconds:
        """Return unit-rate arrivals mapped through the inverse of the cumulated rate. The first
        phase is on.
        """
        operational = np.cumsum(rng.exponential(1.0, num_requests))
        per_cycle = self.on_rate_per_s * self.mean_on_s + self.off_rate_per_s * self.mean_off_s
        ends_s, ends_cumulated = [np.zeros(1)], [np.zeros(1)]
        while ends_cumulated[-1][-1] <= operational[-1]:
            num_cycles = int((operational[-1] - ends_cumulated[-1][-1]) / per_cycle) + 16
            phases = rng.exponential(1.0, (num_cycles, 2)) * (self.mean_on_s, self.mean_off_s)
            ends_s.append(ends_s[-1][-1] + np.cumsum(phases))
            rates = (self.on_rate_per_s, self.off_rate_per_s)
            ends_cumulated.append(ends_cumulated[-1][-1] + np.cumsum(phases * rates))
        wall = np.interp(operational, np.concatenate(ends_cumulated), np.concatenate(ends_s))
        return on_ticks(wall - wall[0])


def _from_gaps(gaps: Seconds) -> Seconds:
    times = np.cumsum(gaps)
    return on_ticks(times - times[0])


MESSAGE = LogNormal(mu=4.1, sigma=1.0, cap=2048)
ANSWER = LogNormal(mu=5.2, sigma=0.8, cap=2048)
"""Lengths of a chat's messages and answers: medians 60 and 181 tokens, an assumption."""


@dataclass(frozen=True)
class ChatShape:
    """Chat sessions of several turns. Each prompt consists of the system prompt, all earlier turns
    with their answers, and a new message.

    A session uses one of `num_system_prompts` system prompts, all equally likely, of
    `system_tokens` tokens each. The number of turns is geometric; a session also ends before prompt
    and answer would exceed `max_context`. The next message comes `mean_think_s` (exponential) after
    the end of the answer, which takes `s_per_token` for each token. Arrival times are therefore
    fixed in advance and do not depend on the server's speed.
    """

    mean_turns: float = 4.0
    num_system_prompts: int = 16
    system_tokens: int = 320
    user: LogNormal = MESSAGE
    answer: LogNormal = ANSWER
    max_context: int = 16_384
    mean_think_s: float = 30.0
    s_per_token: float = 0.02
    block_size: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < 1e6:
            raise TraceError(f"mean_turns is {self.mean_turns!r}, must be at least 1")
        for name in ("num_system_prompts", "block_size"):
            at_least(name, getattr(self, name))
        at_least("system_tokens", self.system_tokens, 0)
        for name in ("mean_think_s", "s_per_token"):
            positive(name, getattr(self, name))
        longest = self.system_tokens + self.user.cap + self.answer.cap
        if self.max_context < longest:
            raise TraceError(
                f"max_context is {self.max_context}, must hold a longest first turn: "
                f"{longest} tokens"
            )


def chat(
    num_requests: int,
    shape: ChatShape | None = None,
    arrivals: Arrivals | None = None,
    seed: int = 0,
) -> Workload:
    """Make `num_requests` turns of chat sessions.

    Args:
        num_requests: Number of turns of all sessions.
        shape: Lengths and times of sessions.
        arrivals: Process by which sessions begin; by default Poisson with 1/s.
        seed: Seed of the random numbers.
    """
    at_least("num_requests", num_requests)
    shape = shape or ChatShape()
    arrivals = arrivals or Poisson(1.0)
    rng = generator(seed)
    session, user, answer = _draw_turns(rng, num_requests, shape)
    first = np.diff(session, prepend=-1) > 0
    prompt = shape.system_tokens + _running_sum(user + answer, first) - answer
    num_sessions = int(session[-1]) + 1
    system = rng.integers(0, shape.num_system_prompts, num_sessions)[session]
    begins = np.rint(arrivals.times(rng, num_sessions) * TICKS_PER_S).astype(np.int64)
    thinks = np.rint(rng.exponential(shape.mean_think_s, num_requests) * TICKS_PER_S).astype(
        np.int64
    )
    answering = np.rint(np.roll(answer, 1) * shape.s_per_token * TICKS_PER_S).astype(np.int64)
    ticks = begins[session] + _running_sum(np.where(first, 0, answering + thinks), first)
    order = np.argsort(ticks, kind="stable")

    sessions = plain_array(session[order])
    turns = plain_array(_running_sum(np.ones_like(session), first)[order])
    columns: dict[str, FieldValues] = {
        "id": TurnNames(sessions, turns),
        "prompt_tokens": plain_array(prompt[order]),
        "output_tokens": plain_array(answer[order]),
        "arrival_s": plain_array((ticks[order] - ticks[order[0]]) / TICKS_PER_S),
        "max_tokens": Constant(shape.answer.cap),
        "prefix_ids": _ranges(
            prompt, session, system, shape.system_tokens, shape.block_size, order
        ),
        "session": NamedBy("s", sessions),
        "turn": turns,
        "parent": TurnNames(sessions, turns, back=1),
        "think_s": OptionalFloats(
            plain_array(np.where(first, np.nan, thinks / TICKS_PER_S)[order])
        ),
        "cls": Constant("chat"),
    }
    meta = made("chat", f"chat({shape}, {arrivals})", seed, num_requests)
    return _in_blocks(Workload(RequestTable(columns, num_requests), meta), shape.block_size)


def _draw_turns(
    rng: np.random.Generator, num_turns: int, shape: ChatShape
) -> tuple[Ints, Ints, Ints]:
    """Return session number, message length and answer length of each turn, session by session.
    There are exactly `num_turns`.
    """
    parts: list[tuple[Ints, Ints, Ints]] = []
    num_left, num_sessions = num_turns, 0
    while num_left > 0:
        turns = rng.geometric(1 / shape.mean_turns, int(num_left / shape.mean_turns) + 16)
        session = np.repeat(np.arange(num_sessions, num_sessions + len(turns)), turns)
        user, answer = shape.user.sample(rng, len(session)), shape.answer.sample(rng, len(session))
        first = np.diff(session, prepend=-1) > 0
        fits = shape.system_tokens + _running_sum(user + answer, first) <= shape.max_context
        parts.append((session[fits], user[fits], answer[fits]))
        num_left -= int(np.count_nonzero(fits))
        num_sessions += len(turns)
    session, user, answer = (
        np.concatenate(column)[:num_turns] for column in zip(*parts, strict=True)
    )
    return session, user, answer


def _running_sum(values: Ints, first: npt.NDArray[np.bool_]) -> Ints:
    """Return the cumulated values. The sum starts again at each row where `first` is true."""
    total = np.cumsum(values)
    result: Ints = total - (total - values)[first][np.cumsum(first) - 1]
    return result


def _ranges(
    prompt: Ints, owner: Ints, group: Ints, shared_tokens: int, block_size: int, order: Ints
) -> PrefixRanges:
    """Return the ids of the prompts' full blocks: first those of the shared prefix, by group, then
    consecutive ids of the owner.

    `owner` ascends; a row's prompt begins with the prompts of its owner's earlier rows.
    """
    num_shared = shared_tokens // block_size
    num_own = prompt // block_size - num_shared
    last = np.diff(owner, append=owner[-1] + 1) > 0
    owned = np.zeros(int(owner[-1]) + 1, dtype=np.int64)
    owned[owner[last]] = num_own[last]
    own_starts = (int(group.max()) + 1) * num_shared + np.cumsum(owned) - owned
    starts = own_starts[owner]
    heads = group * num_shared
    parts: list[array[int]] = [
        plain_array(p[order]) for p in (heads, heads + num_shared, starts, starts + num_own)
    ]
    return PrefixRanges(*parts)


def _in_blocks(workload: Workload, block_size: int) -> Workload:
    meta = replace(workload.meta, block_size=block_size, block_id_kind="chained", last_block="full")
    return replace(workload, meta=meta)


@dataclass(frozen=True)
class SharedPrefixShape:
    """Requests that begin with one of a few long prompts (few-shot examples, system prompts,
    tools).

    Group g is chosen with weight 1/g**skew: 0 is uniform, 1 is Zipf.
    """

    num_groups: int = 8
    shared_tokens: int = 1024
    skew: float = 1.0
    question: LogNormal = MESSAGE
    answer: LogNormal = ANSWER
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("num_groups", "shared_tokens", "block_size"):
            at_least(name, getattr(self, name))
        if not 0 <= self.skew <= 100:
            raise TraceError(f"skew is {self.skew!r}, must be 0..100")


def shared_prefix(
    num_requests: int,
    shape: SharedPrefixShape | None = None,
    arrivals: Arrivals | None = None,
    seed: int = 0,
) -> Workload:
    """Make requests in groups with a shared prefix.

    Args:
        num_requests: Number of requests.
        shape: Groups and lengths.
        arrivals: Arrival process; by default Poisson with 1/s.
        seed: Seed of the random numbers.
    """
    at_least("num_requests", num_requests)
    shape = shape or SharedPrefixShape()
    arrivals = arrivals or Poisson(1.0)
    rng = generator(seed)
    weights = np.arange(1, shape.num_groups + 1, dtype=np.float64) ** -shape.skew
    group = np.searchsorted(
        np.cumsum(weights / weights.sum())[:-1], rng.random(num_requests), side="right"
    )
    prompt = shape.shared_tokens + shape.question.sample(rng, num_requests)
    rows = np.arange(num_requests)
    columns: dict[str, FieldValues] = {
        "id": Numbered(),
        "prompt_tokens": plain_array(prompt),
        "output_tokens": plain_array(shape.answer.sample(rng, num_requests)),
        "arrival_s": plain_array(arrivals.times(rng, num_requests)),
        "max_tokens": Constant(shape.answer.cap),
        "prefix_ids": _ranges(prompt, rows, group, shape.shared_tokens, shape.block_size, rows),
        "cls": NamedBy("group-", plain_array(group)),
    }
    meta = made("shared-prefix", f"shared_prefix({shape}, {arrivals})", seed, num_requests)
    return _in_blocks(Workload(RequestTable(columns, num_requests), meta), shape.block_size)


@dataclass(frozen=True)
class ReasoningShape:
    """Problems that are each answered many times. `between_share` is the share of the variance of
    log lengths that lies between problems.
    """

    num_problems: int
    mu: float
    sigma: float
    samples: int = 32
    cap: int = 32_768
    between_share: float = 0.6
    prompt_lowest: int = 80
    prompt_highest: int = 150

    def __post_init__(self) -> None:
        for name in ("num_problems", "samples", "prompt_lowest"):
            at_least(name, getattr(self, name))
        at_least("prompt_highest", self.prompt_highest, self.prompt_lowest)
        if not 0 <= self.between_share <= 1:
            raise TraceError(f"between_share is {self.between_share!r}, must be 0..1")
        LogNormal(self.mu, self.sigma, self.cap)


REASONING_SHAPES = {
    # Output lengths of Qwen3-8B thinking: the mean is published for AIME 24 and estimated for the
    # others; sigma is fitted.
    "aime24": ReasoningShape(30, 9.486, 0.612),
    "amc23": ReasoningShape(40, 8.94, 0.62),
    "math500": ReasoningShape(500, 8.32, 0.75),
}


def reasoning(
    shape: ReasoningShape | str = "amc23", seed: int = 0, arrivals: Arrivals | None = None
) -> Workload:
    """Sample every problem `shape.samples` times.

    Samples of one problem have the same prompt (`prompt_ids`), and `max_tokens` is the shape's cap.

    Args:
        shape: A `ReasoningShape`, or a name of `REASONING_SHAPES`.
        seed: Seed of the random numbers.
        arrivals: Arrival process; by default all requests arrive at t = 0.
    """
    name = shape if isinstance(shape, str) else "custom"
    if isinstance(shape, str):
        if shape not in REASONING_SHAPES:
            raise TraceError(unknown_choice("reasoning shape", shape, REASONING_SHAPES))
        shape = REASONING_SHAPES[shape]
    rng = generator(seed)
    size = (shape.num_problems, shape.samples)
    prompt_lengths = rng.integers(
        shape.prompt_lowest, shape.prompt_highest, shape.num_problems, endpoint=True
    )
    between = rng.standard_normal((shape.num_problems, 1)) * np.sqrt(shape.between_share)
    within = rng.standard_normal(size) * np.sqrt(1 - shape.between_share)
    outputs = LogNormal(shape.mu, shape.sigma, shape.cap).from_normal(between + within).tolist()
    prompts = [
        tuple(rng.integers(FIRST_TOKEN_ID, END_TOKEN_ID, n).tolist())
        for n in prompt_lengths.tolist()
    ]
    times = (arrivals or Together()).times(rng, shape.num_problems * shape.samples).tolist()
    requests = tuple(
        TraceRequest(
            id=f"p{problem}-s{sample}",
            prompt_tokens=len(prompts[problem]),
            output_tokens=outputs[problem][sample],
            arrival_s=times[problem * shape.samples + sample],
            max_tokens=shape.cap,
            prompt_ids=prompts[problem],
            cls="reasoning",
        )
        for problem in range(shape.num_problems)
        for sample in range(shape.samples)
    )
    parameters = ", ".join(f"{f.name}={getattr(shape, f.name)}" for f in fields(shape))
    return Workload(
        requests,
        made(
            f"reasoning-{name}",
            f"reasoning({parameters}, {arrivals or Together()})",
            seed,
            len(requests),
        ),
    )


def fixed(
    num_requests: int = 4000,
    prompt: int = 512,
    output: int = 1024,
    rate_per_s: float = 20.0,
    seed: int = 0,
) -> Workload:
    """Make requests of equal lengths without shared prefixes and with Poisson arrivals. The
    defaults are the benchmark workload FIX.

    Args:
        num_requests: Number of requests.
        prompt: Prompt tokens of each.
        output: Output tokens of each.
        rate_per_s: Mean arrivals per second.
        seed: Seed of the arrival times.
    """
    for name, value in (("num_requests", num_requests), ("prompt", prompt), ("output", output)):
        at_least(name, value)
    times = Poisson(rate_per_s).times(generator(seed), num_requests).tolist()
    requests = tuple(
        TraceRequest(
            id=str(i), prompt_tokens=prompt, output_tokens=output, arrival_s=time, max_tokens=output
        )
        for i, time in enumerate(times)
    )
    return Workload(
        requests, made("fixed", f"fixed({prompt}+{output}, {rate_per_s}/s)", seed, num_requests)
    )


def bursty(
    num_requests: int, arrivals: Arrivals, prompt: LogNormal, output: LogNormal, seed: int = 0
) -> Workload:
    """Make independent requests with lognormal lengths and no shared prefixes.

    Args:
        num_requests: Number of requests.
        arrivals: Arrival process, such as `OnOff` for bursts.
        prompt: Prompt lengths.
        output: Output lengths; `max_tokens` is its cap.
        seed: Seed of the random numbers.
    """
    at_least("num_requests", num_requests)
    rng = generator(seed)
    times = arrivals.times(rng, num_requests).tolist()
    prompts, outputs = (
        prompt.sample(rng, num_requests).tolist(),
        output.sample(rng, num_requests).tolist(),
    )
    requests = tuple(
        TraceRequest(
            id=str(i), prompt_tokens=p, output_tokens=o, arrival_s=time, max_tokens=output.cap
        )
        for i, (time, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    )
    return Workload(
        requests, made("bursty", f"bursty({arrivals}, {prompt}, {output})", seed, num_requests)
    )


PREFIX = "synth:"
NUMBER_NAMES = {"int": int, "float": float}
ARRIVAL_KINDS: dict[
    str, tuple[Callable[..., Arrivals], int, int]
] = {  # kind -> what makes it, fewest and most numbers
    "together": (Together, 0, 0),
    "poisson": (Poisson, 1, 1),
    "gamma": (Gamma, 2, 2),
    "onoff": (OnOff, 3, 4),
}


def arrivals_from(spec: str) -> Arrivals:
    """The arrival process of `kind:number:...`. Raises `TraceError` with the choices."""
    kind, *cells = spec.split(":")
    if kind not in ARRIVAL_KINDS:
        raise TraceError(unknown_choice("arrivals", kind, ARRIVAL_KINDS))
    make, fewest, most = ARRIVAL_KINDS[kind]
    names = [f.name for f in fields(make)]  # type: ignore[arg-type]
    if not fewest <= len(cells) <= most:
        raise TraceError(f"arrivals {spec!r}: {kind} takes {', '.join(names) or 'no number'}")
    try:
        return make(*map(float, cells))
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"arrivals {spec!r}: {error}") from None


Settings = Mapping[str, Any]


def _reasoning(shape: str) -> Callable[[Settings, int, Arrivals | None], Workload]:
    def make(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
        chosen = replace(REASONING_SHAPES[shape], **settings) if settings else shape
        return reasoning(chosen, seed, arrivals)

    return make


def _sharing(
    make: Callable[..., Workload], shape: type[Any]
) -> Callable[[Settings, int, Arrivals | None], Workload]:
    def made(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
        rest = {name: value for name, value in settings.items() if name != "num_requests"}
        return make(settings.get("num_requests", 1000), shape(**rest), arrivals, seed)

    return made


def _fixed(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
    if arrivals is not None:
        raise TraceError(
            f"{PREFIX}fixed has Poisson arrivals: write rate_per_s=... instead of arrivals"
        )
    return fixed(**settings, seed=seed)


def _numbers(cls: type[Any]) -> dict[str, type[float]]:
    """The settings of a shape that are plain numbers."""
    types = {item.name: getattr(item.type, "__name__", str(item.type)) for item in fields(cls)}
    return {name: NUMBER_NAMES[kind] for name, kind in types.items() if kind in NUMBER_NAMES}


@dataclass(frozen=True)
class Kind:
    """One kind of made-up workload: the numbers it takes, and what makes it."""

    settings: Mapping[str, type[float]]
    make: Callable[[Settings, int, Arrivals | None], Workload]


KINDS: dict[str, Kind] = {
    **{name: Kind(_numbers(ReasoningShape), _reasoning(name)) for name in REASONING_SHAPES},
    "chat": Kind({"num_requests": int} | _numbers(ChatShape), _sharing(chat, ChatShape)),
    "shared-prefix": Kind(
        {"num_requests": int} | _numbers(SharedPrefixShape),
        _sharing(shared_prefix, SharedPrefixShape),
    ),
    "fixed": Kind({"num_requests": int, "prompt": int, "output": int, "rate_per_s": float}, _fixed),
}


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    kind, _, query = spec.removeprefix(PREFIX).partition("?")
    settings: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise TraceError(f"in {spec!r}: {part!r} is not of the form key=value")
        if key in settings:
            raise TraceError(f"in {spec!r}: {key} occurs twice")
        settings[key] = value
    return kind, settings


def seed_of(spec: str) -> int:
    """Return the seed that a name has, 0 without one. Raises TraceError."""
    return int(_number("seed", _parse(spec)[1].get("seed", "0"), int))


def most_requests(spec: str) -> int:
    """Return how many requests the workload of a name has, without making it. Raises
    TraceError.
    """
    kind, given = _parse(spec)
    if kind in REASONING_SHAPES:
        shape = REASONING_SHAPES[kind]
        numbers = {"num_problems": shape.num_problems, "samples": shape.samples}
    else:
        numbers = {"num_requests": 1000}
    found = 1
    for name, default in numbers.items():
        found *= int(_number(name, given.get(name, str(default)), int))
    return found


def make_workload(spec: str, seed: int | None = None) -> Workload:
    """Make the workload of a name; `seed` replaces that of the name. Raises TraceError."""
    name, given = _parse(spec)
    if name not in KINDS:
        raise TraceError(unknown_choice("kind of made-up workload", name, list(KINDS)))
    kind = KINDS[name]
    arrivals: Arrivals | None = None
    settings: dict[str, float] = {}
    chosen = int(_number("seed", given.pop("seed", "0"), int))
    for key, text in given.items():
        if key == "arrivals":
            try:
                arrivals = arrivals_from(text)
            except TraceError as error:
                raise TraceError(f"in {spec!r}: {error}") from error
        elif key in kind.settings:
            settings[key] = _number(key, text, kind.settings[key])
        else:
            raise TraceError(
                unknown_choice(
                    f"setting of {PREFIX}{name}", key, ["seed", "arrivals", *kind.settings]
                )
            )
    try:
        workload = kind.make(settings, chosen if seed is None else seed, arrivals)
        return replace(workload, meta=replace(workload.meta, name=spec))
    except TraceError as error:
        raise TraceError(f"in {spec!r}: {error}") from error


def _number(key: str, text: str, number: type[float]) -> float:
    try:
        return number(text)
    except ValueError:
        kind = "a whole number" if number is int else "a number"
        raise TraceError(f"{key} must be {kind}, not {text!r}") from None
