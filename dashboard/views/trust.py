"""Does the simulator agree with the engine: decisions row by row, times step by step."""

import pandas as pd
import streamlit as st

from dashboard.cache import open_recording
from dashboard.figures.trust import around, error_figure, error_table, step_errors, times_figure
from dashboard.load import Source, stamp
from dashboard.views.page import draw, told
from traces.recording import Difference, Recording, first_difference

MUST_AGREE = ("workload_sha256", "policy_digest", "num_blocks", "block_size", "limits", "length_multiplier")


def show(sources: list[Source]) -> None:
    """Draw the view of two recordings."""
    labels = [source.label for source in sources]
    if len(labels) < 2:
        st.info(
            "Two recordings of one workload are compared here: one simulated, one by the engine (or any two). Make a "
            "second one in the view **Play**, or record the engine: `zlab serve --record runs/engine`."
        )
        return
    kinds = {source.label: _source_of(source) for source in sources}
    measured_first = next((i for i, label in enumerate(labels) if kinds[label] == "engine"), min(1, len(labels) - 1))
    predicted_first = next((i for i, label in enumerate(labels) if i != measured_first and kinds[label] == "sim"), 0)
    columns = st.columns(2)

    def words(label: str) -> str:
        return f"{label}  ({kinds.get(label, '?')})"

    left = columns[0].selectbox(
        "Predicted (simulator)", labels, index=predicted_first, key="predicted", format_func=words
    )
    right = columns[1].selectbox("Measured (engine)", labels, index=measured_first, key="measured", format_func=words)
    folders = {source.label: source.folder for source in sources}
    with told("The pair"):
        _pair(folders[str(left)], folders[str(right)])


@st.cache_data(max_entries=500, show_spinner=False)
def _named_source(folder: str, stamp: object) -> str:
    return str(Recording(folder).manifest.get("source", "?"))


def _source_of(source: Source) -> str:
    """Whether a recording says that it was simulated or measured; "?" if it cannot be read."""
    with st.container():
        try:
            return _named_source(source.folder, stamp(source.folder))
        except ValueError:
            return "?"


@st.cache_data(max_entries=8, show_spinner="Comparing decisions …")
def _difference(left: str, right: str, stamps: object) -> Difference | None:
    return first_difference(Recording(left).table("events"), Recording(right).table("events"))


def _pair(left: str, right: str) -> None:
    one, other = open_recording(left), open_recording(right)
    difference = _difference(left, right, (stamp(left), stamp(right)))
    _verdict(one, other, difference)
    if difference is not None:
        _side_by_side(one, other, difference)
    steps = [recording.table("steps", ("step", "start_s", "end_s")) for recording in (one, other)]
    errors = step_errors(steps[0], steps[1], difference)
    st.subheader("Step times, predicted against measured", anchor=False)
    if not len(errors.step):
        st.info("The runs part in their first step: no step can be compared.")
        return
    total = errors.total
    if total is not None:
        st.markdown(
            f"Over {len(errors.step):,} steps that both decided alike, the prediction is "
            f"**{abs(total):.1%} {'above' if total >= 0 else 'below'}** what was measured."
        )
    columns = st.columns(2)
    with columns[0]:
        draw(times_figure(errors), "times", "Predicted against measured step times")
    with columns[1]:
        draw(error_figure(errors), "errors", "Error of each step over the run")
    table = error_table(errors)
    st.dataframe(table.round(3), hide_index=True)
    st.download_button("Errors (CSV)", table.to_csv(index=False).encode(), "errors.csv", "text/csv", on_click="ignore")


def _verdict(one: Recording, other: Recording, difference: Difference | None) -> None:
    """Digests, and what makes two runs incomparable."""
    differ = [key for key in MUST_AGREE if one.manifest.get(key) != other.manifest.get(key)]
    if differ:
        st.warning(f"These runs were not asked the same: they differ in {', '.join(differ)}. Their decisions may part.")
    digests = [str(recording.manifest.get("digest", "not finished")) for recording in (one, other)]
    rows = pd.DataFrame(
        {
            "": ["predicted", "measured"],
            "source": [recording.manifest.get("source", "?") for recording in (one, other)],
            "policy": [recording.manifest.get("policy", "?") for recording in (one, other)],
            "steps": [recording.manifest.get("num_steps") for recording in (one, other)],
            "decision digest": digests,
        }
    )
    st.dataframe(rows, hide_index=True)
    ended_early = difference is not None and None in (difference.left, difference.right)
    if ended_early and not (one.complete and other.complete):
        st.info("Both runs decided alike as far as both are written; one of them has not come to its end.")
    elif difference is None and digests[0] == digests[1]:
        st.success("Same digest: both runs decided alike from the first step to the last.")
    elif difference is None:
        st.warning("Every event is the same, but the digests differ: one of the recordings was changed or cut off.")
    else:
        st.warning(f"The runs part in step {difference.step:,}, at event {difference.index:,}.")


def _side_by_side(one: Recording, other: Recording, difference: Difference) -> None:
    st.subheader("Where they part", anchor=False)
    for column, (words, recording) in zip(st.columns(2), (("predicted", one), ("measured", other)), strict=True):
        with column:
            st.caption(words)
            st.dataframe(around(recording.table("events"), recording.manifest, difference.index), hide_index=True)
