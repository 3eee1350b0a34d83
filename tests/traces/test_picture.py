import re
import zlib
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from policies.core.limits import Limits
from sim.replay import replay
from tests.shared import SHARED, needs_shared
from traces.formats import read_trace
from traces.palette import BLOCK_LOOKS, rgb
from traces.picture import write_occupancy_html
from traces.png import enlarge, indexed_png, textured
from traces.recording import Recording, RecordingError
from traces.workload import Workload


def decoded(png: bytes) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], bytes]:
    """(pixels, palette) of an 8-bit indexed PNG without filters, by the letter of the format."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert int.from_bytes(png[at + 8 + length : at + 12 + length], "big") == zlib.crc32(name + data)
        chunks[name] = data
        at += 12 + length
    width, height = (int.from_bytes(chunks[b"IHDR"][i : i + 4], "big") for i in (0, 4))
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:], chunks[b"PLTE"]


def test_png_holds_the_matrix() -> None:
    cells = np.arange(12, dtype=np.uint8).reshape(3, 4) % 5
    pixels, palette = decoded(indexed_png(cells, ["#000000", "#0a0b0c", "#ffffff", "#102030", "#010203"], clear=0))
    assert (pixels == cells).all()
    assert palette[3:6] == bytes((10, 11, 12))


def test_texture_never_changes_the_state() -> None:
    cells = np.repeat(np.arange(6, dtype=np.uint8), 40).reshape(6, 40)
    looks = [look.hatch for look in BLOCK_LOOKS.values()]
    drawn = textured(enlarge(cells, 400, 120), looks)
    assert (drawn // 2 == enlarge(cells, 400, 120)).all()
    for state, hatch in enumerate(looks):
        assert bool((drawn == state * 2 + 1).any()) == bool(hatch)


def test_looks_differ_in_lightness_or_texture() -> None:
    def lightness(colour: str) -> float:
        return float(np.dot(rgb(colour), (0.2126, 0.7152, 0.0722)))

    looks = list(BLOCK_LOOKS.values())
    assert len({look.letter for look in looks}) == len({look.symbol for look in looks}) == len(looks)
    for i, one in enumerate(looks):
        for other in looks[i + 1 :]:
            assert one.hatch != other.hatch or abs(lightness(one.colour) - lightness(other.colour)) > 20


@needs_shared
def test_page_stands_alone_and_shows_every_run(tmp_path: Path) -> None:
    whole = read_trace(SHARED / "workloads" / "W1.jsonl")
    workload = Workload(list(whole)[:24], whole.meta)
    runs = []
    for policy in ("full-kv", "hybrid"):
        replay(workload, policy, limits=Limits(96, 256, 8192, 64, 40960), out=tmp_path / policy)
        runs.append((f"{policy} <b>", Recording(tmp_path / policy)))
    page = tmp_path / "page.html"
    write_occupancy_html(runs, page)
    text = page.read_text("utf-8")
    assert "full-kv &lt;b&gt;" in text
    assert '<b>"' not in text
    assert not re.search(r"(src|href)=[\"'](?!data:)", text)
    assert text.count("<section>") == 2
    for look in BLOCK_LOOKS.values():
        assert look.words in text
    pictures = re.findall(r'href="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == 2
    pixels, _ = decoded(b64decode(pictures[0]))
    assert pixels.shape[0] >= 96
    assert {0, 2} <= set(np.unique(pixels).tolist())  # free and owned
    preemptions = Recording(tmp_path / "full-kv").manifest["summary"]["preemptions"]
    assert preemptions > 0
    assert 'class="preempted" d="M' in text
    assert page.stat().st_size < 1_000_000


def test_page_without_runs_or_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run to draw"):
        write_occupancy_html([], tmp_path / "page.html")
    with pytest.raises(RecordingError, match="not a recording"):
        Recording(tmp_path)
