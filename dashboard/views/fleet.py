"""The view Fleet: recordings of several replicas side by side, on one clock.

`zlab serve --replicas N --record DIR` writes the recordings of a replica below `DIR/replica-N`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot, Source
from zlab.dashboard.figures.activity import Line, lines_figure
from zlab.dashboard.figures.compare import strips_figure
from zlab.dashboard.views.identity import identity, part_of
from zlab.dashboard.views.page import as_code, csv_of, draw, escaped
from zlab.traces.live_run import LiveRun
from zlab.traces.occupancy import CACHED, FREE, mean_counts
from zlab.traces.recording import RecordingError
from zlab.traces.schema import Phase
from zlab.traces.timeline import step_series

_REPLICA = re.compile(r"(?:(?P<fleet>.*)/)?(?P<replica>replica-\d+)(?:/(?P<rest>.*))?")
MOST = 12  # recordings of one fleet that are drawn
NUM_BINS = 100
WAITING = (Phase.QUEUED, Phase.PREEMPTED, Phase.SWAPPED)


def fleets_of(sources: Sequence[Source]) -> dict[str, dict[str, Source]]:
    """Return the recordings of each fleet by name; a fleet has at least two replicas.

    A fleet is a folder with folders `replica-N`; the name of a recording is what comes below it.
    """
    found: dict[str, dict[str, Source]] = {}
    replicas: dict[str, set[str]] = {}
    for source in sources:
        match = _REPLICA.fullmatch(source.label)
        if match is not None:
            fleet = match["fleet"] or "."
            name = "/".join(filter(None, (match["replica"], match["rest"])))
            found.setdefault(fleet, {})[name] = source
            replicas.setdefault(fleet, set()).add(match["replica"])
    return {
        fleet: dict(sorted(runs.items()))
        for fleet, runs in found.items()
        if len(replicas[fleet]) > 1
    }


def show(sources: list[Source]) -> None:
    """Draw the choice of a fleet, and its replicas side by side."""
    fleets = fleets_of(sources)
    if not fleets:
        st.info(
            "No fleet was found: recordings of at least two replicas below one folder, as "
            "`zlab serve --replicas 2 --record runs/fleet` writes them. A running fleet is "
            "followed in the view **Server**, recorded or not."
        )
        return
    names = list(fleets)
    wanted = st.session_state.get("fleet", st.query_params.get("fleet"))
    if wanted not in fleets:
        if wanted is not None:
            st.error(f"There is no fleet {as_code(wanted)} here: another one is shown.")
        st.session_state["fleet"] = names[0]
    fleet = str(st.selectbox("Fleet", names, index=None, key="fleet", bind="query-params"))
    found = fleets[fleet]
    chosen = st.multiselect(
        "Recordings", list(found), list(found)[:MOST], max_selections=MOST, key=f"of|{fleet}"
    )
    runs: dict[str, Snapshot] = {}
    live: dict[str, LiveRun] = {}
    for name in chosen:
        try:
            snapshot = Snapshot(found[name].folder)
            live[name] = data.live_run(snapshot)
            runs[name] = snapshot
        except RecordingError as error:
            st.error(f"**{escaped(name)}** is left out. {escaped(error)}")
    if runs:
        _draw(runs, live)


def started_s(manifest: Mapping[str, Any]) -> float | None:
    """Return when a recording began, in Unix seconds; None where it does not say."""
    found = manifest.get("started_unix_s")
    if isinstance(found, int | float) and not isinstance(found, bool) and np.isfinite(found):
        return float(found)
    try:
        return float(pd.Timestamp(str(manifest.get("started"))).timestamp())
    except (ValueError, OverflowError):
        return None


def offsets_of(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return by how many seconds each recording began after the first one; 0 where it does not
    say when it began.
    """
    starts = {name: started_s(manifest) for name, manifest in manifests.items()}
    first = min((start for start in starts.values() if start is not None), default=0.0)
    return {name: 0.0 if start is None else start - first for name, start in starts.items()}


