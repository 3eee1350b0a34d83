"""Something to see where nothing has been recorded yet: a small run, simulated when the dashboard first opens."""

from pathlib import Path

import streamlit as st

from policies.core.limits import Limits
from sim.replay import replay
from traces.recording import RecordingError
from traces.synthetic import reasoning
from traces.workload import Workload

POLICIES = ("full-kv", "hybrid")
LIMITS = Limits(num_blocks=256, block_size=256, max_batched_tokens=8192, max_running=128, max_model_len=40_960)
NUM_REQUESTS = 96


@st.cache_resource(show_spinner="There is no recording yet: simulating a small one …")
def make_one(root: Path) -> bool:
    """Simulate a reasoning workload under two policies into `root`/first-look; once, however many sessions open."""
    whole = reasoning("amc23", seed=0)
    workload = Workload(list(whole)[:NUM_REQUESTS], whole.meta)
    for policy in POLICIES:
        try:
            replay(workload, policy, limits=LIMITS, out=root / "first-look" / policy)
        except (RecordingError, OSError):  # another process was faster, or the folder cannot be written to
            return False
    return True
