"""What the front says of all replicas together: their health, their metrics, and what each answered to one question."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.server.errors import ApiError, unavailable
from engine.server.limits import Door
from engine.server.replicas_call import Forwarded, Headers
from engine.server.replicas_metrics import LABEL, merged, page
from engine.server.replicas_roster import Reply, Roster
from engine.server.sending import to_json


@dataclass(frozen=True)
class Report:
    """One answer."""

    status: int
    headers: Headers
    body: bytes


def _json(status: int, body: Mapping[str, Any]) -> Report:
    data = to_json(body)
    return Report(status, _described(b"application/json", data), data)


def _described(kind: bytes, data: bytes) -> Headers:
    return ((b"content-type", kind), (b"content-length", str(len(data)).encode()))


async def health(roster: Roster, door: Door) -> Report:
    """200 while some replica takes requests, "ok" only when all do; otherwise 503.

    A replica's own words come with its process and the outputs that were sent there and are open.
    """
    replies = {reply.member.name: reply for reply in await roster.ask_all(Forwarded("GET", "/health"))}
    rows: dict[str, dict[str, Any]] = {}
    loads = roster.rule.loads
    for name in _names(roster):
        reply = replies.get(name)
        if reply is None:
            rows[name] = {"status": "gone"}
            continue
        row = rows[name] = {**_said(reply), "pid": reply.member.pid, "sent": loads.get(reply.member.id, 0)}
        if not reply.done:
            row["status"] = "unhealthy"
        elif reply.member.id not in loads:
            row |= {"status": "unhealthy", "reason": reply.member.trouble or "not caught up yet"}
    num_well = sum(row["status"] == "ok" for row in rows.values())
    all_well = num_well == len(rows)
    status = "draining" if door.shut else "ok" if all_well else "degraded" if num_well else "unhealthy"
    body = {
        "status": status,
        "under_way": door.num_inside,
        "replicas_wanted": roster.fleet.num_wanted,
        "replicas": rows,
    }
    return _json(200 if status in ("ok", "degraded") else 503, body)


def metrics(roster: Roster, replies: Sequence[Reply]) -> Report:
    """The samples of every replica that answers, under its label, and what the front itself counts.

    A refusal is handed on.
    """
    done = {reply.member.name: reply.body.decode() for reply in replies if reply.done}
    refused = next((reply for reply in replies if reply.status and not reply.done), None)
    if refused is not None and not done:
        return Report(refused.status, refused.headers, refused.body)
    families = list(merged(done).values()) + _own_families(roster, set(done))
    data = page(families)
    return Report(200, _described(CONTENT_TYPE_LATEST.encode(), data), data)


def _own_families(roster: Roster, answered: set[str]) -> list[Metric]:
    up = GaugeMetricFamily("zlab:replica_up", "Whether the replica answered this scrape.", labels=[LABEL])
    load = GaugeMetricFamily("zlab:replica_outputs_under_way", "Outputs sent to the replica and open.", labels=[LABEL])
    for name in _names(roster):
        up.add_metric([name], float(name in answered))
    for member in sorted(roster.members.values(), key=lambda member: member.name):
        load.add_metric([member.name], roster.rule.loads.get(member.id, 0))
    counts = roster.rule.counts
    totals = (
        ("routed_requests", "Requests sent to a replica by the affinity rule.", counts.num_requests),
        ("routed_past_holder", "Of these, sent past a replica that holds more of the prompt.", counts.num_passed_over),
        ("routed_blocks", "Full blocks of the prompts of these requests.", counts.num_blocks),
        ("routed_matched_blocks", "Of these, thought to be held by the replica.", counts.num_matched_blocks),
        ("replicas_lost", "Replicas that were lost.", roster.num_lost),
    )
    return [up, load, *(CounterMetricFamily(f"zlab:{name}", text, value=value) for name, text, value in totals)]


def together(replies: Sequence[Reply], taken_back: Sequence[Reply] = ()) -> Report:
    """One answer from those of all replicas: the first one's, with all of them under "replicas".

    What all refuse alike is refused. Raises ApiError where some did what others did not, or nobody answered: 409 where
    those others refused and it was `taken_back` wherever it had been done, so that nothing has changed; else 502.
    """
    if not replies:
        raise unavailable("no replica is there", "no_replica", 2)
    statuses = Counter(reply.status for reply in replies)
    if len(statuses) == 1 and not replies[0].done and replies[0].status:
        return Report(replies[0].status, replies[0].headers, replies[0].body)
    if not all(reply.done for reply in replies):
        raise _in_part(replies, taken_back)
    return _json(replies[0].status, {**_said(replies[0]), "replicas": {r.member.name: _said(r) for r in replies}})


def _in_part(replies: Sequence[Reply], taken_back: Sequence[Reply]) -> ApiError:
    """What is said of something that some replicas did and others did not."""
    done = [reply.member.name for reply in replies if reply.done]
    failed = [reply for reply in replies if not reply.done]
    message = f"not done by every replica ({_reasons(failed)}); done by: {', '.join(done) or 'none'}"
    left = [reply for reply in taken_back if not reply.done]
    if taken_back and not left:
        message += ", and taken back there"
        if all(reply.status for reply in failed):
            return ApiError(409, f"{message}: nothing has changed", code="not_by_all")
    elif left:
        message += f"; it could not be taken back everywhere ({_reasons(left)})"
    return ApiError(502, message, code="replicas_disagree")


def _reasons(replies: Sequence[Reply]) -> str:
    return "; ".join(f"replica {reply.member.name}: {_why(reply)}" for reply in replies)


def policies(replies: Sequence[Reply]) -> Report:
    """`together` of `GET /v1/policy`. A lane whose policy is not the same everywhere has no digest here: null.

    So whoever asks what runs is not told of one replica's policy as if it were all's. Raises as `together`.
    """
    report = together(replies)
    if report.status != 200:
        return report
    said = json.loads(report.body)
    rows = {name: _lanes(each) for name, each in said["replicas"].items()}
    for row in said.get("lanes", ()):
        found = {lanes.get(row["lane"], {}).get("digest") for lanes in rows.values()}
        if len(found) > 1:
            row |= {"policy": "not the same in every replica", "digest": None, "toml": None}
    return _json(200, {**said, "agree": all(lane["digest"] for lane in said.get("lanes", ()))})


def _lanes(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["lane"]: row for row in said.get("lanes", ())}


def _names(roster: Roster) -> list[str]:
    """Every replica that there should be, and any that is there besides."""
    wanted = {str(number) for number in range(roster.fleet.num_wanted)}
    return sorted(wanted | {member.name for member in roster.members.values()})


def _said(reply: Reply) -> dict[str, Any]:
    try:
        said = json.loads(reply.body)
    except ValueError:
        return {"reason": reply.body[:500].decode(errors="replace")}
    return said if isinstance(said, dict) else {"answer": said}


def _why(reply: Reply) -> str:
    said = _said(reply)
    error = said.get("error")
    return str(error.get("message") if isinstance(error, dict) else said.get("reason", reply.status))
