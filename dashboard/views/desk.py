"""What was entered in the view Play, and what runs there: kept by the server under a name in the
address.

Streamlit forgets a field as soon as the page is drawn without it, and a session ends with a reload.
So values, uploaded files and the running job lie on a desk that the address names.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import streamlit as st

MOST_DESKS = 200
NAME = "play"  # of the desk in the address


@dataclass(frozen=True)
class KeptFile:
    """A file as it was uploaded."""

    name: str
    data: bytes
    number: str  # another one for each upload


@dataclass
class Desk:
    """What one reader entered: values of fields, files by the key of their field, the running job,
    the folders of the last runs, newest first, and by recording the runs of its requests under
    another policy.
    """

    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, KeptFile] = field(default_factory=dict)
    job: Any = None  # a PlayJob or None; its module imports this one
    played: list[Path] = field(default_factory=list)
    what_ifs: dict[str, list[Any]] = field(default_factory=dict)  # lists of PlayJob


class Desks:
    """Desks by name. The one that was not used for longest goes when there are too many."""

    def __init__(self) -> None:
        self._desks: OrderedDict[str, Desk] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str | None) -> tuple[str, Desk]:
        """Return the desk of that name, or a new one with a new name."""
        with self._lock:
            if name is None or name not in self._desks:
                name = uuid4().hex[:12]
                self._desks[name] = Desk()
            self._desks.move_to_end(name)
            for old, desk in list(self._desks.items()):
                if len(self._desks) <= MOST_DESKS:
                    break
                jobs = [desk.job, *(job for found in desk.what_ifs.values() for job in found)]
                if not any(job is not None and job.running for job in jobs):
                    del self._desks[old]
            return name, self._desks[name]


@st.cache_resource(show_spinner=False)
def desks() -> Desks:
    """Return the desks of this server."""
    return Desks()


def desk() -> Desk:
    """Return the desk that the address or the session names; the address names it from then on."""
    wanted = st.query_params.get(NAME, st.session_state.get("desk"))
    name, found = desks().find(wanted)
    st.session_state["desk"] = name
    if st.query_params.get(NAME) != name:
        st.query_params[NAME] = name
    return found


def known_desk() -> Desk | None:
    """Return the desk that the address or the session names, None where they name none."""
    named = NAME in st.query_params or "desk" in st.session_state
    return desk() if named else None


def keep(key: str, default: Any, choices: Sequence[Any] | None = None) -> str:
    """Give a field its value before it is drawn; returns the key. `note_all` notes it afterwards.

    The value is what the session or the address has, else what was entered before, else `default`.
    A value that is not among `choices` is left out. The field itself gets no default.
    """
    values = desk().values
    if key not in st.session_state and key not in st.query_params:
        value = values.get(key, default)
        st.session_state[key] = value if choices is None or value in choices else default
    st.session_state.setdefault("kept", set()).add(key)
    return key


def note_all() -> None:
    """Note the values of all fields that were drawn."""
    values = desk().values
    for key in st.session_state.get("kept", ()):
        if key in st.session_state:
            values[key] = st.session_state[key]


def kept_file(label: str, key: str, **more: Any) -> KeptFile | None:
    """Draw a field for a file; the last file stays until another comes or it is put away."""
    files = desk().files
    uploaded = st.file_uploader(label, key=key, **more)
    if uploaded is not None:
        number = str(uploaded.file_id)
        if key not in files or files[key].number != number:
            files[key] = KeptFile(uploaded.name, uploaded.getvalue(), number)
    elif key in files:
        left, right = st.columns([4, 1], vertical_alignment="center")
        left.caption(f"Still open: `{files[key].name.replace('`', ' ')}`")
        if right.button("Put away", key=f"{key}|away"):
            del files[key]
            st.rerun()
    return files.get(key)
