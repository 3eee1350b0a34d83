"""How every command ends; the reason is one line on stderr.

0: well. 1: it went wrong, or the answer is no: a run, a server, a gate, or what is in a trace, a recording, evidence or
a registry. 2: misuse: a command line that makes no sense, a file that is not there, a policy, gates or a profile that
are none. 130: Ctrl-C.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from policies.core.errors import ConfigError, SchedulerError
from policies.evidence import EvidenceError
from policies.spec import PolicyError
from sim.errors import SimError
from traces.workload import TraceError

WENT_WRONG = 1
MISUSE = 2
INTERRUPTED = 130


class MisuseError(ValueError):
    """A command line that makes no sense; the message names the value and the choices."""


def fail(message: str, code: int) -> typer.Exit:
    """Say what is wrong on stderr; the caller raises what is returned."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)


def _name_value(error: typer.BadParameter) -> None:
    """Add the value that was refused, where typer's message has only the option and what it should be.

    It then comes of pydantic, whose ValidationError is the cause and knows the value.
    """
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return
    value = repr(details()[0]["input"])
    if value not in error.message:
        error.message = f"{error.message}, got {value}"


class Command(TyperGroup):
    """The `zlab` command: what a subcommand raises becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            _name_value(error)
            raise
        except (MisuseError, PolicyError, SimError, ConfigError) as error:
            raise fail(str(error), MISUSE) from error
        except BrokenPipeError:
            raise  # whoever read the output has had enough: no error of ours
        except (TraceError, SchedulerError, EvidenceError, OSError) as error:
            raise fail(str(error), WENT_WRONG) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error
