"""Where a command's workload comes from: a trace file, or a made-up one named `synth:KIND?key=value&...`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from traces.arrivals import Arrivals
from traces.formats import read_trace
from traces.formats.detect import named_format
from traces.synthetic import (
    REASONING_SHAPES,
    ChatShape,
    ReasoningShape,
    SharedPrefixShape,
    chat,
    fixed,
    reasoning,
    shared_prefix,
)
from traces.workload import TraceError, Workload
from zlab.outcome import MisuseError
from zlab.progress import Bar
from zlab.trace_synth import arrivals_from

PREFIX = "synth:"
NUMBER_NAMES = {"int": int, "float": float}


@dataclass(frozen=True)
class Source:
    """A workload that can be made; a synthetic one with any seed."""

    spec: str
    format: str | None = None
    skip_bad: bool = False

    @property
    def is_synthetic(self) -> bool:
        """Whether it is made up by rule, so that another seed gives another workload of the same kind."""
        return self.spec.startswith(PREFIX)

    @property
    def seed(self) -> int:
        """The seed that the spec names, 0 where it names none."""
        seed = _parse(self.spec)[1].get("seed", "0")
        return int(_number("seed", seed, int))

    def read(self, seed: int | None = None, silent: bool = False) -> Workload:
        """The workload; `seed` replaces the spec's. Raises TraceError on bad content, MisuseError on a bad name."""
        if self.is_synthetic:
            if self.format is not None or self.skip_bad:
                raise MisuseError(f"{self.spec} is no file: --format and --skip-bad-rows do not apply")
            return _make(self.spec, seed)
        if seed is not None:
            raise MisuseError(f"{self.spec} is one fixed workload: only a {PREFIX}... spec has seeds")
        if self.format is not None:
            try:
                named_format(self.format)
            except TraceError as error:
                raise MisuseError(str(error)) from error
        if not Path(self.spec).is_file():
            raise MisuseError(
                f"no trace file {self.spec!r} (made-up workloads: {', '.join(f'{PREFIX}{k}' for k in KINDS)})"
            )
        with Bar(f"reading {Path(self.spec).name}", silent=silent) as bar:
            return read_trace(self.spec, self.format, self.skip_bad, on_progress=bar.share)


Settings = Mapping[str, Any]


def _reasoning(shape: str) -> Callable[[Settings, int, Arrivals | None], Workload]:
    def make(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
        chosen = replace(REASONING_SHAPES[shape], **settings) if settings else shape
        return reasoning(chosen, seed, arrivals)

    return make


def _sharing(make: Callable[..., Workload], shape: type[Any]) -> Callable[[Settings, int, Arrivals | None], Workload]:
    def made(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
        rest = {name: value for name, value in settings.items() if name != "num_requests"}
        return make(settings.get("num_requests", 1000), shape(**rest), arrivals, seed)

    return made


def _fixed(settings: Settings, seed: int, arrivals: Arrivals | None) -> Workload:
    if arrivals is not None:
        raise MisuseError(f"{PREFIX}fixed has Poisson arrivals: write rate_per_s=... instead of arrivals")
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
        {"num_requests": int} | _numbers(SharedPrefixShape), _sharing(shared_prefix, SharedPrefixShape)
    ),
    "fixed": Kind({"num_requests": int, "prompt": int, "output": int, "rate_per_s": float}, _fixed),
}


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    kind, _, query = spec.removeprefix(PREFIX).partition("?")
    settings: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise MisuseError(f"in {spec!r}: {part!r} is not of the form key=value")
        if key in settings:
            raise MisuseError(f"in {spec!r}: {key} stands twice")
        settings[key] = value
    return kind, settings


def _make(spec: str, seed: int | None) -> Workload:
    name, given = _parse(spec)
    if name not in KINDS:
        raise MisuseError(unknown("kind of made-up workload", name, list(KINDS)))
    kind = KINDS[name]
    arrivals: Arrivals | None = None
    settings: dict[str, float] = {}
    chosen = int(_number("seed", given.pop("seed", "0"), int))
    for key, text in given.items():
        if key == "arrivals":
            try:
                arrivals = arrivals_from(text)
            except TraceError as error:
                raise MisuseError(f"in {spec!r}: {error}") from error
        elif key in kind.settings:
            settings[key] = _number(key, text, kind.settings[key])
        else:
            raise MisuseError(unknown(f"setting of {PREFIX}{name}", key, ["seed", "arrivals", *kind.settings]))
    try:
        workload = kind.make(settings, chosen if seed is None else seed, arrivals)
        return replace(workload, meta=replace(workload.meta, name=spec))
    except TraceError as error:
        raise MisuseError(f"in {spec!r}: {error}") from error


def _number(key: str, text: str, number: type[float]) -> float:
    try:
        return number(text)
    except ValueError:
        kind = "a whole number" if number is int else "a number"
        raise MisuseError(f"{key} must be {kind}, not {text!r}") from None


def unknown(what: str, value: str, choices: list[str]) -> str:
    """The message for a name that is not among the choices."""
    near = get_close_matches(value, choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint} (choices: {', '.join(choices)})"
