"""Forms for a policy and for a workload, made from the fields of the choices themselves."""

import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import streamlit as st

from zlab.dashboard.views.desk import keep, kept_file
from zlab.dashboard.views.page import escaped
from zlab.policies.catalogue import CATALOGUE, PARTS, OptionGroup, Setting
from zlab.policies.core.policy import Policy
from zlab.policies.own import is_own
from zlab.policies.spec import (
    PolicyError,
    load_policy,
    policy_from_table,
    policy_to_table,
    presets,
)
from zlab.traces.formats import FORMATS, check_trace
from zlab.traces.synthetic import PREFIX, REASONING_SHAPES, make_workload
from zlab.traces.workload import TraceError, Workload, dropped_rows


def policy_form() -> Policy:
    """Draw the form and return the policy it describes. Raises PolicyError with the reason."""
    uploaded = kept_file(
        "Start from a policy file (TOML)", "policy_file", type=["toml"], max_upload_size=1
    )
    names = list(presets())
    preset = st.selectbox(
        "Start from", names, key=keep("preset", "hybrid", names), bind="query-params"
    )
    if uploaded is not None:
        start = uploaded_table(uploaded.data, uploaded.name)
        origin = f"{uploaded.name}-{uploaded.number}"
    else:
        start = policy_to_table(load_policy(str(preset)))
        origin = str(preset)
    table: dict[str, Any] = {
        "name": st.text_input("Name", key=keep(f"name|{origin}", str(start.get("name", preset))))
    }
    columns = st.columns(2)
    for index, (question, group) in enumerate(CATALOGUE.items()):
        with columns[index % 2].expander(
            f"{question.capitalize()}: {group.question}",
            expanded=question in ("slots", "budget"),
        ):
            table[question] = _answer(group, start.get(question, {}), f"{origin}|{question}")
    return policy_from_table(table)


def uploaded_table(data: bytes, name: str) -> dict[str, Any]:
    """Return an uploaded policy as a table. Raises PolicyError.

    A policy that names a class of the user's own is refused: an upload must not run code.
    """
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also whole numbers of thousands of digits
        raise PolicyError(f"{name}: not valid TOML: {error}") from error
    huge = _huge_number(table)
    if huge is not None:
        raise PolicyError(
            f"{name}: the number {str(huge)[:20]} is not in -2^53..2^53, or not finite"
        )
    own = _own_code(table)
    if own is not None:
        raise PolicyError(
            f"{name}: {own!r} names a Python class; code is never run from an upload (use the "
            f"command line)"
        )
    return policy_to_table(policy_from_table(table))


MOST_NUMBER = 2**53  # beyond, a browser does not hold every whole number


def _huge_number(value: Any) -> float | None:
    """Return the first number in the table that no field of the form can hold."""
    if isinstance(value, int | float):
        return None if -MOST_NUMBER <= value <= MOST_NUMBER else value
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    return next((found for part in parts if (found := _huge_number(part)) is not None), None)


def _own_code(value: Any) -> str | None:
    """Return the first text in the table that names a user's class."""
    if isinstance(value, str):
        return value if is_own(value) else None
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    return next((found for part in parts if (found := _own_code(part)) is not None), None)


def _answer(group: OptionGroup, start: Any, key: str) -> dict[str, Any]:
    """Draw the selection of one option group and the fields of the selected choice."""
    given = {"kind": start} if isinstance(start, str) else dict(start)
    names = list(group.choices)
    first = given["kind"] if given.get("kind") in names else names[0]
    help_text = "\n".join(f"* **{name}**: {one.text}" for name, one in group.choices.items())
    place = keep(f"{key}|kind", first, names)
    kind = str(st.selectbox("Choice", names, key=place, help=help_text))
    choice = group.choices[kind]
    st.caption(choice.text)
    answer: dict[str, Any] = {"kind": kind}
    known = given if given.get("kind") == kind else {}
    for item in fields(choice.cls):
        answer[item.name] = _field(
            item, known, choice.settings[item.name], f"{key}|{kind}|{item.name}"
        )
    return answer


def _field(item: Field[Any], known: Mapping[str, Any], setting: Setting, key: str) -> Any:
    """Draw a control for one field; the type of its default selects the control."""
    if item.name in PARTS:
        return _answer(PARTS[item.name], known.get(item.name, {}), key)
    factory = item.default_factory
    default = item.default if factory is MISSING else factory()
    value = known.get(item.name, default)
    words, tip = item.name.replace("_", " "), setting.text
    if isinstance(default, Enum):
        choices = [member.value for member in type(default)]
        return st.selectbox(
            words, choices, key=keep(key, getattr(value, "value", value), choices), help=tip
        )
    if isinstance(default, bool):
        return st.checkbox(words, key=keep(key, bool(value)), help=tip)
    if isinstance(default, int):
        return int(st.number_input(words, step=1, key=keep(key, int(value)), help=tip))
    if isinstance(default, float):
        return float(
            st.number_input(words, key=keep(key, float(value)), help=tip, format="%.4g", step=0.01)
        )
    if value in setting.choices:
        choices = list(setting.choices)
        return st.selectbox(words, choices, key=keep(key, value, choices), help=tip)
    return st.text_input(words, key=keep(key, str(value)), help=tip)


