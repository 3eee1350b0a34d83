"""The block picture: the PNG holds the matrix, and the page of several runs stands alone."""

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.shared import SHARED, needs_shared
from zlab.dashboard.figures.occupancy import enlarge, indexed_image, textured
from zlab.dashboard.report import write_occupancy
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import replay
from zlab.traces.formats import read_trace
from zlab.traces.palette import BLOCK_LOOKS
from zlab.traces.recording import Recording, RecordingError
from zlab.traces.workload import Workload


def decoded(png: bytes) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], bytes]:
    """Pixels and palette of an indexed PNG."""
    image = Image.open(BytesIO(png))
    assert image.mode == "P"
    return np.asarray(image), bytes(image.getpalette() or [])


def test_the_image_holds_the_matrix_and_its_colours() -> None:
    cells = np.arange(12, dtype=np.uint8).reshape(3, 4) % 5
    colours = ["#000000", "#0a0b0c", "#ffffff", "#102030", "#010203"]
    image = Image.open(BytesIO(indexed_image(cells, colours, clear_alpha=40)))
    assert image.mode == "P"
    assert (np.asarray(image) == cells).all()
    seen = np.asarray(image.convert("RGBA"))
    assert seen[0, 0].tolist() == [0, 0, 0, 40]  # index 0 is see-through
    assert seen[0, 1].tolist() == [10, 11, 12, 255]
    assert seen[0, 3].tolist() == [16, 32, 48, 255]


def test_texture_never_changes_the_state() -> None:
    cells = np.repeat(np.arange(6, dtype=np.uint8), 40).reshape(6, 40)
    looks = [look.hatch for look in BLOCK_LOOKS.values()]
    drawn = textured(enlarge(cells, 400, 120), looks)
    assert (drawn // 2 == enlarge(cells, 400, 120)).all()
    for state, hatch in enumerate(looks):
        assert bool((drawn == state * 2 + 1).any()) == bool(hatch)


@needs_shared
def test_page_stands_alone_and_shows_every_run(tmp_path: Path) -> None:
    whole = read_trace(SHARED / "workloads" / "W1.jsonl")
    workload = Workload(list(whole)[:24], whole.meta)
    runs = []
    for policy in ("full-kv", "hybrid"):
        replay(
            workload,
            policy,
            limits=SchedulerLimits(96, 256, 8192, 64, 40960),
            out=tmp_path / policy,
        )
        runs.append((f"{policy} <b>", Recording(tmp_path / policy)))
    page = tmp_path / "page.html"
    write_occupancy(runs, page)
    text = page.read_text("utf-8")
    assert "<h2>full-kv &lt;b&gt;</h2>" in text
    assert "<h2>hybrid &lt;b&gt;</h2>" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    for look in BLOCK_LOOKS.values():
        assert look.words in text
    pictures = re.findall(r'"source":("data:image[^"]+")', text)
    assert len(pictures) == 2
    pixels, _ = decoded(b64decode(json.loads(pictures[0]).split(",", 1)[1]))
    assert pixels.shape[0] >= 96
    assert {0, 2} <= set(np.unique(pixels).tolist())  # free and owned
    assert Recording(tmp_path / "full-kv").manifest["summary"]["preemptions"] > 0
    ends = re.findall(r'"xaxis3":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*"range":\[0\.0,([\d.]+)\]', text)
    assert len(ends) == 2
    assert len(set(ends)) == 1, ends  # one time axis for both runs


def test_page_without_runs_or_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run to draw"):
        write_occupancy([], tmp_path / "page.html")
    with pytest.raises(RecordingError, match="not a recording"):
        write_occupancy([("x", Recording(tmp_path))], tmp_path / "page.html")
