"""The error text for a name that is not among the choices.

    unknown policy 'hybrd'; did you mean 'hybrid'? (choices: constrained, full-kv, hybrid)

All packages may import this module, so that the text is the same everywhere.
"""

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.5  # least similarity of `difflib`; a name that is less similar gives no hint


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the choice nearest to `value`, or an empty string.

    A choice that begins with `value` is nearer than all others. Case does not matter.
    """
    known = {choice.lower(): choice for choice in choices}
    wanted = value.lower()
    longer = [choice for choice in known if wanted and choice.startswith(wanted)]
    near = longer or get_close_matches(wanted, known, n=1, cutoff=CUTOFF)
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def unknown_choice(
    what: str, value: str, choices: Iterable[str], also: str = "", near: str | None = None
) -> str:
    """Return the error text for a name that is not among the choices.

    Args:
        what: The kind of name, as in "unknown policy".
        value: The name.
        choices: Every known name.
        also: What else is possible, such as "or a config.json".
        near: The choice that is meant, where the caller knows it.
    """
    known = list(choices)
    listed = ", ".join([*known, *filter(None, [also])]) or "none"
    hint = did_you_mean(near or value, known)
    return f"unknown {what} {value!r}{hint} (choices: {listed})"
