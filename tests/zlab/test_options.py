"""Every misuse of the command line: exit code, message on stderr with the value and the choices,
nothing on stdout.

A dataclass as one parameter of a command stands for all its fields, and every command names an
option alike.

How what a command cannot import is told: with the extra that brings it.

What the command line refuses by itself, before a command runs, names option, bound or choices, and
value.

One convention over every command that reads a trace or a recording: damaged is 1, not there is
misuse and 2.
"""

import gzip
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.house_source import ROOT
from tests.sim.disguised import change_manifest
from tests.sim.test_fidelity import KEPT
from tests.zlab.command_line import SMALL, errors, zlab
from zlab.cli.console import MisuseError
from zlab.cli.main import app
from zlab.cli.options import (
    MemoryShare,
    MemoryUtilisation,
    ReadingOptions,
    ScenarioOptions,
    SizeOptions,
    SpreadOptions,
    engine_room,
    with_groups,
)
from zlab.cli.serve import WatchOptions
from zlab.engine.engine import MEMORY_SHARE
from zlab.engine.errors import EngineError
from zlab.engine.server.auto_rollback import WatchSettings
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.cost_model import COEFFICIENT_UNITS
from zlab.sim.memory import MemorySettings
from zlab.sim.replay import DEFAULTS, Scenario
from zlab.sim.specs import find_model

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
        what: Annotated[str, typer.Argument()],
        *,
        outer: Outer,
        times: Annotated[int, typer.Option()] = 1,
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
def test_the_command_is_called_with_the_groups_made(
    words: tuple[str, ...], outer: Outer, times: int
) -> None:
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
    places = [
        shown.index(name) for name in ("--colour", "--depth", "--wide", "--weight", "--times")
    ]
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
    callback = next(
        one.callback
        for one in app.registered_commands
        if one.callback and one.callback.__name__ == name
    )
    return dict(inspect.signature(callback).parameters)


@pytest.mark.parametrize("name", ["replay", "compare", "sweep", "validate"])
def test_every_command_that_simulates_takes_all_of_a_scenario(name: str) -> None:
    found = parameters(name)
    options = [
        item.name
        for group in (SizeOptions, ScenarioOptions)
        for item in fields(group)
        if item.name != "sizes"
    ]
    assert len(options) == 12
    assert {option: found[option].default for option in options} == {
        option: getattr(DEFAULTS, option) for option in options
    }
    assert ScenarioOptions().scenario() == DEFAULTS
    chosen = ScenarioOptions(gpu="h100", sizes=SizeOptions(block_size=32), cost="measured")
    assert chosen.scenario("full-kv") == Scenario("full-kv", "h100", block_size=32, cost="measured")


def shown(group: Any) -> dict[str, Any]:
    """By field, the default that the help names where the option's own is None."""
    hints = get_type_hints(group, include_extras=True)
    options = {
        item.name: hints[item.name].__metadata__[0]
        for item in fields(group)
        if item.default is None
    }
    return {name: option.show_default for name, option in options.items()}


def test_the_help_names_the_defaults_that_hold() -> None:
    """They are chosen elsewhere, so the options only repeat them."""
    limits = {item.name: item.default for item in fields(SchedulerLimits)}
    sizes = shown(SizeOptions)
    assert sizes.pop("kv_blocks") == "as many as fit"
    assert sizes.pop("max_model_len") == "the model's limit"
    assert sizes == {
        name: str(limits[name]) for name in ("max_batched_tokens", "max_running", "host_blocks")
    }
    watched = {item.name: item.default for item in fields(WatchSettings)}
    watch = shown(WatchOptions)
    assert watch.pop("gates") is True, "there is no default"
    assert watch == {name: f"{watched[name]:g}" for name in ("window_s", "min_requests")}
    memory = [get_args(option)[1].show_default for option in (MemoryShare, MemoryUtilisation)]
    assert memory == [f"{MEMORY_SHARE:g}", f"{MemorySettings().utilisation:g}"]


@pytest.mark.parametrize(
    "name", ["replay", "compare", "sweep", "validate", "bench", "parity", "serve"]
)
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
        "serve": {"cluster", "gpu", "memory_utilisation", "model"},
    }.get(name, set())
    assert len(found) > 6
    assert {
        option for option, annotation in found.items() if annotation is not known[option]
    } == own