RECIPES = ("reasoning", "chat", "fixed lengths", "uploaded trace")
MOST_REQUESTS = 20_000
SHOWN_BAD = 20
UPLOAD_MB = 50


def workload_form() -> Workload | None:
    """Draw the form and return the workload, None while no trace is uploaded. Raises TraceError."""
    recipe = st.segmented_control(
        "Requests",
        RECIPES,
        required=True,
        key=keep("recipe", RECIPES[0], RECIPES),
        bind="query-params",
    )
    if recipe == "uploaded trace":
        return _uploaded()
    columns = st.columns(3)
    with columns[2]:
        seed = whole_number("Seed", "seed", (0, 1_000_000), 0)
    if recipe == "reasoning":
        shapes = list(REASONING_SHAPES)
        shape = columns[0].selectbox(
            "Shape", shapes, key=keep("shape", "amc23", shapes), bind="query-params"
        )
        with columns[1]:
            most = whole_number("At most requests", "most", (1, MOST_REQUESTS), 160)
        whole = _made_up(f"{PREFIX}{shape or 'amc23'}?seed={seed}")
        return Workload(list(whole)[:most], whole.meta)
    with columns[0]:
        count = whole_number("Requests in all", "count", (1, MOST_REQUESTS), 300)
    rate = columns[1].number_input(
        "Arrivals a second", 0.01, 1000.0, key=keep("rate", 5.0), bind="query-params"
    )
    if recipe == "chat":
        return _made_up(
            f"{PREFIX}chat?num_requests={count}&arrivals=poisson:{float(rate)!r}&seed={seed}"
        )
    columns = st.columns(3)
    with columns[0]:
        prompt = whole_number("Prompt tokens", "prompt", (1, 100_000), 512)
    with columns[1]:
        output = whole_number("Output tokens", "output", (1, 100_000), 1024)
    return _made_up(
        f"{PREFIX}fixed?num_requests={count}&prompt={prompt}&output={output}"
        f"&rate_per_s={float(rate)!r}&seed={seed}"
    )


def whole_number(words: str, key: str, bounds: tuple[int, int], default: int, tip: str = "") -> int:
    """Draw a field for a whole number between bounds that is kept and part of the address."""
    value = st.number_input(
        words, *bounds, step=1, key=keep(key, default), bind="query-params", help=tip or None
    )
    return int(value)


@st.cache_data(max_entries=8, show_spinner="Making up the requests …")
def _made_up(spec: str) -> Workload:
    return make_workload(spec)


def _uploaded() -> Workload | None:
    file = kept_file(
        f"Trace (at most {UPLOAD_MB} MB)",
        "trace_file",
        type=["csv", "jsonl", "json"],
        max_upload_size=UPLOAD_MB,
        help=f"In one of the formats {', '.join(FORMATS)}; its columns say which one.",
    )
    if file is None:
        st.info("Upload a trace, or choose a recipe above.")
        return None
    bad, num_bad, workload = _read(file.data, file.name)
    if num_bad:
        st.warning(f"{num_bad:,} rows cannot be used and are left out; the first of them:")
        st.dataframe(bad, hide_index=True, height=180)
    if workload is None:
        raise TraceError(f"{file.name}: no row of it can be used")
    lines = [f"{len(workload):,} requests", *dropped_rows(workload.meta.rows())]
    st.caption(f"{escaped(file.name)}: {escaped('; '.join(lines))}.")
    return workload


@st.cache_data(max_entries=4, show_spinner="Reading the trace …")
def _read(data: bytes, name: str) -> tuple[list[dict[str, object]], int, Workload | None]:
    """Return (first bad rows, number of bad rows, workload read) of an uploaded trace."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"trace{Path(name).suffix.lower()}"
        path.write_bytes(data)
        try:
            report = check_trace(path, limit=SHOWN_BAD)
        except TraceError as error:
            raise TraceError(str(error).replace(str(path), name)) from None
    rows: list[dict[str, object]] = [
        {"line": b.line, "reason": b.reason, "row": b.detail} for b in report.bad_lines
    ]
    return rows, report.num_bad, report.workload
