"""`zlab trace synth KIND`: workloads made up by rule. The same options and seed write the same file."""

import difflib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from traces.arrivals import Arrivals, Gamma, OnOff, Poisson, Together
from traces.servegen import ServeGenSource
from traces.servegen import servegen as draw_servegen
from traces.synthetic import (
    REASONING_SHAPES,
    ChatShape,
    LogNormal,
    SharedPrefixShape,
)
from traces.synthetic import bursty as make_bursty
from traces.synthetic import chat as make_chat
from traces.synthetic import fixed as make_fixed
from traces.synthetic import reasoning as make_reasoning
from traces.synthetic import shared_prefix as make_shared_prefix
from traces.workload import TraceError
from zlab.trace_output import OutputFormat, asked_wrongly, write_workload

synth = typer.Typer(no_args_is_help=True, help="Make up a workload: one command a kind.")

Out = Annotated[Path, typer.Option(dir_okay=False, help="Where to write; gzipped when it ends in .gz.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same workload.")]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Prompt tokens per prefix id.")]
To = Annotated[OutputFormat, typer.Option("--to", help="The format to write.")]
ArrivalSpec = Annotated[
    str,
    typer.Option(
        "--arrivals",
        help="together, poisson:RATE, gamma:RATE:CV or onoff:RATE:ON_S:OFF_S[:OFF_RATE]; rates a second.",
    ),
]

ARRIVAL_KINDS: dict[str, tuple[Callable[..., Arrivals], int, int]] = {  # kind -> what makes it, fewest and most numbers
    "together": (Together, 0, 0),
    "poisson": (Poisson, 1, 1),
    "gamma": (Gamma, 2, 2),
    "onoff": (OnOff, 3, 4),
}


def arrivals_from(spec: str) -> Arrivals:
    """The arrival process of `kind:number:...`. Raises `TraceError` with the choices."""
    kind, *cells = spec.split(":")
    if kind not in ARRIVAL_KINDS:
        near = difflib.get_close_matches(kind, ARRIVAL_KINDS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise TraceError(f"unknown arrivals {kind!r}{hint}; known are {', '.join(ARRIVAL_KINDS)}")
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


@synth.command()
def reasoning(
    out: Out,
    shape: Annotated[str, typer.Option(help=f"Lengths like those of {', '.join(REASONING_SHAPES)}.")] = "amc23",
    problems: Annotated[int | None, typer.Option(min=1, show_default="the shape's", help="Number of problems.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, show_default="32", help="Samples a problem.")] = None,
    mu: Annotated[float | None, typer.Option(help="Mean of the output length's logarithm.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the output length's logarithm.")] = None,
    cap: Annotated[int | None, typer.Option(min=1, show_default="32768", help="Longest output.")] = None,
    between_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, show_default="0.6", help="Share of the log-variance that lies between problems."),
    ] = None,
    arrivals: ArrivalSpec = "together",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Problems sampled many times, long outputs, all samples of a problem with the same prompt."""
    given: dict[str, Any] = {
        "num_problems": problems,
        "samples": samples,
        "mu": mu,
        "sigma": sigma,
        "cap": cap,
        "between_share": between_share,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    with asked_wrongly():
        if shape not in REASONING_SHAPES:
            near = difflib.get_close_matches(shape, REASONING_SHAPES, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise TraceError(f"unknown reasoning shape {shape!r}{hint}; known are {', '.join(REASONING_SHAPES)}")
        chosen = replace(REASONING_SHAPES[shape], **changes) if changes else shape
        write_workload(make_reasoning(chosen, seed, arrivals_from(arrivals)), out, to)


@synth.command()
def chat(
    out: Out,
    requests: Requests = 10_000,
    turns: Annotated[float, typer.Option(min=1, help="Mean number of turns a session.")] = 4.0,
    system_prompts: Annotated[int, typer.Option(min=1, help="Number of different system prompts.")] = 16,
    system_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a system prompt.")] = 320,
    max_context: Annotated[int, typer.Option(min=1, help="A session ends before passing so many tokens.")] = 16_384,
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and the next message.")] = 30.0,
    block_size: BlockSize = 16,
    arrivals: ArrivalSpec = "poisson:1",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Sessions of several turns whose prompts grow and share their beginnings; arrivals are those of sessions."""
    with asked_wrongly():
        shape = ChatShape(
            mean_turns=turns,
            num_system_prompts=system_prompts,
            system_tokens=system_tokens,
            max_context=max_context,
            mean_think_s=think,
            block_size=block_size,
        )
        write_workload(make_chat(requests, shape, arrivals_from(arrivals), seed), out, to)


@synth.command()
def shared_prefix(
    out: Out,
    requests: Requests = 10_000,
    groups: Annotated[int, typer.Option(min=1, help="Number of shared beginnings.")] = 8,
    shared_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a shared beginning.")] = 1024,
    skew: Annotated[float, typer.Option(help="Group g has weight 1/g**skew: 0 evenly, 1 Zipf.")] = 1.0,
    block_size: BlockSize = 16,
    arrivals: ArrivalSpec = "poisson:1",
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Single requests that begin with one of a few long prompts."""
    with asked_wrongly():
        shape = SharedPrefixShape(groups, shared_tokens, skew, block_size=block_size)
        write_workload(make_shared_prefix(requests, shape, arrivals_from(arrivals), seed), out, to)


@synth.command()
def bursty(
    out: Out,
    requests: Requests = 10_000,
    arrivals: ArrivalSpec = "onoff:20:10:50",
    prompt_mu: Annotated[float, typer.Option(help="Mean of the prompt length's logarithm.")] = 6.0,
    prompt_sigma: Annotated[float, typer.Option(help="Its standard deviation.")] = 1.0,
    prompt_cap: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = 8192,
    output_mu: Annotated[float, typer.Option(help="Mean of the output length's logarithm.")] = 5.0,
    output_sigma: Annotated[float, typer.Option(help="Its standard deviation.")] = 0.8,
    output_cap: Annotated[int, typer.Option(min=1, help="Longest output.")] = 2048,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Independent requests under any arrival process, on/off bursts if not told otherwise."""
    with asked_wrongly():
        prompt = LogNormal(prompt_mu, prompt_sigma, prompt_cap)
        output = LogNormal(output_mu, output_sigma, output_cap)
        write_workload(make_bursty(requests, arrivals_from(arrivals), prompt, output, seed), out, to)


@synth.command()
def fixed(
    out: Out,
    requests: Requests = 4000,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 1024,
    rate: Annotated[float, typer.Option(help="Poisson arrivals a second.")] = 20.0,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Requests of one shape that share nothing; as it stands, the benchmark workload FIX."""
    with asked_wrongly():
        write_workload(make_fixed(requests, prompt, output, rate, seed), out, to)


@synth.command()
def servegen(
    out: Out,
    rates: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="ServeGen's rates by window (CSV).")],
    lengths: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="ServeGen's length distributions (JSON).")],
    start: Annotated[float, typer.Option(min=0, help="Begin at this second of the source's clock.")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(min=0, show_default="all the source has", help="Seconds to draw.")
    ] = None,
    rate_factor: Annotated[float, typer.Option(help="Multiply the rates.")] = 1.0,
    seed: Seed = 0,
    to: To = OutputFormat.native,
) -> None:
    """Draw requests from ServeGen's measured rates and lengths."""
    source = ServeGenSource.read(rates, lengths)
    with asked_wrongly():
        write_workload(draw_servegen(source, seed, start, duration, rate_factor), out, to)
