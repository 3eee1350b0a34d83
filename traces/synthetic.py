"""Workloads made up by rule: reasoning, fixed lengths, bursts, and (from `traces.sharing`) chat and shared prefixes.

The same arguments and seed give the same requests on any machine: one PCG64 generator, drawn from in a fixed order.
"""

from dataclasses import dataclass, fields

import numpy as np

from traces.arrivals import Arrivals, Poisson, Together
from traces.recipe import END_TOKEN_ID, FIRST_TOKEN_ID, LogNormal, at_least, generator, made
from traces.sharing import ChatShape, SharedPrefixShape, chat, shared_prefix
from traces.workload import TraceError, TraceRequest, Workload

__all__ = [
    "REASONING_SHAPES",
    "ChatShape",
    "LogNormal",
    "ReasoningShape",
    "SharedPrefixShape",
    "bursty",
    "chat",
    "fixed",
    "reasoning",
    "shared_prefix",
]


@dataclass(frozen=True)
class ReasoningShape:
    """Problems answered many times at length; `between_share` of the log-variance lies between problems."""

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
    # Lengths of Qwen3-8B thinking: means published for AIME 24, estimated for the others; sigma fitted.
    "aime24": ReasoningShape(30, 9.486, 0.612),
    "amc23": ReasoningShape(40, 8.94, 0.62),
    "math500": ReasoningShape(500, 8.32, 0.75),
}


def reasoning(shape: ReasoningShape | str = "amc23", seed: int = 0, arrivals: Arrivals | None = None) -> Workload:
    """Every problem sampled `shape.samples` times, all at t = 0 unless an arrival process is given.

    Samples of one problem have the same prompt (`prompt_ids`), `max_tokens` is the shape's cap. A shape is a
    `ReasoningShape` or the name of a known one.
    """
    name = shape if isinstance(shape, str) else "custom"
    if isinstance(shape, str):
        if shape not in REASONING_SHAPES:
            raise TraceError(f"unknown reasoning shape {shape!r}; known are {', '.join(REASONING_SHAPES)}")
        shape = REASONING_SHAPES[shape]
    rng = generator(seed)
    size = (shape.num_problems, shape.samples)
    prompt_lengths = rng.integers(shape.prompt_lowest, shape.prompt_highest, shape.num_problems, endpoint=True)
    between = rng.standard_normal((shape.num_problems, 1)) * np.sqrt(shape.between_share)
    within = rng.standard_normal(size) * np.sqrt(1 - shape.between_share)
    outputs = LogNormal(shape.mu, shape.sigma, shape.cap).from_normal(between + within).tolist()
    prompts = [tuple(rng.integers(FIRST_TOKEN_ID, END_TOKEN_ID, n).tolist()) for n in prompt_lengths.tolist()]
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
        requests, made(f"reasoning-{name}", f"reasoning({parameters}, {arrivals or Together()})", seed, len(requests))
    )


def fixed(
    num_requests: int = 4000, prompt: int = 512, output: int = 1024, rate_per_s: float = 20.0, seed: int = 0
) -> Workload:
    """Requests of one shape that share nothing, Poisson arrivals; the defaults are the benchmark workload FIX."""
    for name, value in (("num_requests", num_requests), ("prompt", prompt), ("output", output)):
        at_least(name, value)
    times = Poisson(rate_per_s).times(generator(seed), num_requests).tolist()
    requests = tuple(
        TraceRequest(id=str(i), prompt_tokens=prompt, output_tokens=output, arrival_s=time, max_tokens=output)
        for i, time in enumerate(times)
    )
    return Workload(requests, made("fixed", f"fixed({prompt}+{output}, {rate_per_s}/s)", seed, num_requests))


def bursty(num_requests: int, arrivals: Arrivals, prompt: LogNormal, output: LogNormal, seed: int = 0) -> Workload:
    """Independent requests with lognormal lengths under any arrival process (`OnOff`: bursts), sharing nothing."""
    at_least("num_requests", num_requests)
    rng = generator(seed)
    times = arrivals.times(rng, num_requests).tolist()
    prompts, outputs = prompt.sample(rng, num_requests).tolist(), output.sample(rng, num_requests).tolist()
    requests = tuple(
        TraceRequest(id=str(i), prompt_tokens=p, output_tokens=o, arrival_s=time, max_tokens=output.cap)
        for i, (time, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    )
    return Workload(requests, made("bursty", f"bursty({arrivals}, {prompt}, {output})", seed, num_requests))