@pytest.mark.parametrize(
    ("missing", "extra"),
    [
        ("torch", "engine"),
        ("transformers.utils", "engine"),
        ("fastapi", "server"),
        ("prometheus_client.core", "server"),
        ("ray", "replicas"),
        ("ray.serve", "replicas"),
        (None, "engine"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(missing: str | None, extra: str) -> None:
    with (
        pytest.raises(
            MisuseError, match=rf"No module named .*: pip install 'zipage-lab\[{extra}\]'$"
        ),
        engine_room(),
    ):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)


def test_what_the_engine_refuses_is_misuse() -> None:
    with pytest.raises(MisuseError, match=r"^too many blocks$"), engine_room():
        raise EngineError("too many blocks")


LEAST = "Input should be greater than or equal to 1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--max-queue", "0"), f"'--max-queue': {LEAST}, got '0'"),
        (("replay", SMALL, "--kv-blocks", "-3"), f"'--kv-blocks': {LEAST}, got '-3'"),
        (
            ("replay", SMALL, "--kv-blocks", "many"),
            "unable to parse string as an integer, got 'many'",
        ),
        (("calibrate", "--seconds", "0.5"), f"'--seconds': {LEAST}, got '0.5'"),
        (("trace", "info", "x.csv", "--lru", "7", "--lru", "0"), f"'--lru': {LEAST}, got '0'"),
    ],
)
def test_a_value_out_of_range_is_named(arguments: tuple[str, ...], words: str) -> None:
    result = zlab(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in errors(result)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("sweep", SMALL, "--backend", "dusk"), "'dusk'"),
        (("promote", "hybrid", "--evidence", "nix.json"), "'nix.json'"),
    ],
)
def test_a_value_that_was_named_is_not_named_again(arguments: tuple[str, ...], value: str) -> None:
    result = zlab(*arguments)
    assert result.exit_code == 2
    assert errors(result).count(value) == 1
    assert "got" not in errors(result)


