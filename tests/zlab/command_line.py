"""The command line under test: in this process, or as a process of its own."""

import subprocess
import sys
from collections.abc import Sequence

from typer.testing import CliRunner, Result

from zlab.cli.main import app

SMALL = (
    "synth:amc23?num_problems=8&samples=2&mu=7.2&cap=4096"  # 16 requests, about 1,500 tokens each
)
SMALL_POOL = ("--kv-blocks", "40")  # nothing like enough for all of them
PATIENCE_S = (
    300  # for a process to end that has all it needs: a CI machine may have other work than ours
)
LONG = "synth:amc23?samples=32"  # 1,280 requests: seconds of simulation


def zlab(*arguments: str) -> Result:
    """Run a command in this process; stdout and stderr are kept apart."""
    return CliRunner().invoke(app, list(arguments), prog_name="zlab")


def start(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a command as a process of its own, in a session of its own (a Ctrl-C there is not
    ours).
    """
    return subprocess.Popen(
        [sys.executable, "-m", "zlab", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_words(process: "subprocess.Popen[str]", words: str) -> None:
    """Read what a started command says on stderr up to a line with these words; it must not end
    before.
    """
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return
    raise AssertionError(
        f"it ended with {process.wait()} before it said {words!r}: {''.join(said)}"
    )


def errors(result: Result) -> str:
    """What a command said on stderr, in one line: a box around a usage error is left out."""
    words = "".join(" " if c in "│╭╮╰╯─\n" else c for c in result.stderr)
    return " ".join(words.split())