def replica_row(snapshot: Snapshot, run: LiveRun) -> dict[str, Any]:
    """Return what a replica has done up to now."""
    phases = run.phases_now()
    waiting = sum(phases[phase.label] for phase in WAITING)
    frame = data.requests(snapshot)
    ended = frame[frame["status"] == "finished"]
    pool = run.pool
    last_s = pool.times.last_s if pool is not None else 0.0
    tokens = int(run.steps["output_tokens"].to_numpy().sum())
    prompts = int(frame["prompt_tokens"].sum())
    in_use = None
    if pool is not None and last_s:
        mean = mean_counts(pool, (0.0, last_s), 1)[1][0]
        in_use = 1 - (mean[FREE] + mean[CACHED]) / pool.num_blocks
    return {
        "policy": str(snapshot.recording.manifest.get("policy")),
        "lane": str(part_of(snapshot.recording.manifest, "lane", "name") or "-"),
        "state": "ended" if snapshot.recording.complete else "being written or cut off",
        "seconds": last_s,
        "steps": run.steps.num_rows,
        "finished": len(ended),
        "running": sum(phases.values()) - waiting,
        "waiting": waiting,
        "output tokens": tokens,
        "output tokens/s": tokens / last_s if last_s else None,
        "TTFT p50, s": _percentile(ended["ttft_s"], 50),
        "TTFT p99, s": _percentile(ended["ttft_s"], 99),
        "TPOT p99, s": _percentile(ended["tpot_s"], 99),
        "preemptions": int(frame["preemptions"].sum()),
        "prefix hits": float(frame["prefix_hit_tokens"].sum()) / prompts if prompts else None,
        "pool in use": in_use,
    }


def _percentile(values: pd.Series, mark: int) -> float | None:
    known = values.dropna()
    return float(np.percentile(known, mark)) if len(known) else None


def fleet_lines(
    live: Mapping[str, LiveRun], offset_s: Mapping[str, float]
) -> dict[str, list[Line]]:
    """Return lines of each replica over time, by title: requests, tokens a second, pool in use."""
    rows: dict[str, list[Line]] = {
        "running, peak": [],
        "waiting, peak": [],
        "tokens/s, mean": [],
        "pool in use, mean": [],
    }
    for name, run in live.items():
        pool = run.pool
        if pool is None or not pool.times.last_s:
            continue
        window = (0.0, pool.times.last_s)
        series = step_series(
            run.steps, pool.times, window, NUM_BINS, (run.num_blocks, run.block_size)
        )
        x = (series.centres_s + offset_s[name]).tolist()
        counts = mean_counts(pool, window, NUM_BINS)[1]
        in_use = 1 - (counts[:, FREE] + counts[:, CACHED]) / pool.num_blocks
        values = (
            series.peaks["running"],
            series.peaks["waiting"],
            series.output_tokens_per_s,
            in_use,
        )
        for line, found in zip(rows.values(), values, strict=True):
            line.append(Line(name, x, found.tolist()))
    return {title: lines for title, lines in rows.items() if lines}


def imbalance(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say how evenly the work was spread, None with fewer than two replicas that worked."""
    tokens = {name: int(row["output tokens"]) for name, row in rows.items()}
    total = sum(tokens.values())
    if len(tokens) < 2 or not total:
        return None
    most, least = max(tokens, key=lambda n: tokens[n]), min(tokens, key=lambda n: tokens[n])
    return (
        f"{escaped(most)} gave {tokens[most] / total:.1%} of all output tokens, {escaped(least)} "
        f"{tokens[least] / total:.1%}; an even share is {1 / len(tokens):.1%}."
    )


def _draw(runs: Mapping[str, Snapshot], live: Mapping[str, LiveRun]) -> None:
    manifests = {name: snapshot.recording.manifest for name, snapshot in runs.items()}
    rows = {name: replica_row(runs[name], live[name]) for name in runs}
    policies = {row["policy"] for row in rows.values()}
    if len(policies) > 1:
        st.warning(f"The replicas do not run one policy: {', '.join(map(as_code, policies))}.")
    words = imbalance(rows)
    if words is not None:
        st.markdown(words)
    table = pd.DataFrame([{"recording": name} | row for name, row in rows.items()])
    st.dataframe(table.round(4), hide_index=True)
    st.download_button("Table (CSV)", csv_of(table), "fleet.csv", "text/csv", on_click="ignore")
    lines = fleet_lines(live, offsets_of(manifests))
    if lines:
        figure = lines_figure(lines, "seconds since the first recording began")
        draw(figure, "fleet-lines", "Requests, tokens a second and pool of each replica over time")
    st.subheader("The pools", anchor=False)
    pools = {}
    for name, snapshot in runs.items():
        try:
            pools[name] = data.strip(snapshot)
        except RecordingError as error:
            st.error(f"**{escaped(name)}** has no picture. {escaped(error)}")
    if pools:
        draw(strips_figure(pools), "fleet-strips", "Block states over time, a strip a replica")
    with st.expander("What the recordings are"):
        st.dataframe(
            pd.DataFrame({name: identity(found) for name, found in manifests.items()}).fillna("-")
        )
