"""A policy put together from its parts: forms made from the fields of the choices themselves."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

import streamlit as st

from policies.catalogue import NESTED, QUESTIONS
from policies.core.policy import Policy
from policies.own import is_own
from policies.spec import PolicyError, load_policy, policy_from_table, policy_to_table, presets

ASKS = {
    "order": "Order: who is next in line?",
    "admission": "Admission: when may it start?",
    "batching": "Batching: what shares a step?",
    "slots": "Slots: who holds a query slot?",
    "budget": "Budget: how many blocks may it hold?",
    "preemption": "Preemption: who gives way, and how does it come back?",
    "prefix": "Prefix: what is shared?",
    "compression": "Compression: how, and when does it join?",
}
CHOICES = {"handout": ("nearest", "line"), "reserve": ("sequence", "peak")}  # of text fields that take few values
_ATTRIBUTE = re.compile(r"^\s{4,}([\w, ]+): (.+(?:\n {12,}.+)*)", re.MULTILINE)


def policy_form() -> Policy:
    """Draw the form and return the policy it describes. Raises PolicyError with what is wrong with it."""
    uploaded = st.file_uploader("Start from a policy file (TOML)", type=["toml"], key="policy_file", max_upload_size=1)
    names = list(presets())
    preset = st.selectbox("Start from", names, index=names.index("hybrid"), key="preset", bind="query-params")
    if uploaded is not None:
        start = uploaded_table(uploaded.getvalue(), uploaded.name)
        origin = f"{uploaded.name}-{uploaded.file_id}"
    else:
        start = policy_to_table(load_policy(str(preset)))
        origin = str(preset)
    table: dict[str, Any] = {"name": st.text_input("Name", str(start.get("name", preset)), key=f"name|{origin}")}
    columns = st.columns(2)
    for index, (question, kinds) in enumerate(QUESTIONS.items()):
        with columns[index % 2].expander(ASKS.get(question, question), expanded=question in ("slots", "budget")):
            table[question] = _answer(question, kinds, start.get(question, {}), f"{origin}|{question}")
    return policy_from_table(table)


def uploaded_table(data: bytes, name: str) -> dict[str, Any]:
    """An uploaded policy as a table. Raises PolicyError; an answer that names code of one's own is refused unread."""
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{name}: not valid TOML: {error}") from error
    own = _own_code(table)
    if own is not None:
        raise PolicyError(
            f"{name}: {own!r} names a Python class; code is never run from an upload (use the command line)"
        )
    return policy_to_table(policy_from_table(table))


def _own_code(value: Any) -> str | None:
    """The first text anywhere in the table that names a user's class."""
    if isinstance(value, str):
        return value if is_own(value) else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for part in parts if (found := _own_code(part)) is not None), None)


def _answer(question: str, kinds: Mapping[str, type[Any]], start: Any, key: str) -> dict[str, Any]:
    """A choice and the fields it has."""
    given = {"kind": start} if isinstance(start, str) else dict(start)
    names = list(kinds)
    at = names.index(given["kind"]) if given.get("kind") in names else 0
    kind = str(st.selectbox("Choice", names, index=at, key=f"{key}|kind", help=_first_line(kinds[names[at]])))
    cls = kinds[kind]
    st.caption(_first_line(cls))
    answer: dict[str, Any] = {"kind": kind}
    known = given if given.get("kind") == kind else {}
    for item in fields(cls) if is_dataclass(cls) else ():
        answer[item.name] = _field(item, known, attributes(cls).get(item.name, ""), f"{key}|{kind}|{item.name}")
    return answer


def _field(item: Field[Any], known: Mapping[str, Any], tip: str, key: str) -> Any:
    """A control for one field, of the kind its default has."""
    if item.name in NESTED:
        return _answer(item.name, NESTED[item.name], known.get(item.name, {}), key)
    factory = item.default_factory
    default = item.default if factory is MISSING else factory()
    value = known.get(item.name, default)
    words = item.name.replace("_", " ")
    if isinstance(default, Enum):
        choices = [member.value for member in type(default)]
        at = choices.index(getattr(value, "value", value))
        return st.selectbox(words, choices, index=at, key=key, help=tip or None)
    if isinstance(default, bool):
        return st.checkbox(words, bool(value), key=key, help=tip or None)
    if isinstance(default, int):
        return int(st.number_input(words, value=int(value), step=1, key=key, help=tip or None))
    if isinstance(default, float):
        return float(st.number_input(words, value=float(value), key=key, help=tip or None, format="%.4g"))
    if item.name in CHOICES and value in CHOICES[item.name]:
        return st.selectbox(words, CHOICES[item.name], CHOICES[item.name].index(value), key=key, help=tip or None)
    return st.text_input(words, str(value), key=key, help=tip or None)


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]


def attributes(cls: type[Any]) -> dict[str, str]:
    """What a class's docstring says of its fields; `a, b: words` speaks of both."""
    _, _, section = (cls.__doc__ or "").partition("Attributes:")
    found = {}
    for names, words in _ATTRIBUTE.findall(section):
        for name in names.split(","):
            found[name.strip()] = " ".join(words.split())
    return found
