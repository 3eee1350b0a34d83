"""The view Play: choose requests, compose a policy, simulate it, compare the last runs.

When the dashboard finds no recording at all, it simulates a small one first.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot
from zlab.dashboard.figures.compare import comparison, in_words, strips_figure
from zlab.dashboard.views.desk import desk, keep, kept_file, note_all
from zlab.dashboard.views.forms import policy_form, whole_number, workload_form
from zlab.dashboard.views.jobs import PlayJob, RunRequest, new_folder, progress_of
from zlab.dashboard.views.page import as_code, draw, error_in_words, escaped, name_dropped_rows
from zlab.policies.core.plan import SchedulerError, SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import PolicyError, policy_to_toml
from zlab.sim.profiles import open_profile, profile_names
from zlab.sim.replay import check_blocks, default_limits, find_cost, memory_excess, replay
from zlab.sim.specs import (
    GPUS,
    MODELS,
    ModelSpec,
    SimError,
    find_gpu,
    read_model_config,
)
from zlab.traces.recording import RecordingError
from zlab.traces.synthetic import make_workload
from zlab.traces.timeline import MOST_BLOCKS
from zlab.traces.workload import TraceError, Workload

SIZES = (16, 32, 64, 128, 256)
KEPT = 4  # last runs that are compared


def show(root: Path) -> None:
    """Draw the view; recordings go below `root`."""
    place = desk()
    job = place.job
    if job is not None and job.running:
        progress_of(job)
        return
    if job is not None:
        _ended(job)
    unwritable = st.session_state.pop("unwritable", None)
    if unwritable is not None:
        st.error(f"**The run cannot be recorded in {as_code(root)}.** {escaped(unwritable)}")
        st.caption("Start the dashboard with a folder that can be written to, as its first one.")
    _last_runs(expanded=job is not None)
    request = _run_request()
    note_all()
    if request is not None:
        left, right = st.columns([1, 1])
        left.button(
            "Run",
            type="primary",
            key="run_it",
            on_click=_start,
            args=(request, root),
            width="stretch",
        )
        text, name = (
            policy_to_toml(request.policy, every_setting=True).encode(),
            f"{request.policy.name}.toml",
        )
        right.download_button(
            "Policy (TOML)", text, name, "text/plain", on_click="ignore", width="stretch"
        )


def _run_request() -> RunRequest | None:
    """Draw the forms and return the run they describe, None with the reason on the page."""
    try:
        st.subheader("Requests", anchor=False)
        workload = workload_form()
        st.subheader("Machine", anchor=False)
        machine = _machine()
        st.subheader("Policy", anchor=False)
        policy = policy_form()
        if workload is None or machine is None:
            return None
        request = _fitted(machine, workload, policy)
        _check(request)
        return request
    except (TraceError, PolicyError, SimError, SchedulerError) as error:
        st.error(f"**This cannot be run.** {escaped(error)}")
        st.caption("Change the field that the message names.")
        return None


@dataclass(frozen=True)
class Machine:
    """What the form says of the machine. `fit`: as many blocks as there is room for."""

    gpu: str
    model: ModelSpec
    limits: SchedulerLimits
    cost: str | None
    fit: bool
    pretend: bool


OWN_MODEL = "own config.json"
ROOFLINE = "roofline of the GPU"


def _machine() -> Machine | None:
    columns = st.columns(5)
    gpus, models = list(GPUS), [*MODELS, OWN_MODEL]
    gpu = str(columns[0].selectbox("GPU", gpus, key=keep("gpu", "h200", gpus), bind="query-params"))
    chosen = columns[1].selectbox(
        "Model", models, key=keep("model", "qwen3-8b", models), bind="query-params"
    )
    size = columns[2].selectbox(
        "Tokens a block", SIZES, key=keep("block_size", 256, SIZES), bind="query-params"
    )
    fit = st.session_state.get("fit", False) or st.query_params.get("fit") == "true"
    with columns[3]:
        blocks = st.number_input(
            "Blocks in the pool",
            1,
            MOST_BLOCKS,
            step=1,
            key=keep("num_blocks", 256),
            bind="query-params",
            disabled=bool(fit),
        )
    with columns[4]:
        batched = whole_number("Tokens a step", "batched", (1, 1_000_000), 8192)
    columns = st.columns(5, vertical_alignment="bottom")
    with columns[0]:
        running = whole_number("Most running", "max_running", (1, 10_000), 256)
    with columns[1]:
        host = whole_number("Host blocks for swap", "host_blocks", (0, 1_000_000), 0)
    fit = columns[3].checkbox("As many blocks as fit", key=keep("fit", False), bind="query-params")
    pretend = columns[4].checkbox(
        "Pretend that it fits",
        key=keep("pretend", False),
        bind="query-params",
        help="Simulate a pool that the GPU has no memory for; the recording says so",
    )
    model = _own_model() if chosen == OWN_MODEL else MODELS[str(chosen or "qwen3-8b")]
    if model is None:
        return None
    costs = [ROOFLINE, *_profiles(gpu, model.name)]
    with columns[2]:
        cost = st.selectbox("Times from", costs, key=keep("cost", ROOFLINE, costs))
    limits = SchedulerLimits(
        int(blocks), int(size or 256), batched, running, model.max_positions, host
    )
    named = None if cost in (None, ROOFLINE) else str(cost)
    return Machine(gpu, model, limits, named, bool(fit), bool(pretend))


def _own_model() -> ModelSpec | None:
    """Draw the field for a config.json and return the model. Raises SimError."""
    file = kept_file(
        "The model's config.json, as Hugging Face has it",
        "config_file",
        type=["json"],
        max_upload_size=1,
    )
    if file is None:
        st.info("Upload the config.json of the model.")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "own-model" / "config.json"
        path.parent.mkdir()
        path.write_bytes(file.data)
        try:
            return read_model_config(path)
        except SimError as error:
            raise SimError(str(error).replace(str(path), file.name)) from None


@st.cache_data(show_spinner=False)
def _profiles(gpu: str, model: str) -> list[str]:
    """Return the names of the profiles that were measured for a GPU and a model."""
    names = profile_names()
    return [
        name for name in names if (found := open_profile(name)).gpu == gpu and found.model == model
    ]


def _fitted(machine: Machine, workload: Workload, policy: Policy) -> RunRequest:
    """Return the run, with as many blocks as fit or, where it does not fit, the reason.

    Raises SimError for a pool that does not fit, unless that is to be pretended.
    """
    gpu, limits, pretended = find_gpu(machine.gpu), machine.limits, None
    if machine.fit:
        limits = default_limits(
            gpu,
            machine.model,
            policy,
            limits.block_size,
            max_batched_tokens=limits.max_batched_tokens,
            max_running=limits.max_running,
            host_blocks=limits.host_blocks,
        )
        st.caption(f"{limits.num_blocks:,} blocks of {limits.block_size} tokens fit.")
    else:
        pretended = memory_excess(gpu, machine.model, (policy,), limits)
        if pretended is not None and not machine.pretend:
            raise SimError(f"{pretended}. Take fewer blocks, as many as fit, or pretend")
        if pretended is not None:
            st.warning(f"**No such machine can be.** {escaped(pretended)}.")
    find_cost(machine.cost, policy, gpu, machine.model, limits.block_size)
    model = machine.model
    return RunRequest(workload, policy, machine.gpu, model, limits, machine.cost, pretended)


def _check(request: RunRequest) -> None:
    """Raise the error that the run would end with, before it starts."""
    size = request.workload.meta.block_size
    Scheduler(request.policy, request.limits, prefix_block_size=size)
    check_blocks(request.workload, request.limits.block_size, [request.policy])


def _start(request: RunRequest, root: Path) -> None:
    try:
        folder = new_folder(root / "play", request.policy.name)
    except OSError as error:
        st.session_state["unwritable"] = str(error)
        return
    job = PlayJob(request, folder)
    desk().job = job
    job.start()


def _ended(job: PlayJob) -> None:
    """Say once how the run ended. A completed run joins the last runs."""
    desk().job = None
    if job.error is not None:
        st.error(f"**The run failed.** {escaped(job.error)}")
    elif job.stopped:
        st.warning(
            f"Cancelled after {job.num_ended:,} of {len(job.request.workload):,} requests. What "
            f"was simulated so far is "
            f"in {as_code(job.folder)}."
        )
    else:
        runs = desk().played
        runs.insert(0, job.folder)
        del runs[KEPT:]
        st.success(f"Done. The recording is in {as_code(job.folder)} and in the list on the left.")


def _last_runs(expanded: bool) -> None:
    runs = desk().played
    if not runs:
        return
    with st.expander("Last runs", expanded=expanded), error_in_words("The last runs"):
        snapshots = {run.name: Snapshot(str(run)) for run in runs}
        table = comparison({name: snapshot.summary for name, snapshot in snapshots.items()})
        st.dataframe(in_words(table), hide_index=True)
        name_dropped_rows(snapshots)
        strips = strips_figure({name: data.strip(snapshot) for name, snapshot in snapshots.items()})
        draw(strips, "play-strips", "Block states over time, a strip a run")
        for name, snapshot in snapshots.items():
            left, right = st.columns([3, 1], vertical_alignment="center")
            left.caption(escaped(name))
            pack = partial(data.pack, Path(snapshot.folder))
            right.download_button(
                "Recording (zip)", pack, f"{name}.zip", on_click="ignore", key=f"zip|{name}"
            )


ABOUT_FIRST_LOOK = (
    "**This recording is made up.** No recording was found, so a small workload of reasoning was "
    "simulated under two policies: compare them in the view **Compare**. To see your own: replay a "
    "trace with `zlab replay TRACE --out runs/NAME`, record a server with `zlab serve --record "
    "runs/NAME`, upload a recording on the left, or simulate one in the view **Play**."
)
FIRST_LOOK = "first-look"  # name of the folder
POLICIES = ("full-kv", "hybrid")
LIMITS = SchedulerLimits(
    num_blocks=256, block_size=256, max_batched_tokens=8192, max_running=128, max_model_len=40_960
)
NUM_REQUESTS = 96


def is_first_look(folder: str) -> bool:
    """Whether `make_first_run` made this recording."""
    return Path(folder).parent.name == FIRST_LOOK


@st.cache_resource(show_spinner="There is no recording yet: simulating a small one …")
def make_first_run(root: Path) -> bool:
    """Simulate a reasoning workload under two policies into `root`/first-look, once for all
    sessions.
    """
    whole = make_workload("synth:amc23")
    workload = Workload(list(whole)[:NUM_REQUESTS], whole.meta)
    for policy in POLICIES:
        try:
            replay(workload, policy, limits=LIMITS, out=root / FIRST_LOOK / policy)
        except (
            RecordingError,
            OSError,
        ):  # another process was faster, or the folder cannot be written
            return False
    return True
