"""Made-up workloads whose prompts share beginnings: chat sessions that grow turn by turn, and few-shot groups.

Rows are worked out from a few numbers when looked at, so a million requests take about 100 bytes each.
"""

from array import array
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from traces.arrivals import TICKS_PER_S, Arrivals, Poisson, positive
from traces.columns import Constant, NamedBy, Numbered, PrefixRanges, TurnNames
from traces.recipe import LogNormal, at_least, generator, made
from traces.table import Column, OptionalFloats, RequestTable, plain_array
from traces.workload import TraceError, Workload

Ints = npt.NDArray[np.int64]

MESSAGE = LogNormal(mu=4.1, sigma=1.0, cap=2048)
ANSWER = LogNormal(mu=5.2, sigma=0.8, cap=2048)
"""Lengths of a chat's messages and answers: medians 60 and 181 tokens, an assumption."""


@dataclass(frozen=True)
class ChatShape:
    """Sessions of several turns: each prompt is the system prompt, all turns so far with their answers, and a message.

    Sessions take their system prompt from one of `num_system_prompts`, all equally likely, of `system_tokens` tokens.
    The number of turns is geometric; a session also ends when prompt and answer would pass `max_context`. A user
    answers `mean_think_s` (exponential) after the answer, which is taken to last `s_per_token` a token: times are
    fixed beforehand and do not wait for a slow server.
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
            raise TraceError(f"max_context is {self.max_context}, must hold a longest first turn: {longest} tokens")


def chat(
    num_requests: int, shape: ChatShape | None = None, arrivals: Arrivals | None = None, seed: int = 0
) -> Workload:
    """`num_requests` turns of chat sessions; `arrivals` is the process by which sessions begin (Poisson, 1/s)."""
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
    thinks = np.rint(rng.exponential(shape.mean_think_s, num_requests) * TICKS_PER_S).astype(np.int64)
    answering = np.rint(np.roll(answer, 1) * shape.s_per_token * TICKS_PER_S).astype(np.int64)
    ticks = begins[session] + _running_sum(np.where(first, 0, answering + thinks), first)
    order = np.argsort(ticks, kind="stable")

    sessions = plain_array(session[order])
    turns = plain_array(_running_sum(np.ones_like(session), first)[order])
    columns: dict[str, Column] = {
        "id": TurnNames(sessions, turns),
        "prompt_tokens": plain_array(prompt[order]),
        "output_tokens": plain_array(answer[order]),
        "arrival_s": plain_array((ticks[order] - ticks[order[0]]) / TICKS_PER_S),
        "max_tokens": Constant(shape.answer.cap),
        "prefix_ids": _ranges(prompt, session, system, shape.system_tokens, shape.block_size, order),
        "session": NamedBy("s", sessions),
        "turn": turns,
        "parent": TurnNames(sessions, turns, back=1),
        "think_s": OptionalFloats(plain_array(np.where(first, np.nan, thinks / TICKS_PER_S)[order])),
        "cls": Constant("chat"),
    }
    meta = made("chat", f"chat({shape}, {arrivals})", seed, num_requests)
    return _in_blocks(Workload(RequestTable(columns, num_requests), meta), shape.block_size)


def _draw_turns(rng: np.random.Generator, num_turns: int, shape: ChatShape) -> tuple[Ints, Ints, Ints]:
    """Session number, message and answer length of each turn, session by session, exactly `num_turns` of them."""
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
    session, user, answer = (np.concatenate(column)[:num_turns] for column in zip(*parts, strict=True))
    return session, user, answer


def _running_sum(values: Ints, first: npt.NDArray[np.bool_]) -> Ints:
    """The cumulated values, starting anew at each row where `first` holds."""
    total = np.cumsum(values)
    result: Ints = total - (total - values)[first][np.cumsum(first) - 1]
    return result


def _ranges(prompt: Ints, owner: Ints, group: Ints, shared_tokens: int, block_size: int, order: Ints) -> PrefixRanges:
    """Ids of the prompts' full blocks: the shared beginning's by group, then the owner's own, which run on and on.

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
    parts: list[array[int]] = [plain_array(p[order]) for p in (heads, heads + num_shared, starts, starts + num_own)]
    return PrefixRanges(*parts)


def _in_blocks(workload: Workload, block_size: int) -> Workload:
    meta = replace(workload.meta, block_size=block_size, block_id_kind="chained", last_block="full")
    return replace(workload, meta=meta)


@dataclass(frozen=True)
class SharedPrefixShape:
    """Single requests that begin with one of a few long prompts (few-shot examples, system prompts, tools).

    The g-th group is taken with weight 1/g**skew: 0 is evenly, 1 Zipf.
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
    num_requests: int, shape: SharedPrefixShape | None = None, arrivals: Arrivals | None = None, seed: int = 0
) -> Workload:
    """Requests in groups of a common beginning, otherwise their own; Poisson arrivals, 1/s, unless others are given."""
    at_least("num_requests", num_requests)
    shape = shape or SharedPrefixShape()
    arrivals = arrivals or Poisson(1.0)
    rng = generator(seed)
    weights = np.arange(1, shape.num_groups + 1, dtype=np.float64) ** -shape.skew
    group = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(num_requests), side="right")
    prompt = shape.shared_tokens + shape.question.sample(rng, num_requests)
    rows = np.arange(num_requests)
    columns: dict[str, Column] = {
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
