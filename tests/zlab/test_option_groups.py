"""A dataclass as one parameter of a command stands for all its fields, and every command names an option alike."""

import inspect
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from engine.build import MEMORY_SHARE
from engine.server.watch import WatchSettings
from policies.core.limits import Limits
from sim.memory import MemorySettings
from sim.scenario import DEFAULTS, Scenario
from zlab import app
from zlab.cluster import SpreadOptions
from zlab.engine_options import MemoryShare
from zlab.option_groups import with_groups
from zlab.options import MemoryUtilisation, ReadingOptions, ScenarioOptions, SizeOptions
from zlab.serve_options import WatchOptions

Depth = Annotated[int, typer.Option("--depth", min=1, help="How deep.")]


@dataclass(frozen=True)
class Inner:
    depth: Depth = 3
    wide: Annotated[bool, typer.Option("--wide", help="How wide.")] = False


@dataclass(frozen=True)
class Outer:
    colour: Annotated[str, typer.Option("--colour", help="Which colour.")] = "red"
    inner: Inner = Inner()
    weight: Annotated[float | None, typer.Option("--weight", help="How heavy.")] = None


def command(seen: list[Any]) -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @with_groups
    def paint(
        what: Annotated[str, typer.Argument()], *, outer: Outer, times: Annotated[int, typer.Option()] = 1
    ) -> None:
        """Paint something."""
        seen.extend((what, outer, times))

    return made


@pytest.mark.parametrize(
    ("words", "outer", "times"),
    [
        ((), Outer(), 1),
        (("--wide", "--weight", "2"), Outer(inner=Inner(wide=True), weight=2.0), 1),
        (("--depth", "7", "--times", "2", "--colour", "blue"), Outer("blue", Inner(7)), 2),
    ],
)
def test_the_command_is_called_with_the_groups_made(words: tuple[str, ...], outer: Outer, times: int) -> None:
    seen: list[Any] = []
    result = CliRunner().invoke(command(seen), ["door", *words])
    assert result.exit_code == 0, result.output
    assert seen == ["door", outer, times]


def test_a_fields_own_bounds_and_help_hold() -> None:
    seen: list[Any] = []
    result = CliRunner().invoke(command(seen), ["door", "--depth", "0"])
    assert result.exit_code == 2
    assert "--depth" in result.output
    assert "greater than or equal to 1" in " ".join(result.output.replace("│", " ").split())
    shown = CliRunner().invoke(command(seen), ["--help"]).output
    assert "Paint something." in shown
    places = [shown.index(name) for name in ("--colour", "--depth", "--wide", "--weight", "--times")]
    assert places == sorted(places)
    assert seen == []


def test_what_could_not_be_told_apart_or_has_no_default_is_refused() -> None:
    @dataclass(frozen=True)
    class Twin:
        depth: Depth = 1

    @dataclass(frozen=True)
    class Lacking:
        depth: Depth = field()

    def twice(one: Inner, other: Twin) -> None: ...
    def lacking(one: Lacking) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'depth'"):
        with_groups(twice)
    with pytest.raises(AssertionError, match=r"Lacking\.depth has no default"):
        with_groups(lacking)


def parameters(name: str) -> dict[str, inspect.Parameter]:
    callback = next(one.callback for one in app.registered_commands if one.callback and one.callback.__name__ == name)
    return dict(inspect.signature(callback).parameters)


@pytest.mark.parametrize("name", ["replay", "compare", "sweep", "validate"])
def test_every_command_that_simulates_takes_all_of_a_scenario(name: str) -> None:
    found = parameters(name)
    options = [item.name for group in (SizeOptions, ScenarioOptions) for item in fields(group) if item.name != "sizes"]
    assert len(options) == 11
    assert {option: found[option].default for option in options} == {
        option: getattr(DEFAULTS, option) for option in options
    }
    assert ScenarioOptions().scenario() == DEFAULTS
    chosen = ScenarioOptions(gpu="h100", sizes=SizeOptions(block_size=32), cost="measured")
    assert chosen.scenario("full-kv") == Scenario("full-kv", "h100", block_size=32, cost="measured")


def shown(group: Any) -> dict[str, Any]:
    """By field, the default that the help names where the option's own is None."""
    hints = get_type_hints(group, include_extras=True)
    options = {item.name: hints[item.name].__metadata__[0] for item in fields(group) if item.default is None}
    return {name: option.show_default for name, option in options.items()}


def test_the_help_names_the_defaults_that_hold() -> None:
    """They are chosen elsewhere, so the options only repeat them."""
    limits = {item.name: item.default for item in fields(Limits)}
    sizes = shown(SizeOptions)
    assert sizes.pop("kv_blocks") == "as many as fit"
    assert sizes.pop("max_model_len") == "the model's limit"
    assert sizes == {name: str(limits[name]) for name in ("max_batched_tokens", "max_running", "host_blocks")}
    watched = {item.name: item.default for item in fields(WatchSettings)}
    watch = shown(WatchOptions)
    assert watch.pop("gates") is True, "there is no default"
    assert watch == {name: f"{watched[name]:g}" for name in ("window_s", "min_requests")}
    memory = [get_args(option)[1].show_default for option in (MemoryShare, MemoryUtilisation)]
    assert memory == [f"{MEMORY_SHARE:g}", f"{MemorySettings().utilisation:g}"]


@pytest.mark.parametrize("name", ["replay", "compare", "sweep", "validate", "bench", "parity", "serve"])
def test_an_option_is_the_same_in_every_command(name: str) -> None:
    known = {
        item.name: item.type
        for group in (SizeOptions, ScenarioOptions, ReadingOptions, SpreadOptions)
        for item in fields(group)
    }
    found = {option: one.annotation for option, one in parameters(name).items() if option in known}
    own = {
        "bench": {"model", "memory_utilisation"},
        "parity": {"model"},
        "serve": {"gpu", "memory_utilisation", "model"},
    }.get(name, set())
    assert len(found) > 6
    assert {option for option, annotation in found.items() if annotation is not known[option]} == own
