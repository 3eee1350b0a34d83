"""Entry of the dashboard: `streamlit run dashboard -- FOLDER...` (default: `runs`)."""

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Source, find_recordings
from zlab.dashboard.figures.occupancy import enlarge, indexed_image
from zlab.dashboard.views import (
    compare,
    fleet,
    live,
    occupancy,
    play,
    requests,
    runs,
    server,
    trust,
)
from zlab.dashboard.views.navigation import AREA
from zlab.dashboard.views.page import as_code, error_in_words

VIEWS = (
    "Occupancy",
    "Requests",
    "Compare",
    "Trust",
    "Play",
    "Live",
    "Fleet",
    "Server",
    "Runs",
)
WORDS = {
    "Occupancy": "Who holds which blocks when, and where the pool goes to waste.",
    "Requests": "What became of every request, and why it waited.",
    "Compare": "Recordings side by side: figures, latencies, pools, sweeps.",
    "Trust": "Does the simulator agree with the engine?",
    "Play": "Put a policy together and simulate it.",
    "Live": "Follow a recording that is still being written.",
    "Fleet": "Replicas side by side.",
    "Server": "Follow a running server by its address: policies, canary, gates, drift.",
    "Runs": "All recordings: find, tag and open them, and what they differ in.",
}
OF_ONE_RUN = ("Occupancy", "Requests", "Live")
DEFAULT_ROOT = Path("runs")
UPLOAD_MB = 50


def main() -> None:
    """Draw the page."""
    st.set_page_config(page_title="Zipage Lab", page_icon=_icon(), layout="wide")
    roots = [Path(argument) for argument in sys.argv[1:]]
    missing = [root for root in roots if not root.is_dir()]
    for root in missing:
        st.error(
            f"**There is no folder {as_code(root)}.** Start the dashboard with one that exists."
        )
    roots = [root for root in roots if root not in missing]
    if missing and not roots:
        st.stop()
    roots = roots or [DEFAULT_ROOT]
    if not find_recordings(roots) and "first-look" not in st.session_state:
        st.session_state["first-look"] = play.make_first_run(roots[0])
    sources = find_recordings([*roots, *_uploads()])
    if "uploaded" in st.session_state:
        _open_uploaded(st.session_state.pop("uploaded"))
    opened = st.session_state.pop("open-folder", None)
    for found in sources:
        if found.folder == opened:
            st.session_state["run"] = found.label
    with st.sidebar:
        st.title("Zipage Lab", anchor=False)
        source = _choose(sources, roots)
        _upload()
    view = _choose_view()
    st.caption(WORDS[view])
    if source is not None and view in OF_ONE_RUN and play.is_first_look(source.folder):
        st.info(play.ABOUT_FIRST_LOOK)
    _draw(view, source, sources, roots)


def _open_uploaded(label: str) -> None:
    """Show a recording that was just uploaded."""
    _forget_selection()
    st.session_state["run"] = label
    if st.session_state.get("view", st.query_params.get("view")) not in OF_ONE_RUN:
        st.session_state["view"] = VIEWS[0]


def _choose_view() -> str:
    """Draw the selection of the view; the address always names it."""
    wanted = st.session_state.get("view", st.query_params.get("view"))
    if wanted not in VIEWS:
        if wanted is not None:
            st.warning(f"There is no view {as_code(wanted)}. This is {VIEWS[0]}.")
        st.session_state["view"] = VIEWS[0]
    view = st.segmented_control(
        "View",
        VIEWS,
        required=True,
        key="view",
        bind="query-params",
        label_visibility="collapsed",
    )
    return str(view or VIEWS[0])


def _icon() -> BytesIO:
    """Draw the page icon. An icon by name would be fetched from outside."""
    cells = np.array([[1, 1, 2, 0], [1, 2, 2, 3], [0, 1, 3, 3], [1, 1, 1, 2]], dtype=np.uint8)
    return BytesIO(
        indexed_image(enlarge(cells, 32, 32), ["#ffffff", "#56b4e9", "#0072b2", "#d55e00"])
    )


def _draw(view: str, source: Source | None, sources: list[Source], roots: list[Path]) -> None:
    match view:
        case "Play":
            play.show(roots[0])
        case "Compare":
            compare.show(sources, roots)
        case "Trust":
            trust.show(sources)
        case "Fleet":
            fleet.show(sources)
        case "Server":
            server.show()
        case "Runs":
            runs.show(sources, roots[0])
        case _ if source is None:
            _nothing(sources, roots)
        case "Requests":
            requests.show(source, roots[0])
        case "Live":
            live.show(source)
        case _:
            occupancy.show(source, roots[0])


def _choose(sources: list[Source], roots: list[Path]) -> Source | None:
    """Draw the selection of the recording that most views show."""
    by_label = {source.label: source for source in sources}
    # The box has no default option. So the address always names the recording that is shown, also
    # after a newer one appears.
    wanted = st.session_state.get("run", st.query_params.get("run"))
    labels = list(by_label)
    if wanted is None:
        if not labels:
            return None
        st.session_state["run"] = labels[0]
    elif wanted not in by_label:  # it stays in the address, so that the page goes on to say so
        labels.append(str(wanted))
        st.session_state["run"] = str(wanted)
    label = st.selectbox(
        "Recording",
        labels,
        index=None,
        key="run",
        bind="query-params",
        on_change=_forget_selection,
    )
    st.button("Look for new recordings", width="stretch")
    return by_label.get(str(label))


def _forget_selection() -> None:
    """Clear selections: those made in one recording mean nothing in another."""
    st.session_state.pop("parts_before", None)
    for key in ("from", "to", "first", "last", "request", "block", "at", "page", *AREA):
        if key in st.session_state:
            st.session_state[key] = 1 if key == "page" else None


def _uploads() -> list[Path]:
    """Return the folder of this session's uploaded recordings, if there is one."""
    uploads: data.UploadFolder | None = st.session_state.get("uploads")
    return [uploads.folder] if uploads is not None else []


def _upload() -> None:
    """Accept a recording as a zip file, for this session only."""
    file = st.file_uploader(
        "Open a recording (zip)", type=["zip"], key="recording_file", max_upload_size=UPLOAD_MB
    )
    if file is None or file.file_id in st.session_state.setdefault("unpacked", set()):
        return
    st.session_state["unpacked"].add(file.file_id)
    if st.session_state.get("uploads") is None:
        st.session_state["uploads"] = data.UploadFolder()
    with error_in_words(file.name):
        target = (
            st.session_state["uploads"].folder
            / f"uploaded-{Path(file.name).stem[:60]}-{file.file_id[:6]}"
        )
        data.unpack(file.getvalue(), target)
        st.session_state["uploaded"] = target.name
        st.rerun()


def _nothing(sources: list[Source], roots: list[Path]) -> None:
    """Say what to do when there is no recording, or not the one that the address names."""
    places = ", ".join(as_code(root) for root in roots)
    if sources:
        st.error(f"**There is no recording {as_code(st.session_state.get('run'))} in {places}.**")
        st.caption(
            "It was moved or deleted, or it was uploaded in another session. Choose another "
            "recording on the left, or look for it in the view **Runs**."
        )
        return
    st.info(
        f"No recording was found in {places}. Make some with `zlab demo`, replay a "
        "trace with `zlab replay TRACE --out runs/NAME`, simulate one in the view **Play**, or "
        "say where they are: "
        "`streamlit run dashboard -- FOLDER`."
    )


if __name__ == "__main__":
    main()
