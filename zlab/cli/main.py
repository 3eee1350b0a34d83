"""The command line: the only place that knows the whole house."""

from importlib.metadata import version
from typing import Annotated

import typer

from zlab.cli.calibrate import calibrate
from zlab.cli.compare import compare
from zlab.cli.console import Command
from zlab.cli.demo import demo
from zlab.cli.drift import drift
from zlab.cli.evaluate import evaluate
from zlab.cli.explain import explain
from zlab.cli.memory import memory
from zlab.cli.parity import parity
from zlab.cli.policy import app as policy
from zlab.cli.registry import diff, history, promote, rollback
from zlab.cli.replay import bench, generate, replay, report
from zlab.cli.serve import serve
from zlab.cli.sweep import sweep
from zlab.cli.trace import app as trace
from zlab.cli.trust import trust
from zlab.cli.validate import validate

app = typer.Typer(
    cls=Command,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
SIMULATE, ENGINE, SERVE = "In simulation", "On a real model", "Serve, by a policy with evidence"
for command in (demo, replay, compare, sweep, memory, report, explain):
    app.command(rich_help_panel=SIMULATE)(command)
app.add_typer(policy, name="policy", rich_help_panel=SIMULATE)
app.add_typer(trace, name="trace", rich_help_panel=SIMULATE)
for command in (generate, bench, evaluate, parity, calibrate, trust):
    app.command(rich_help_panel=ENGINE)(command)
for command in (serve, validate, promote, rollback, history, diff, drift):
    app.command(rich_help_panel=SERVE)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zlab {version('zipage-lab')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A scheduler lab for LLM serving: replay workloads under policies, run them on an engine,
    serve by one of them.

    Every command ends with exit code 0: well; 1: it went wrong or the answer is no, also where a
    trace or a recording is damaged; 2: misuse (options, a file that is not there, a policy that is
    none); 130: Ctrl-C.
    """


def main() -> None:
    """Run the command line."""
    app(prog_name="zlab")
