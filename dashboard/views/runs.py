"""The view Runs: recordings in a table to filter, sort and tag, and the settings they differ in."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from zlab.dashboard.data import Source
from zlab.dashboard.figures.compare import HEADLINE, value_of
from zlab.dashboard.views.identity import (
    card_of,
    cost_of,
    part_of,
    settings_table,
    text_of,
    workload_of,
)
from zlab.dashboard.views.page import csv_of, escaped
from zlab.traces.recording import Recording, RecordingError

TAGS_FILE = "zlab-tags.json"  # label of a recording -> its tags; beside the recordings
MOST_TAGS_BYTES = 1_000_000
RESULTS = {
    "requests/s": HEADLINE,
    "output tokens/s": "tokens_per_s",
    "TTFT p99, s": "ttft_s.p99",
    "TPOT p99, s": "tpot_s.p99",
    "preemptions": "preemptions",
}
NEWEST = "newest"


def read_tags(root: Path) -> dict[str, str]:
    """Return the tags of the recordings below `root` by label; {} where none can be read."""
    try:
        path = root / TAGS_FILE
        if path.stat().st_size > MOST_TAGS_BYTES:
            return {}
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(label): text_of(tags, 200) for label, tags in found.items() if tags}


def write_tags(root: Path, labels: Sequence[str], tags: str) -> None:
    """Give recordings these tags, "" to remove them. Raises OSError."""
    found = read_tags(root)
    for label in labels:
        found.pop(label, None)
        if tags.strip():
            found[label] = " ".join(tags.split())
    unfinished = root / f"{TAGS_FILE}.unfinished"
    unfinished.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    os.replace(unfinished, root / TAGS_FILE)


def run_row(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a recording by column."""
    summary = part_of(manifest, "summary")
    known = summary if isinstance(summary, Mapping) else {}
    return {
        "state": "ended" if manifest.get("complete") else "being written or cut off",
        "policy": text_of(manifest.get("policy")),
        "GPU": card_of(manifest),
        "model": text_of(manifest.get("model")),
        "blocks": value_of(manifest, "num_blocks"),
        "tokens a block": value_of(manifest, "block_size"),
        "workload": workload_of(manifest),
        "times": cost_of(manifest),
        **{words: value_of(known, key) for words, key in RESULTS.items()},
        "made": text_of(manifest.get("started"), 20),
    }


@st.cache_data(max_entries=1000, show_spinner=False)
def _row(folder: str, changed: tuple[int, int]) -> dict[str, Any]:
    try:
        return run_row(Recording(folder).manifest)
    except RecordingError as error:
        return {"state": f"cannot be read: {error}"}


def _changed(folder: str) -> tuple[int, int]:
    try:
        status = (Path(folder) / "manifest.json").stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def runs_table(sources: Sequence[Source], tags: Mapping[str, str]) -> pd.DataFrame:
    """Return a row for each recording, newest first."""
    rows = [
        {"run": source.label, "tags": tags.get(source.label, "")}
        | _row(source.folder, _changed(source.folder))
        for source in sources
    ]
    return pd.DataFrame(rows, columns=["run", "tags", *run_row({})])


def filtered(table: pd.DataFrame, text: str, order: str) -> pd.DataFrame:
    """Return the rows that hold every word of `text`, ordered by a column."""
    kept = table
    for word in text.lower().split():
        cells = kept.astype("string").fillna("")
        holds = cells.apply(
            lambda column, word=word: column.str.lower().str.contains(word, regex=False)
        )
        kept = kept[holds.any(axis=1)]
    if order == NEWEST:
        return kept
    rising = not pd.api.types.is_numeric_dtype(kept[order]) or order.endswith(", s")
    return kept.sort_values(order, ascending=rising, na_position="last", kind="stable")


def show(sources: list[Source], root: Path) -> None:
    """Draw the table of all recordings; `root` is where their tags are kept."""
    table = runs_table(sources, read_tags(root))
    if table.empty:
        st.info("There is no recording yet.")
        return
    columns = st.columns([2, 1], vertical_alignment="bottom")
    text = columns[0].text_input(
        "Filter: words that a row must hold", key="filter", bind="query-params"
    )
    order = columns[1].selectbox("Order", [NEWEST, *table.columns], key="sort", bind="query-params")
    kept = filtered(table, text, str(order))
    st.caption(
        f"{len(kept):,} of {len(table):,} recordings. Mark rows to open, compare or tag them; a "
        f"click on a head sorts."
    )
    labels = kept["run"].tolist()
    st.dataframe(
        kept,
        hide_index=True,
        height=min(38 + 35 * max(len(kept), 1), 560),
        key=f"runs-table|{text}|{order}",
        on_select=lambda: _mark(f"runs-table|{text}|{order}", labels),
        selection_mode="multi-row",
    )
    st.download_button("Table (CSV)", csv_of(kept), "runs.csv", "text/csv", on_click="ignore")
    _act(sources, root)


def _mark(key: str, labels: list[str]) -> None:
    """Choose the runs whose rows are marked."""
    rows = st.session_state[key]["selection"]["rows"]
    st.session_state["chosen"] = [labels[row] for row in rows if row < len(labels)]


def _act(sources: list[Source], root: Path) -> None:
    """Draw what can be done with chosen runs."""
    labels = [source.label for source in sources]
    st.session_state["chosen"] = [
        label for label in st.session_state.get("chosen", []) if label in labels
    ]
    chosen = st.multiselect("Chosen runs", labels, key="chosen")
    columns = st.columns([1, 1, 2, 1], vertical_alignment="bottom")
    ready = {"Open": ("Occupancy", len(chosen) == 1), "Compare": ("Compare", bool(chosen))}
    for column, (words, (view, enabled)) in zip(columns, ready.items(), strict=False):
        column.button(
            words, on_click=go_to, args=(view, chosen), disabled=not enabled, width="stretch"
        )
    tags = columns[2].text_input("Tags", key="tags", help="Words that you find these runs by")
    if columns[3].button("Tag", disabled=not chosen, width="stretch"):
        try:
            write_tags(root, chosen, tags)
            st.rerun()
        except OSError as error:
            st.error(f"**The tags cannot be written.** {escaped(error)}")
    if len(chosen) > 1:
        folders = {source.label: source.folder for source in sources}
        differences({label: folders[label] for label in chosen[:6]})


def go_to(view: str, labels: Sequence[str]) -> None:
    """Show runs in another view."""
    st.session_state["view"] = view
    if view == "Compare":
        st.session_state["runs"] = list(labels)
    else:
        st.session_state["run"] = labels[0]


def differences(folders: Mapping[str, str]) -> None:
    """Draw the settings in which recordings differ."""
    manifests = {}
    for label, folder in folders.items():
        try:
            manifests[label] = Recording(folder).manifest
        except RecordingError as error:
            st.error(f"**{escaped(label)}** is left out. {escaped(error)}")
    st.subheader("Settings that differ", anchor=False)
    table, equal = settings_table(manifests)
    if table.empty:
        st.success(f"All {equal:,} settings are equal.")
        return
    st.dataframe(table, hide_index=True, height=min(38 + 35 * len(table), 560))
    st.caption(f"{equal:,} other settings are equal.")
