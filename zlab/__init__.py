"""The command line: the only place that knows the whole house."""

import typer

from zlab.demo import demo
from zlab.memory import memory
from zlab.outcome import Command
from zlab.replay import replay
from zlab.trace import app as trace

app = typer.Typer(
    cls=Command,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help="A scheduler lab for LLM serving: replay workloads under policies before touching a GPU.",
)
app.command()(replay)
app.command()(memory)
app.command()(demo)
app.add_typer(trace, name="trace")


def main() -> None:
    """Run the command line."""
    app(prog_name="zlab")
