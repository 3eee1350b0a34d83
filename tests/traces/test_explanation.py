"""Requests explained in words: the reasons of the scheduler, and what follows from events alone."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from zlab.cli.main import app
from zlab.policies.spec import load_policy
from zlab.sim.replay import default_limits, replay
from zlab.sim.specs import find_gpu, find_model
from zlab.traces.explanation import Explainer, request_by_name, requests_by_number
from zlab.traces.recording import Recording, write_manifest
from zlab.traces.synthetic import fixed

GPU, MODEL = "l40s", "qwen3-8b"


def record(folder: Path, policy: str, num_blocks: int = 40, num: int = 12) -> Recording:
    """Requests of 5 to 20 blocks that arrive almost together, in a pool that is too small."""
    chosen = load_policy(policy)
    limits = default_limits(
        find_gpu(GPU), find_model(MODEL), chosen, block_size=16, num_blocks=num_blocks
    )
    replay(fixed(num, 80, 240, 400.0), chosen, GPU, MODEL, limits=limits, out=folder)
    return Recording(folder)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Requests preempt one another and wait in the queue."""
    return record(tmp_path_factory.mktemp("runs") / "crowded", "full-kv")


def words_of(recording: Recording) -> dict[int, list[str]]:
    explainer = Explainer(recording)
    rows = recording.table("requests").to_pylist()
    return {row["number"]: [line.words for line in explainer.explain(row)] for row in rows}


def test_the_words_are_those_of_the_tables(crowded: Recording) -> None:
    rows = {row["number"]: row for row in crowded.table("requests").to_pylist()}
    assert any(row["preemptions"] for row in rows.values())
    for number, words in words_of(crowded).items():
        row = rows[number]
        assert words[0].startswith("arrived")
        assert words[-1].startswith(row["status"])
        assert sum(text.startswith("preempted because ") for text in words) == row["preemptions"]


def test_a_wait_is_explained_by_the_numbers_of_the_scheduler(crowded: Recording) -> None:
    """Blocks that the sentence says were free are those of the steps table; holders hold the
    rest.
    """
    causes = crowded.table("causes").to_pylist()
    free = crowded.table("steps", ("free_blocks",))["free_blocks"].to_numpy()
    explained = 0
    for words in words_of(crowded).values():
        for text in words:
            found = re.search(r"(r\d+|it), the head.*needed (\d+) blocks?, (\d+) were free", text)
            if not text.startswith("waited") or found is None:
                continue
            head, needed, available = found[1], int(found[2]), int(found[3])
            row = next(
                row
                for row in causes
                if (f"r{row['request']}", row["needed"], row["available"])
                == (head, needed, available)
            )
            assert free[row["step"]] == available < needed
            explained += 1
    assert explained > 3


def test_the_stretches_of_a_wait_follow_one_another_and_fill_it(crowded: Recording) -> None:
    """From its first refusal to its admission, some head of the queue is refused."""
    explainer = Explainer(crowded)
    row = max(crowded.table("requests").to_pylist(), key=lambda one: one["queued_s"])
    start, end = row["arrival_s"], row["first_admitted_s"]
    stretches = explainer._causes.heads_between(start, end)
    assert all(after[0] >= before[1] for before, after in pairwise(stretches))
    total = sum(high - low for low, high, _ in stretches)
    assert 0 < total <= end - start + 1e-9
    assert total > 0.9 * (end - start)


def test_a_missing_slot_names_its_holders(tmp_path: Path) -> None:
    recording = record(tmp_path / "slots", "constrained:tokens=48,window=8,num_slots=2", 20, num=4)
    text = "\n".join(word for words in words_of(recording).values() for word in words)
    assert "needed a query slot, and 2 of 2 were taken (by r0 and r1)" in text


def test_in_short_names_the_longest_wait(crowded: Recording) -> None:
    explainer = Explainer(crowded)
    row = max(crowded.table("requests").to_pylist(), key=lambda one: one["queued_s"])
    words = explainer.in_short(row)
    assert words.startswith(f"r{row['number']} took ")
    assert "queued" in words
    assert "Its longest wait: " in words
    assert "needed" in words


def test_a_recording_without_causes_is_explained_by_its_events(
    crowded: Recording, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for table in ("requests", "steps", "events", "blocks"):
        (old / table).symlink_to(crowded.folder / table)
    kept = {k: v for k, v in crowded.manifest.items() if k not in ("causes", "verdicts")}
    write_manifest(old, kept)
    text = "\n".join(word for words in words_of(Recording(old)).values() for word in words)
    assert "in the queue behind r" in text
    assert "to free blocks for r" in text
    assert "needed" not in text


def test_a_request_is_found_by_id_and_number(crowded: Recording) -> None:
    requests = crowded.table("requests")
    assert [row["number"] for row in requests_by_number(requests, [7, 99, 3])] == [7, 3]
    first = request_by_name(requests, "3")
    assert first is not None
    assert request_by_name(requests, "r3") == first == request_by_name(requests, first["id"])
    assert request_by_name(requests, "r99999999999999999999") is None
    assert request_by_name(requests, "nothing") is None


def test_the_command_says_the_same(crowded: Recording) -> None:
    found = CliRunner().invoke(app, ["explain", str(crowded.folder), "r9", "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    row = requests_by_number(crowded.table("requests"), [9])[0]
    explainer = Explainer(crowded)
    assert said["in_short"] == explainer.in_short(row)
    assert [event["words"] for event in said["events"]] == [
        event.words for event in explainer.explain(row)
    ]
    times = np.array([event["time_s"] for event in said["events"]])
    assert (np.diff(times) >= 0).all()
    plain = CliRunner().invoke(app, ["explain", str(crowded.folder), "9"])
    assert plain.stdout.startswith(said["in_short"])
    wrong = CliRunner().invoke(app, ["explain", str(crowded.folder), "77"])
    assert wrong.exit_code == 2
    assert "numbers 0 to 11" in wrong.output
