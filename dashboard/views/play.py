"""Try a policy: choose requests, put a policy together, simulate, compare with the last runs."""

from functools import partial
from pathlib import Path

import streamlit as st

from dashboard import archive, cache
from dashboard.figures.compare import comparison, in_words, strips_figure
from dashboard.views.jobs import Job, Order, new_folder
from dashboard.views.page import draw, told
from dashboard.views.policy_form import policy_form
from dashboard.views.workload_form import workload_form
from policies.core.errors import SchedulerError
from policies.core.limits import Limits
from policies.core.policy import Policy
from policies.core.scheduler import Scheduler
from policies.spec import PolicyError, policy_to_toml
from sim.errors import SimError
from sim.hardware import GPUS, MODELS
from traces.workload import TraceError, Workload

SIZES = (16, 32, 64, 128, 256)
KEPT = 4  # last runs that are compared


def show(root: Path) -> None:
    """Draw the view; recordings go below `root`."""
    job: Job | None = st.session_state.get("job")
    if job is not None and job.running:
        _watch()
        return
    if job is not None:
        _ended(job)
    _last_runs(expanded=job is not None)
    order = _order()
    if order is not None:
        left, right = st.columns([1, 1])
        left.button("Run", type="primary", key="run_it", on_click=_start, args=(order, root), width="stretch")
        text, name = policy_to_toml(order.policy).encode(), f"{order.policy.name}.toml"
        right.download_button("Policy (TOML)", text, name, "text/plain", on_click="ignore", width="stretch")


def _order() -> Order | None:
    """The forms; None while they do not describe a run that could be started, with the reason on the page."""
    try:
        st.subheader("Requests", anchor=False)
        workload = workload_form()
        st.subheader("Machine", anchor=False)
        gpu, model, limits = _machine()
        st.subheader("Policy", anchor=False)
        policy = policy_form()
        if workload is None:
            return None
        _check(workload, policy, limits)
        return Order(workload, policy, gpu, model, limits)
    except (TraceError, PolicyError, SimError, SchedulerError) as error:
        st.error(f"**This cannot be run.** {error}")
        st.caption("Change the field that the message names.")
        return None


def _machine() -> tuple[str, str, Limits]:
    columns = st.columns(5)
    gpus, models = list(GPUS), list(MODELS)
    gpu = columns[0].selectbox("GPU", gpus, index=gpus.index("h200"), key="gpu", bind="query-params")
    model = columns[1].selectbox("Model", models, index=models.index("qwen3-8b"), key="model", bind="query-params")
    size = columns[2].selectbox(
        "Tokens a block", [16, 32, 64, 128, 256], index=4, key="block_size", bind="query-params"
    )
    blocks = columns[3].number_input("Blocks in the pool", 1, 100_000, 256, key="num_blocks", bind="query-params")
    batched = columns[4].number_input("Tokens a step", 1, 1_000_000, 8192, key="batched", bind="query-params")
    columns = st.columns(5)
    running = columns[0].number_input("Most running", 1, 10_000, 256, key="max_running", bind="query-params")
    host = columns[1].number_input("Host blocks for swap", 0, 1_000_000, 0, key="host_blocks", bind="query-params")
    longest = MODELS[str(model)].max_positions
    return str(gpu), str(model), Limits(int(blocks), int(size), int(batched), int(running), longest, int(host))


def _check(workload: Workload, policy: Policy, limits: Limits) -> None:
    """Raise the error that a run would end with, before it is started."""
    Scheduler(policy, limits, prefix_block_size=workload.meta.block_size)
    traced = workload.meta.block_size
    if traced and traced % limits.block_size:
        raise SimError(f"tokens a block must divide the {traced} tokens of this workload's prefix ids")


def _start(order: Order, root: Path) -> None:
    job = Job(order, new_folder(root / "play", order.policy.name))
    st.session_state["job"] = job
    job.start()


@st.fragment(run_every=0.5)
def _watch() -> None:
    """How far the run is, twice a second; the page is drawn anew when it has ended."""
    job: Job | None = st.session_state.get("job")
    if job is None or not job.running:
        st.rerun(scope="app")
    st.subheader(f"Running {job.order.policy.name}", anchor=False)
    words = f"{job.num_ended:,} of {len(job.order.workload):,} requests, {job.simulated_s:,.1f} simulated seconds"
    st.progress(min(job.share, 1.0), words if job.started else "waits for its turn: other sessions are simulating")
    st.button("Cancel", on_click=job.stop, key="cancel", icon=":material/stop:")


def _ended(job: Job) -> None:
    """Say once how the run ended, and keep it among the last runs if it came to its end."""
    del st.session_state["job"]
    if job.error is not None:
        st.error(f"**The run failed.** {job.error}")
    elif job.stopped:
        st.warning(
            f"Cancelled after {job.num_ended:,} of {len(job.order.workload):,} requests. What was simulated so far is "
            f"in `{job.folder}`."
        )
    else:
        runs: list[Path] = st.session_state.setdefault("played", [])
        runs.insert(0, job.folder)
        del runs[KEPT:]
        st.success(f"Done. The recording is in `{job.folder}` and in the list on the left.")


def _last_runs(expanded: bool) -> None:
    runs: list[Path] = st.session_state.get("played", [])
    if not runs:
        return
    with st.expander("Last runs", expanded=expanded), told("The last runs"):
        labels = {run.name: str(run) for run in runs}
        table = comparison({name: cache.summary(folder) for name, folder in labels.items()})
        st.dataframe(in_words(table), hide_index=True)
        strips = strips_figure({name: cache.occupancy(folder) for name, folder in labels.items()})
        draw(strips, "play-strips", "Block states over time, a strip a run")
        for name, folder in labels.items():
            left, right = st.columns([3, 1], vertical_alignment="center")
            left.caption(name)
            pack = partial(archive.pack, Path(folder))
            right.download_button("Recording (zip)", pack, f"{name}.zip", on_click="ignore", key=f"zip|{name}")
