"""The view Trust: a simulated and a measured run, decisions row by row, times step by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from zlab.dashboard.data import Snapshot, Source
from zlab.dashboard.figures.trust import (
    around,
    error_figure,
    error_table,
    step_errors,
    times_figure,
)
from zlab.dashboard.views.identity import DIGITS, identity, text_of
from zlab.dashboard.views.page import (
    as_code,
    csv_of,
    draw,
    error_in_words,
    escaped,
    name_dropped_rows,
)
from zlab.sim.recorded_run import redecide
from zlab.sim.specs import gpu_of_card
from zlab.traces.recording import FILE as ASKED
from zlab.traces.recording import (
    Difference,
    Recording,
    RecordingError,
    first_difference,
    read_asked,
)

MUST_AGREE = {  # key of the manifest -> words; decisions depend on these
    "workload_sha256": "workload",
    "policy_digest": "policy",
    "policy_changes": "changes of the policy",
    "num_blocks": "blocks in the pool",
    "block_size": "tokens a block",
    "limits": "limits",
    "length_multiplier": "length multiplier",
}
OF_TIMES = {"gpu": "GPU", "model": "model"}  # step times depend on these
EVERY = MUST_AGREE | OF_TIMES


def show(sources: list[Source]) -> None:
    """Draw the view of two recordings."""
    labels = [source.label for source in sources]
    if len(labels) < 2:
        st.info(
            "Two recordings of one workload are compared here: one simulated, one by the engine "
            "(or any two). Make a "
            "second one in the view **Play**, or record the engine: `zlab serve --record "
            "runs/engine`."
        )
        return
    firsts = best_pair([manifest_of(source) for source in sources])
    wanted = {
        key: st.session_state.get(key, st.query_params.get(key))
        for key in ("predicted", "measured")
    }
    for key, place in zip(wanted, firsts, strict=True):
        if wanted[key] in labels:
            continue
        if wanted[key] is not None:
            st.error(f"There is no recording {as_code(wanted[key])} here: another one is shown.")
        others = [labels[place], *labels]
        st.session_state[key] = next(one for one in others if one not in wanted.values())
    columns = st.columns(2)
    left = columns[0].selectbox(
        "Predicted (simulator)", labels, index=None, key="predicted", bind="query-params"
    )
    right = columns[1].selectbox(
        "Measured (engine)", labels, index=None, key="measured", bind="query-params"
    )
    folders = {source.label: source.folder for source in sources}
    with error_in_words("The pair"):
        _pair(folders[str(left)], folders[str(right)])


def manifest_of(source: Source) -> Mapping[str, Any]:
    """Return the manifest of a recording, {} when it cannot be read."""
    try:
        return Recording(source.folder).manifest
    except RecordingError:
        return {}


def best_pair(manifests: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return which recordings to compare first, as (predicted, measured), of those given newest
    first.

    A run of the engine and a simulation that was asked the same come first, then any run of the
    engine and any simulation.
    """
    engine = [i for i, found in enumerate(manifests) if found.get("source") == "engine"]
    simulated = [i for i, found in enumerate(manifests) if found.get("source") == "sim"]
    pairs = [(one, other) for other in engine for one in simulated]
    if pairs:
        return min(
            pairs, key=lambda pair: len(differing(manifests[pair[0]], manifests[pair[1]], EVERY))
        )
    measured = engine[0] if engine else min(1, len(manifests) - 1)
    return next(i for i in range(len(manifests)) if i != measured), measured


def differing(
    one: Mapping[str, Any], other: Mapping[str, Any], keys: Mapping[str, str]
) -> list[str]:
    """Return what differs of some entries of two manifests, as "words: one, other"."""
    found = []
    for key, words in keys.items():
        left, right = (manifest.get(key) or None for manifest in (one, other))
        if key == "gpu":  # the engine names the card as its driver does
            left, right = (gpu_of_card(str(card)) for card in (left, right))
        if left != right:
            short = (escaped(text_of(value, 17)) for value in (left, right))
            found.append(f"{words} ({', '.join(short)})")
    return found


@st.cache_data(max_entries=8, show_spinner="Comparing decisions …")
def _difference(stamps: object, _one: Recording, _other: Recording) -> Difference | None:
    return first_difference(_one.table("events"), _other.table("events"))


