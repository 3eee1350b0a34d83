"""The view Server: a running server followed by its address, through `/v1/policy`,
`/v1/policy/watch` and `/metrics`.

The page asks only these paths of the address, follows no redirect, and reads answers of limited
size. The key stays in the session, not in the address of the page.
"""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from itertools import pairwise
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import streamlit as st
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from zlab.dashboard.figures.activity import Line, lines_figure
from zlab.dashboard.figures.style import CONFIG
from zlab.dashboard.views.identity import DIGITS, text_of
from zlab.dashboard.views.page import as_code, escaped, themed

TIMEOUT_S = 5.0
MOST_BYTES = 20_000_000  # of one answer
AT_MOST_EVERY_S = 1.0  # sessions that follow one server share its answers
MOST_SAMPLES = 1_800
MOST_SERVERS = 20
MOST_ROWS = 64  # lanes of all replicas together
RECENT_S = 60.0  # rates and means are of this long
REFRESH_S = (1, 2, 5, 10, 30)

Lane = tuple[str, str]  # replica ("" without replicas) and lane
COUNTED = {  # counters whose rate is shown
    "output tokens/s": "vllm:generation_tokens_total",
    "ended requests/s": "vllm:request_success_total",
    "preemptions/s": "vllm:num_preemptions_total",
    "compressions/s": "zlab:compressions_total",
}
TIMED = {  # histograms whose mean is shown
    "TTFT, s": "vllm:time_to_first_token_seconds",
    "TPOT, s": "vllm:request_time_per_output_token_seconds",
    "end to end, s": "vllm:e2e_request_latency_seconds",
    "queued, s": "vllm:request_queue_time_seconds",
}
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "pool in use": "vllm:kv_cache_usage_perc",
}
HITS, LOOKED_UP = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


