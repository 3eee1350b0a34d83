"""The command line: the only place that knows the whole house."""

from importlib.metadata import version
from typing import Annotated

import typer

from zlab.bench import bench
from zlab.calibrate import calibrate
from zlab.compare import compare
from zlab.demo import demo
from zlab.diff import diff
from zlab.drift import drift
from zlab.generate import generate
from zlab.history import history
from zlab.memory import memory
from zlab.outcome import Command
from zlab.parity import parity
from zlab.policy import app as policy
from zlab.promote import promote
from zlab.replay import replay
from zlab.report import report
from zlab.rollback import rollback
from zlab.serve import serve
from zlab.sweep import sweep
from zlab.trace import app as trace
from zlab.trust import trust
from zlab.validate import validate

app = typer.Typer(
    cls=Command,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
SIMULATE, ENGINE, SERVE = "In simulation", "On a real model", "Serve, by a policy with evidence"
for command in (demo, replay, compare, sweep, memory, report):
    app.command(rich_help_panel=SIMULATE)(command)
app.add_typer(policy, name="policy", rich_help_panel=SIMULATE)
app.add_typer(trace, name="trace", rich_help_panel=SIMULATE)
for command in (generate, bench, parity, calibrate, trust):
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A scheduler lab for LLM serving: replay workloads under policies, run them on an engine, serve by one of them.

    Every command ends with exit code 0: well; 1: it went wrong or the answer is no, also where a trace or a recording
    is damaged; 2: misuse (options, a file that is not there, a policy that is none); 130: Ctrl-C.
    """


def main() -> None:
    """Run the command line."""
    app(prog_name="zlab")