def _pair(left: str, right: str) -> None:
    snapshots = Snapshot(left), Snapshot(right)
    one, other = (snapshot.recording for snapshot in snapshots)
    difference = _difference(tuple(snapshot.stamp for snapshot in snapshots), one, other)
    _verdict(one, other, difference)
    name_dropped_rows({"predicted": snapshots[0], "measured": snapshots[1]})
    if difference is not None:
        if (other.folder / ASKED).is_file():
            _answer(snapshots[1])
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
    machines = differing(one.manifest, other.manifest, OF_TIMES)
    if machines:
        st.warning(
            f"The times are not of one machine: the runs differ in {', '.join(machines)}. So the "
            f"errors say nothing about how good the simulator is. Simulate the measured machine: "
            f"{as_code(f'zlab trust {other.folder}')}."
        )
    columns = st.columns(2)
    with columns[0]:
        draw(times_figure(errors), "times", "Predicted against measured step times")
    with columns[1]:
        draw(error_figure(errors), "errors", "Error of each step over the run")
    table = error_table(errors)
    st.dataframe(table.round(3), hide_index=True)
    st.download_button(
        "Errors (CSV)",
        csv_of(table),
        "errors.csv",
        "text/csv",
        on_click="ignore",
    )


def _verdict(one: Recording, other: Recording, difference: Difference | None) -> None:
    """Show the digests, and what makes two runs incomparable."""
    differ = differing(one.manifest, other.manifest, MUST_AGREE)
    if differ:
        st.warning(
            f"These runs were not asked the same: they differ in {', '.join(differ)}. Their "
            f"decisions may part."
        )
    digests = [str(recording.manifest.get("digest", "not finished")) for recording in (one, other)]
    identities = {
        words: identity(recording.manifest)
        | {"Steps": text_of(recording.manifest.get("num_steps")), "Digest": digest[:DIGITS]}
        for (words, recording), digest in zip(
            (("predicted", one), ("measured", other)), digests, strict=True
        )
    }
    st.dataframe(pd.DataFrame(identities).T.fillna("-"))
    ended_early = difference is not None and None in (difference.left, difference.right)
    if ended_early and not (one.complete and other.complete):
        st.info(
            "Both runs decided alike as far as both are written; one of them has not come to "
            "its end."
        )
    elif difference is None and digests[0] == digests[1]:
        st.success("Same digest: both runs decided alike from the first step to the last.")
    elif difference is None:
        st.warning(
            "Every event is the same, but the digests differ: one of the recordings was changed "
            "or cut off."
        )
    else:
        st.warning(f"The runs part in step {difference.step:,}, at event {difference.index:,}.")


def _answer(snapshot: Snapshot) -> None:
    """Say whether the scheduler decides the measured run again from the requests of the engine."""
    try:
        digest, num_steps, difference = _decided_again(snapshot.stamp, snapshot.recording)
    except ValueError as error:
        st.info(
            f"The measured run cannot be decided again from the requests of the engine. "
            f"{escaped(error)}"
        )
        return
    recorded = str(snapshot.recording.manifest.get("digest"))
    if digest == recorded:
        st.success(
            f"The measured run decided again, from the requests that the engine was asked: all "
            f"{num_steps:,} steps are the same (digest {digest[:16]}). So the two runs above part "
            f"because they were not asked the same, not because simulator and engine disagree."
        )
    else:
        step = "" if difference is None else f" from step {difference.step:,} on"
        st.error(
            f"The measured run decided again, from the requests that the engine was asked, is "
            f"another one{step}: digest {digest[:16]}, recorded {recorded[:16]}."
        )


@st.cache_data(max_entries=8, show_spinner="Deciding the measured run again …")
def _decided_again(stamp: object, _recording: Recording) -> tuple[str, int, Difference | None]:
    """Return digest, steps and the first difference of the run decided again. Raises ValueError."""
    asked = read_asked(_recording.folder)
    events = _recording.table("events")
    again = redecide(_recording.manifest, _recording.table("requests"), events, asked)
    return again.digest, again.num_steps, first_difference(events, again.tables.table("events"))


def _side_by_side(one: Recording, other: Recording, difference: Difference) -> None:
    st.subheader("Where they part", anchor=False)
    for column, (words, recording) in zip(
        st.columns(2), (("predicted", one), ("measured", other)), strict=True
    ):
        with column:
            st.caption(words)
            st.dataframe(
                around(recording.table("events"), recording.manifest, difference.index),
                hide_index=True,
            )