OWN = str(ROOT / "docs" / "examples" / "fewest_left.py")
JUDGED = ("validate", "hybrid", "--trace", SMALL, "--gates", "nix.toml")
MISUSE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("replay", SMALL, "--policy", "hybrd"), "unknown policy 'hybrd'; did you mean 'hybrid'? "
    "(choices: constrained,"),
    (("replay", SMALL, "--policy", "hybrid:prefx=none"), "unknown policy setting 'prefx'; did "
    "you mean 'prefix'?"),
    (("replay", SMALL, "--policy", "hybrid:slots=hybird"), "unknown slots 'hybird'; did you mean "
    "'hybrid'?"),
    (("replay", SMALL, "--policy", "hybrid:budget.tokns=9"), "'tokns'; did you mean 'tokens'?"),
    (("replay", SMALL, "--policy", "hybrid:budget.tokens=x"), "budget.tokens must be a "
    "int, not 'x'"),
    (("replay", SMALL, "--policy", "hybrid:join"), "'join' is not of the form key=value"),
    (("replay", SMALL, "--policy", "nix.toml"), "no policy file 'nix.toml'"),
    (("replay", SMALL, "--policy", "nix.py:Mine"), "no such file: nix.py"),
    (("replay", SMALL, "--gpu", "h20"), "unknown GPU 'h20'; did you mean 'h200'?"),
    (("replay", SMALL, "--model", "qwen3-8"), "unknown model 'qwen3-8'; did you mean 'qwen3-8b'?"),
    (("replay", SMALL, "--gpu", "rtx4090", "--model", "qwen3-32b"), "model qwen3-32b does not "
    "fit on rtx4090"),
    (("replay", SMALL, "--kv-block", "3"), "No such option: --kv-block"),
    (("replay", SMALL, "--kv-blocks", "0"), "Invalid value for '--kv-blocks'"),
    (("replay", SMALL, "--kv-blocks", "many"), "Invalid value for '--kv-blocks'"),
    (("replay", SMALL, "--kv-blocks", "5"), "a budget of 9 blocks does not fit in a pool of 5"),
    (("replay", SMALL, "--kv-blocks", "5", "--memory-utilisation", "0.5"), "cannot be given "
    "together with kv-blocks"),
    (("replay", SMALL, "--policy", OWN), f"{OWN}: which class of the file? Write {OWN}:CLASS (it "
    f"has: FewestLeft)"),
    (("replay", SMALL, "--memory-utilisation", "2"), "memory utilisation must be above 0 and at "
    "most 1, got 2.0"),
    (("replay", SMALL, "--length-multiplier", "0"), "length-multiplier must be a finite number "
    "above 0, got 0.0"),
    (("replay", SMALL, "--max-model-len", "50000"), "50000 is beyond the 40960 positions of "
    "model qwen3-8b"),
    (("replay", SMALL, "--cost", "nix.json"), "cannot read profile nix.json"),
    (("replay", SMALL, "--format", "azure"), "is no file: --format and --skip-bad-rows do "
    "not apply"),
    (("replay", SMALL, "--perfetto", "x.txt"), "must end in .json"),
    (("replay", SMALL, "--perfetto", "nix/x.json"), "there is no folder nix"),
    (("replay", "nix.csv"), "no trace file 'nix.csv'"),
    (("replay", "synth:amc"), "unknown kind of made-up workload 'amc'; did you mean 'amc23'?"),
    (("replay", "synth:amc23?sample=3"), "unknown setting of synth:amc23 'sample'; did you mean "
    "'samples'?"),
    (("replay", "synth:amc23?samples=x"), "samples must be a whole number, not 'x'"),
    (("replay", "synth:amc23?samples=0"), "samples is 0, must be a whole number >= 1"),
    (("replay", "synth:amc23?samples"), "'samples' is not of the form key=value"),
    (("replay", "synth:amc23?seed=1&seed=2"), "seed occurs twice"),
    (("replay", "synth:amc23?arrivals=poison:3"), "unknown arrivals 'poison'; did you mean "
    "'poisson'? (choices: together, poisson"),
    (("replay", "synth:fixed?arrivals=poisson:3"), "write rate_per_s=... instead of arrivals"),
    (("replay", "synth:chat?num_requests=5", "--block-size", "24"), "do not divide one another "
    "(choices: 16, 8"),
    (("compare", SMALL), "Missing option '--policy'"),
    (("compare", SMALL, "-p", "hybrid", "-p", "hybrid"), "a policy is named twice"),
    (("compare", SMALL, "-p", "hybrid", "-p", "hybrd"), "did you mean 'hybrid'?"),
    (("sweep", SMALL), "Missing option '--grid'"),
    (("sweep", SMALL, "--grid", "kv-blocks"), "is not of the form KEY=A,B,..."),
    (("sweep", SMALL, "--grid", "kv-blocks="), "is not of the form KEY=A,B,..."),
    (("sweep", SMALL, "--grid", "kv-block=1"), "unknown grid key 'kv-block'; did you mean "
    "'kv-blocks'?"),
    (("sweep", SMALL, "--grid", "budget.tokns=1"), "did you mean 'budget.tokens'?"),
    (("sweep", SMALL, "--grid", "kv-blocks=a"), "kv-blocks must be a whole number, not 'a'"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--grid", "kv-blocks=2"), "--grid kv-blocks "
    "occurs twice"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--out", "x.txt"), "must end in .csv, .json, "
    ".parquet"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--out", "nix/x.csv"), "there is no folder nix"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--backend", "dask"), "--backend dask needs "
    "--cluster ADDRESS"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--cluster", "tcp://x:1"), "needs --backend "
    "dask or ray"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--backend", "dusk"), "'dusk' is not one of "
    "'loky', 'dask', 'ray'"),
    ((*JUDGED, "--device", "cpu"), "--device cpu says where --engine runs, and that is not given"),
    ((*JUDGED, "--dtype", "float32"), "--dtype float32 says where --engine runs"),
    ((*JUDGED, "--engine-model", "smollm2"), "--engine-model smollm2 says where --engine runs"),
    ((*JUDGED, "--why", "a hunch"), "--why 'a hunch' goes into the history of a --registry, and "
    "there is none"),
    (("promote", "hybrid", "--admin-key-file", OWN), f"--admin-key-file {OWN} is for the server "
    f"of --live"),
    (("rollback", "--admin-key-file", OWN), f"--admin-key-file {OWN} is for the server of --live"),
    (("policy", "show", "hybrd"), "did you mean 'hybrid'?"),
    (("memry",), "No such command 'memry'"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"), MISUSE, ids=[" ".join(arguments) for arguments, _ in MISUSE]
)
def test_misuse(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZLAB_REGISTRY", raising=False)
    result = zlab(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in errors(result)


def test_a_file_has_no_seeds_and_formats_are_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.000000,10,5\n")
    for arguments, words in (
        (
            ("compare", str(path), "-p", "hybrid", "--seeds", "2"),
            "is one fixed workload: --seeds 2 needs a made-up",
        ),
        (
            ("sweep", str(path), "--grid", "seed=1,2"),
            "is one fixed workload: only a synth:... spec has seeds",
        ),
        (
            ("replay", str(path), "--format", "azur"),
            "unknown trace format 'azur'; did you mean 'azure'?",
        ),
    ):
        result = zlab(*arguments)
        assert result.exit_code == 2
        assert words in errors(result)


def test_a_recording_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    for command in (("replay", SMALL), ("compare", SMALL, "-p", "hybrid")):
        result = zlab(*command, "--out", str(tmp_path))
        assert result.exit_code == 2
        assert (
            result.stderr
            == f"error: --out {tmp_path}: is not empty; a recording needs a folder of its own\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def profile(**changes: object) -> str:
    """A measured profile of qwen3-8b on h200 as a file's text."""
    values = dict.fromkeys(COEFFICIENT_UNITS, 1e-6) | {"compression_share": 0.5}
    model = find_model("qwen3-8b")
    coefficients = {
        name: {"value": values[name], "unit": unit} for name, unit in COEFFICIENT_UNITS.items()
    }
    document = {
        "format": "zlab-profile/3",
        "gpu": "h200",
        "model": "qwen3-8b",
        "dtype": "bfloat16",
        "card": "NVIDIA H200",
        "date": "2026-11-29",
        "versions": {"torch": "2"},
        "block_size": 256,
        "window": 16,
        "coefficients": coefficients,
        "fit_error": {"decode": {"mean_relative": 0.01, "max_relative": 0.02, "num_points": 9}},
        "held_out_error": {
            "decode": {"mean_relative": 0.01, "max_relative": 0.02, "num_points": 9}
        },
        "shape": model.profile_shape,
        "also": {},
    }
    return json.dumps(document | changes)


def test_measured_costs_are_used_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "h200-qwen3-8b-bfloat16.json"
    path.write_text(profile())
    fine = zlab("replay", SMALL, "--cost", str(path))
    assert fine.exit_code == 0
    assert "costs: h200-qwen3-8b-bfloat16 2026-11-29" in " ".join(fine.stdout.split())
    unknown = zlab("replay", SMALL, "--profile", "h200-qwen3-9b-bfloat16")
    assert unknown.exit_code == 2
    assert "unknown measured profile 'h200-qwen3-9b-bfloat16'; " in errors(unknown)
    for options, words in (
        (("--gpu", "h100"), "was measured on h200 with qwen3-8b, not on h100 with qwen3-8b"),
        (
            ("--policy", "hybrid:window=8"),
            "a window of 16, not for blocks of 256 and a window of 8",
        ),
    ):
        result = zlab("replay", SMALL, "--cost", str(path), *options)
        assert result.exit_code == 2
        assert words in errors(result)
    assert zlab("replay", SMALL, "--cost", str(path), "--policy", "full-kv:window=8").exit_code == 0


ROOFLINE = ("--gpu", "h200", "--model", "smollm2-135m")
GATES = str(ROOT / "docs" / "examples" / "gates.toml")
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2024-05-10 00:00:00.000000,10,5\n"

TRACE_READERS: dict[str, tuple[str, ...]] = {  # "TRACE" and "OUT" are replaced
    "replay": ("replay", "TRACE"),
    "compare": ("compare", "TRACE", "-p", "hybrid"),
    "sweep": ("sweep", "TRACE", "--grid", "kv-blocks=40"),
    "validate": (
        "validate",
        "hybrid",
        "--trace",
        "TRACE",
        "--gates",
        GATES,
        "--against",
        "full-kv",
    ),
    "bench": ("bench", "TRACE", "--model", "dummy:tiny"),
    "parity": ("parity", "TRACE"),
    "drift": ("drift", str(KEPT), *ROOFLINE, "--trace", "TRACE"),
    "trace info": ("trace", "info", "TRACE"),
    "trace check": ("trace", "check", "TRACE"),
    "trace convert": ("trace", "convert", "TRACE", "OUT"),
    "trace cut": ("trace", "cut", "TRACE", "OUT", "--first", "1"),
    "trace scale": ("trace", "scale", "TRACE", "OUT", "--faster", "2"),
    "trace join": ("trace", "join", SMALL, "TRACE", "--out", "OUT"),
    "trace synth servegen": (
        "trace",
        "synth",
        "servegen",
        "--rates",
        "TRACE",
        "--lengths",
        "TRACE",
        "--out",
        "OUT",
    ),
}
RECORDING_READERS: dict[str, tuple[str, ...]] = {
    "trust": ("trust", "RUN", *ROOFLINE),
    "drift": ("drift", "RUN", *ROOFLINE),
    "parity": ("parity", "--recording", "RUN"),
    "report": ("report", "RUN", "--out", "OUT"),
    "explain": ("explain", "RUN", "0"),
}
BAD_TRACES: dict[str, bytes] = {
    "a bad row": (HEAD + ROW + "2024-05-10 00:00:01.000000,-1,5\n").encode(),
    "no known format": b"a,b\n1,2\n",
    "nothing": b"",
    "no row": HEAD.encode(),
    "no text": bytes(range(256)),
    "half a gzip file": gzip.compress((HEAD + ROW).encode(), mtime=0)[:40],
}
ENGINE_ONLY = {  # a report and an explanation need neither the policy nor what was asked
    "without its limits",
    "without its policy",
    "with a policy that is none",
    "without what was asked",
}
BAD_RECORDINGS: dict[str, Callable[[Path], object]] = {
    "without a manifest": lambda run: (run / "manifest.json").unlink(),
    "with half a manifest": lambda run: (run / "manifest.json").write_text("{", "utf-8"),
    "of another version": lambda run: change_manifest(run, format="zlab-recording/9"),
    "with a part that is none": lambda run: (run / "events" / "00000.parquet").write_bytes(
        b"PAR1 rubbish"
    ),
    "without its limits": lambda run: _without(run, "limits"),
    "without its policy": lambda run: _without(run, "policy_toml"),
    "with a policy that is none": lambda run: change_manifest(run, policy_toml="x = 1\n"),
    "without what was asked": lambda run: (run / "asked.jsonl").write_bytes(b"\xff\xff\n"),
}


READ_AND_BAD = [
    (command, damage)
    for command in RECORDING_READERS
    for damage in BAD_RECORDINGS
    if command not in ("report", "explain") or damage not in ENGINE_ONLY
]


def _without(run: Path, key: str) -> None:
    path = run / "manifest.json"
    kept = {
        name: value for name, value in json.loads(path.read_text("utf-8")).items() if name != key
    }
    path.write_text(json.dumps(kept), "utf-8")


def call(command: tuple[str, ...], out: Path, place: Path) -> Result:
    words = {"TRACE": str(place), "RUN": str(place), "OUT": str(out)}
    return zlab(*(words.get(word, word) for word in command))


@pytest.mark.parametrize("damage", BAD_TRACES)
@pytest.mark.parametrize("command", TRACE_READERS)
def test_a_trace_that_cannot_be_read_ends_with_1(command: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / ("trace.csv.gz" if "gzip" in damage else "trace.csv")
    path.write_bytes(BAD_TRACES[damage])
    result = call(TRACE_READERS[command], tmp_path / "out.jsonl", path)
    assert isinstance(result.exception, SystemExit), "one line, no traceback"
    assert result.exit_code == 1
    assert (
        str(path) in errors(result)
        or "GeneratedTokens" in result.stdout
        or "ContextTokens is -1" in result.stdout
    )
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("command", TRACE_READERS)
def test_a_trace_that_is_not_there_is_misuse(command: str, tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere.csv", tmp_path):
        result = call(TRACE_READERS[command], tmp_path / "out.jsonl", place)
        assert result.exit_code == 2
        assert "nowhere.csv" in errors(result) or tmp_path.name in errors(result)
        assert result.stdout == ""


@pytest.mark.parametrize(("command", "damage"), READ_AND_BAD)
def test_a_recording_that_cannot_be_read_ends_with_1(
    command: str, damage: str, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(KEPT, tmp_path / "run"))
    BAD_RECORDINGS[damage](run)
    result = call(RECORDING_READERS[command], tmp_path / "out.html", run)
    assert isinstance(result.exception, SystemExit), "one line, no traceback"
    assert result.exit_code == 1
    assert errors(result).startswith(f"error: {run}")
    assert result.stdout == ""
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("command", RECORDING_READERS)
def test_a_recording_that_is_not_there_is_misuse(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "file", "is a file"),
    ):
        result = call(RECORDING_READERS[command], tmp_path / "out.html", place)
        assert result.exit_code == 2
        assert words in errors(result)
        assert result.stdout == ""


def test_a_recording_killed_before_its_first_checkpoint_says_so(tmp_path: Path) -> None:
    run = Path(shutil.copytree(KEPT, tmp_path / "run"))
    _without(run, "digest")
    for command in ("trust", "drift", "parity"):
        result = call(RECORDING_READERS[command], tmp_path / "out", run)
        assert result.exit_code == 1
        assert "was stopped before its first checkpoint" in errors(result)


def test_the_help_says_which_code_means_what() -> None:
    words = " ".join(zlab("--help").stdout.split())
    for said in (
        "exit code 0: well",
        "1: it went wrong or the answer is no",
        "2: misuse",
        "130: Ctrl-C",
    ):
        assert said in words