class UnreachableError(Exception):
    """A server that cannot be asked; the message says why."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    @override
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def base_of(address: str) -> str:
    """Return an address as `http://host:port`. Raises UnreachableError with what is wrong."""
    text = address.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError as error:
        raise UnreachableError(f"{address!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnreachableError(f"{address!r} is no address of a server, as http://127.0.0.1:8000")
    if parts.username or parts.query or parts.path not in ("", "/"):
        raise UnreachableError(f"{address!r}: give scheme, host and port alone")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def ask(base: str, path: str, key: str) -> bytes | None:
    """Return the body of a GET, None where the server has no such path. Raises UnreachableError."""
    request = urllib.request.Request(base + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            raise UnreachableError(f"{base}{path}: the server asks for a key") from error
        raise UnreachableError(f"{base}{path}: the server answers {error.code}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise UnreachableError(f"{base}{path}: {getattr(error, 'reason', error)}") from error
    if len(body) > MOST_BYTES:
        raise UnreachableError(f"{base}{path}: the answer has more than {MOST_BYTES / 1e6:.0f} MB")
    return body


def read_json(body: bytes | None, what: str) -> dict[str, Any]:
    """Return an answer as a table, {} without one. Raises UnreachableError."""
    if body is None:
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"{what}: not valid JSON") from error
    if not isinstance(found, dict):
        raise UnreachableError(f"{what}: not the answer of a server of Zipage Lab")
    return found


@dataclass(frozen=True)
class Scrape:
    """The samples of `/metrics` at one moment, in Unix seconds: values by name and lane, summed
    over other labels, and blocks by lane and state.
    """

    at_s: float
    values: Mapping[tuple[str, Lane], float]
    blocks: Mapping[tuple[Lane, str], float]

    def lanes(self) -> list[Lane]:
        """Return the lanes in order."""
        return sorted({lane for _, lane in self.values})[:MOST_ROWS]


def read_scrape(text: str, at_s: float) -> Scrape:
    """Read a page in Prometheus' text format. Raises UnreachableError."""
    wanted = {*COUNTED.values(), *GAUGES.values(), HITS, LOOKED_UP}
    wanted |= {name + end for name in TIMED.values() for end in ("_sum", "_count")}
    values: dict[tuple[str, Lane], float] = {}
    blocks: dict[tuple[Lane, str], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                lane = (labels.get("replica", ""), labels.get("lane", labels.get("engine", "")))
                if sample.name == "zlab:blocks":
                    blocks[lane, labels.get("state", "")] = sample.value
                elif sample.name in wanted and np.isfinite(sample.value):
                    place = sample.name, lane
                    values[place] = values.get(place, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise UnreachableError(f"/metrics cannot be read: {error}") from error
    return Scrape(at_s, values, blocks)


def change_of(before: Scrape, now: Scrape, name: str, lane: Lane) -> float | None:
    """Return how much a counter has grown, None where it is missing or began anew."""
    values = [scrape.values.get((name, lane)) for scrape in (before, now)]
    if values[0] is None or values[1] is None or values[1] < values[0]:
        return None
    return values[1] - values[0]


def mean_between(before: Scrape, now: Scrape, name: str, lane: Lane) -> float | None:
    """Return the mean of what a histogram counted between two scrapes, None without any."""
    total = change_of(before, now, f"{name}_sum", lane)
    count = change_of(before, now, f"{name}_count", lane)
    return total / count if total is not None and count else None


def lane_row(before: Scrape, now: Scrape, lane: Lane) -> dict[str, Any]:
    """Return what a lane does: gauges now, rates and means since `before`."""
    seconds = now.at_s - before.at_s
    row: dict[str, Any] = {"replica": lane[0] or "-", "lane": lane[1] or "-"}
    row |= {words: now.values.get((name, lane)) for words, name in GAUGES.items()}
    for words, name in COUNTED.items():
        grown = change_of(before, now, name, lane)
        row[words] = grown / seconds if grown is not None and seconds > 0 else None
    row |= {words: mean_between(before, now, name, lane) for words, name in TIMED.items()}
    hits, asked = (change_of(before, now, name, lane) for name in (HITS, LOOKED_UP))
    row["prefix hits"] = hits / asked if hits is not None and asked else None
    row |= {
        f"blocks {state}": count for (owner, state), count in now.blocks.items() if owner == lane
    }
    return row


@dataclass
class Followed:
    """One server as its followers have seen it.

    Attributes:
        base: Its address.
        scrapes: The last MOST_SAMPLES answers of `/metrics`, oldest first.
        policy: The last answer of `/v1/policy`.
        watch: The last answer of `/v1/policy/watch`, {} where no gates are watched.
        seen: Policies that were seen to take over, as rows, oldest first.
        trouble: Why the last question was not answered, None where it was.
    """

    base: str
    scrapes: deque[Scrape] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    policy: dict[str, Any] = field(default_factory=dict)
    watch: dict[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    trouble: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked_s: float = -1e9

    def poll(self, key: str) -> None:
        """Ask the server, unless it was asked within the last AT_MOST_EVERY_S."""
        with self._lock:
            if time.monotonic() - self._asked_s < AT_MOST_EVERY_S:
                return
            try:
                self._ask(key)
                self.trouble = None
            except UnreachableError as error:
                self.trouble = str(error)
            self._asked_s = time.monotonic()

    def _ask(self, key: str) -> None:
        page = ask(self.base, "/metrics", key)
        if page is not None:
            self.scrapes.append(read_scrape(page.decode("utf-8", "replace"), time.time()))
        policy = ask(self.base, "/v1/policy", key)
        if page is None and policy is None:
            raise UnreachableError(f"{self.base}: has neither /metrics nor /v1/policy")
        self.policy = read_json(policy, "/v1/policy")
        self.watch = read_json(ask(self.base, "/v1/policy/watch", key), "/v1/policy/watch")
        for row in lanes_of(self.policy):
            last = next((one for one in self.seen[::-1] if one["lane"] == row["lane"]), None)
            if last is None or (last["digest"], last["at"]) != (row["digest"], row["at"]):
                self.seen.append(row)
        del self.seen[:-MOST_ROWS]


def _rows_of(value: Any) -> list[Mapping[str, Any]]:
    found = value if isinstance(value, list) else []
    return [row for row in found if isinstance(row, Mapping)][:MOST_ROWS]


def lanes_of(policy: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each lane: which policy, since when, why, on what evidence."""
    rows = []
    for lane in _rows_of(policy.get("lanes")):
        follows = " (follows live)" if lane.get("follows_live") else ""
        rows.append(
            {
                "lane": text_of(lane.get("lane")),
                "share": text_of(lane.get("share")),
                "policy": text_of(lane.get("policy"), 80) + follows,
                "at": text_of(lane.get("since")),
                "why": text_of(lane.get("why"), 300),
                "evidence": text_of(lane.get("evidence"), 24),
                "before": text_of(lane.get("before")),
                "digest": text_of(lane.get("digest"), 200)[:DIGITS],
            }
        )
    return rows


def history_of(followed: Followed) -> pd.DataFrame:
    """Return changes of the policy, newest first: those that were seen, and rollbacks."""
    rows = [
        {name: row[name] for name in ("at", "lane", "policy", "why", "evidence", "before")}
        for row in followed.seen
    ]
    known = {(row["lane"], row["at"]) for row in rows}
    for row in _rows_of(followed.watch.get("rollbacks")):
        found = {
            "at": text_of(row.get("at")),
            "lane": text_of(row.get("lane")),
            "policy": text_of(row.get("to"), 80),
            "why": f"rolled back: {text_of(row.get('why'), 300)}",
            "evidence": "",
            "before": text_of(row.get("from"), 80),
        }
        if (found["lane"], found["at"]) not in known:
            rows.append(found)
    columns = ["at", "lane", "policy", "why", "evidence", "before"]
    return pd.DataFrame(rows, columns=columns).sort_values("at", ascending=False, kind="stable")


def gates_table(watch: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each gate that is watched, with what each lane measures beside it."""
    measured = watch.get("measured")
    lanes = measured if isinstance(measured, Mapping) else {}
    rows = []
    gates = watch.get("gates")
    for gate in (gates if isinstance(gates, list) else [])[:MOST_ROWS]:
        written = text_of(gate, 200)
        metric = written.partition(" ")[0]
        row: dict[str, Any] = {"gate": written}
        for lane, values in lanes.items():
            row[f"{text_of(lane)} measures"] = text_of(
                values.get(metric) if isinstance(values, Mapping) else None
            ).replace("unknown", "too little yet")
        rows.append(row)
    return pd.DataFrame(rows)


def drift_table(scrapes: Sequence[Scrape]) -> pd.DataFrame:
    """Return means of latencies in the first and in the last RECENT_S that were followed, and
    their change, a row for each lane and latency.
    """
    if len(scrapes) < 2 or scrapes[-1].at_s - scrapes[0].at_s < RECENT_S:
        return pd.DataFrame()
    first, last = scrapes[0], scrapes[-1]
    early = max((s for s in scrapes if s.at_s <= first.at_s + RECENT_S), key=lambda s: s.at_s)
    late = recent_start(scrapes)
    rows = []
    for lane in last.lanes():
        for words, name in TIMED.items():
            at_first = mean_between(first, early, name, lane)
            now = mean_between(late, last, name, lane)
            if at_first is not None and now is not None:
                change = (now / at_first - 1) * 100 if at_first > 0 else None
                about = {"replica": lane[0] or "-", "lane": lane[1] or "-", "latency": words}
                rows.append(about | {"at first": at_first, "now": now, "change, %": change})
    return pd.DataFrame(rows)


def recent_start(scrapes: Sequence[Scrape]) -> Scrape:
    """Return the scrape from which rates of the last RECENT_S are counted."""
    last = scrapes[-1]
    return next(scrape for scrape in scrapes if scrape.at_s >= last.at_s - RECENT_S)


def served_lines(scrapes: Sequence[Scrape]) -> dict[str, list[Line]]:
    """Return what each lane did over the time that it was followed, by title of a figure's row;
    moments are seconds before the last scrape.
    """
    last = scrapes[-1]
    step = max(1, len(scrapes) // 200)  # at most 200 points a line
    kept = list(scrapes)[::-1][::step][::-1]
    x = [scrape.at_s - last.at_s for scrape in kept]
    rows: dict[str, list[Line]] = {}
    for lane in last.lanes()[:8]:
        name = " ".join(filter(None, lane)) or "server"
        for words in ("running", "waiting"):
            values = [scrape.values.get((GAUGES[words], lane)) for scrape in kept]
            rows.setdefault("requests", []).append(Line(f"{name}: {words}", x, values))
        pairs = list(pairwise(kept))
        for title, words in (("tokens/s", "output tokens/s"), ("TTFT, s", "TTFT, s")):
            found = [lane_row(before, now, lane)[words] for before, now in pairs]
            rows.setdefault(title, []).append(Line(name, x, [None, *found]))
    return rows


@st.cache_resource(max_entries=MOST_SERVERS, show_spinner=False)
def followed(base: str, key: str) -> Followed:
    """Return the server at an address as those who have this key see it."""
    return Followed(base)


def show() -> None:
    """Draw the fields, and follow the server while the page is open."""
    columns = st.columns([2, 1, 1], vertical_alignment="bottom")
    address = columns[0].text_input(
        "Address of the server",
        key="server",
        bind="query-params",
        placeholder="http://127.0.0.1:8000",
        help="A server of `zlab serve`, alone or with --replicas",
    )
    key = columns[1].text_input("API key", key="server_key", type="password")
    every = columns[2].selectbox(
        "Refresh every, s", REFRESH_S, index=1, key="every_server", bind="query-params"
    )
    if not address:
        st.info(
            "Enter the address of a running server. The page asks it for `/v1/policy`, "
            "`/v1/policy/watch` and `/metrics`: which policy decides and why, the canary and the "
            "gates, and what the server does now."
        )
        return
    if not re.fullmatch(r"[\x20-\x7e]{0,500}", key):
        st.error("**The key has characters that no key has.**")
        return

    @st.fragment(run_every=float(every))
    def follow() -> None:
        try:
            server = followed(base_of(str(address)), key)
        except UnreachableError as error:
            st.error(f"**This server cannot be followed.** {escaped(error)}")
            return
        server.poll(key)
        _draw(server)

    follow()


def _draw(server: Followed) -> None:
    if server.trouble is not None:
        st.error(f"**The server does not answer.** {escaped(server.trouble)}")
        if not server.scrapes and not server.policy:
            return
        st.caption("Shown is what it said last.")
    st.markdown(f"**{as_code(server.base)}**")
    lanes = lanes_of(server.policy)
    if server.policy.get("agree") is False:
        st.warning("The replicas do not run the same policy.")
    st.subheader("Policies", anchor=False)
    st.dataframe(pd.DataFrame(lanes), hide_index=True)
    canary = next((row for row in lanes if row["lane"] == "canary"), None)
    if canary is not None and not canary["policy"].endswith("(follows live)"):
        st.info(
            f"{as_code(canary['policy'])} is on trial in the canary lane, with a share of "
            f"{escaped(canary['share'])} of the requests."
        )
    _draw_gates(server)
    if not server.scrapes:
        st.info("This server has no `/metrics`.")
        return
    _draw_metrics(server)
    st.subheader("Policy history", anchor=False)
    st.caption("Changes since this page follows the server, the last one before, and rollbacks.")
    st.dataframe(history_of(server), hide_index=True)


def _draw_gates(server: Followed) -> None:
    st.subheader("Gates", anchor=False)
    table = gates_table(server.watch)
    if table.empty:
        st.caption("No gates are watched: start the server with `--gates FILE`.")
        return
    st.dataframe(table, hide_index=True)
    st.caption(
        f"Measured over the last {escaped(text_of(server.watch.get('window_s')))} s. A gate that "
        f"breaks puts the policy before back."
    )


def _draw_metrics(server: Followed) -> None:
    scrapes = list(server.scrapes)
    last, before = scrapes[-1], recent_start(scrapes)
    st.subheader("What it does now", anchor=False)
    rows = [lane_row(before, last, lane) for lane in last.lanes()]
    table = pd.DataFrame(rows).dropna(axis="columns", how="all")
    st.dataframe(table.round(4), hide_index=True)
    st.caption(
        f"A row is a lane of a replica. Rates and means are of the last "
        f"{last.at_s - before.at_s:,.0f} s."
    )
    if len(scrapes) > 1:
        figure = lines_figure(served_lines(scrapes), "seconds before now")
        st.plotly_chart(
            themed(figure), key="served", config=CONFIG, alt="Requests, tokens/s and TTFT over time"
        )
    st.subheader("Drift", anchor=False)
    drift = drift_table(scrapes)
    if drift.empty:
        st.caption(
            f"Latencies of the first {RECENT_S:.0f} s that are followed are compared with those of "
            f"the last {RECENT_S:.0f} s, as soon as both are there. `zlab drift` compares a "
            f"recording of the server with what the simulator says."
        )
    else:
        st.dataframe(drift.round(4), hide_index=True)
