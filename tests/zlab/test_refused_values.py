"""What the command line refuses by itself, before a command runs, names option, bound or choices, and value."""

import pytest

from tests.zlab.command_line import SMALL, errors, zlab

LEAST = "Input should be greater than or equal to 1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--max-queue", "0"), f"'--max-queue': {LEAST}, got '0'"),
        (("replay", SMALL, "--kv-blocks", "-3"), f"'--kv-blocks': {LEAST}, got '-3'"),
        (("replay", SMALL, "--kv-blocks", "many"), "unable to parse string as an integer, got 'many'"),
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
