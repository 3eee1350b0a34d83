"""The dashboard: `streamlit run dashboard` (after `--`: folders with recordings, `runs` if none is given)."""

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import streamlit as st

from dashboard import archive
from dashboard.load import Source, find_recordings
from dashboard.views import compare, first_look, live, occupancy, play, requests, trust
from dashboard.views.page import told
from traces.png import enlarge, indexed_png

VIEWS = ("Occupancy", "Requests", "Compare", "Trust", "Play", "Live")
WORDS = {
    "Occupancy": "Who holds which blocks when, and where the pool goes to waste.",
    "Requests": "What became of every request, and why it waited.",
    "Compare": "Recordings side by side: figures, latencies, pools, sweeps.",
    "Trust": "Does the simulator agree with the engine?",
    "Play": "Put a policy together and simulate it.",
    "Live": "Follow a recording that is still being written.",
}
UPLOAD_MB = 50


def main() -> None:
    """Draw the page."""
    st.set_page_config(page_title="Zipage Lab", page_icon=_icon(), layout="wide")
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path("runs")]
    if not find_recordings(roots) and "first-look" not in st.session_state:
        st.session_state["first-look"] = first_look.make_one(roots[0])
    sources = find_recordings([*roots, *_uploads()])
    with st.sidebar:
        st.title("Zipage Lab", anchor=False)
        source = _choose(sources, roots)
        _upload()
    view = st.segmented_control(
        "View", VIEWS, default=VIEWS[0], required=True, key="view", bind="query-params", label_visibility="collapsed"
    )
    st.caption(WORDS[str(view)])
    _draw(str(view), source, sources, roots)


def _icon() -> BytesIO:
    """A few blocks, drawn here: an icon by name would be fetched from outside."""
    cells = np.array([[1, 1, 2, 0], [1, 2, 2, 3], [0, 1, 3, 3], [1, 1, 1, 2]], dtype=np.uint8)
    return BytesIO(indexed_png(enlarge(cells, 32, 32), ["#ffffff", "#56b4e9", "#0072b2", "#d55e00"], clear=0))


def _draw(view: str, source: Source | None, sources: list[Source], roots: list[Path]) -> None:
    match view:
        case "Play":
            play.show(roots[0])
        case "Compare":
            compare.show(sources, roots)
        case "Trust":
            trust.show(sources)
        case _ if source is None:
            _nothing(roots)
        case "Requests":
            requests.show(source)
        case "Live":
            live.show(source)
        case _:
            occupancy.show(source)


def _choose(sources: list[Source], roots: list[Path]) -> Source | None:
    """The recording that most views show."""
    by_label = {source.label: source for source in sources}
    st.caption(f"Recordings in {', '.join(str(root) for root in roots)}, newest first")
    if not by_label:
        return None
    # No option is the default one: so the address always says which recording is shown, also when a newer one comes.
    if st.session_state.get("run", st.query_params.get("run")) not in by_label:
        st.session_state["run"] = next(iter(by_label))
    label = st.selectbox(
        "Recording", list(by_label), index=None, key="run", bind="query-params", on_change=_forget_selection
    )
    st.button("Look for new recordings", width="stretch")
    return by_label.get(str(label))


def _forget_selection() -> None:
    """What was selected in one recording means nothing in another."""
    for key in ("from", "to", "first", "last", "request", "block", "page"):
        if key in st.session_state:
            st.session_state[key] = 1 if key == "page" else None


def _uploads() -> list[Path]:
    """The folder of recordings that this session uploaded, if any."""
    uploads: archive.Unpacked | None = st.session_state.get("uploads")
    return [uploads.folder] if uploads is not None else []


def _upload() -> None:
    """Take a recording as a zip file, for this session only."""
    file = st.file_uploader("Open a recording (zip)", type=["zip"], key="recording_file", max_upload_size=UPLOAD_MB)
    if file is None or file.file_id in st.session_state.setdefault("unpacked", set()):
        return
    st.session_state["unpacked"].add(file.file_id)
    if st.session_state.get("uploads") is None:
        st.session_state["uploads"] = archive.Unpacked()
    with told(file.name):
        target = st.session_state["uploads"].folder / f"uploaded-{Path(file.name).stem[:60]}-{file.file_id[:6]}"
        archive.unpack(file.getvalue(), target)
        st.rerun()


def _nothing(roots: list[Path]) -> None:
    """No recording at all: what to do."""
    st.info(
        f"No recording was found in {', '.join(str(root) for root in roots)}. Make some with `zlab demo`, replay a "
        "trace with `zlab replay TRACE --out runs/NAME`, simulate one in the view **Play**, or say where they are: "
        "`streamlit run dashboard -- FOLDER`."
    )


if __name__ == "__main__":
    main()
