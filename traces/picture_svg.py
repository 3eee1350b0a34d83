"""The plots of one run as SVG: the block picture, its events, blocks by state, requests."""

import json
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.detail import dominant, shares
from traces.occupancy import STATES, Occupancy
from traces.palette import BLOCK_LOOKS, MARK_LOOKS, darker
from traces.png import data_uri, enlarge, indexed_png, textured, textured_colours
from traces.series import StepSeries

NUM_BINS = 300  # time bins of areas and lines
PICTURE = (900, 384)  # pixels of the block picture, at least
STACKED = ("shared", "owned", "target", "held", "cached", "free")  # from the bottom
LEFT, WIDTH = 56, 600  # of the plots in an SVG, in its own units
HEAT, STACK, LINE = (24, 256), (340, 96), (470, 96)  # (top, height) of the three plots
FIGURES = (
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("makespan_s", "s makespan", "{:,.1f}"),
    ("preemptions", "preemptions", "{:,}"),
    ("compressions", "compressions", "{:,}"),
    ("occupancy_mean", "of the pool owned on average", "{:.0%}"),
)


@dataclass(frozen=True)
class DrawnRun:
    """One run, binned over the common time axis of the page."""

    name: str
    occupancy: Occupancy
    series: StepSeries
    counts: npt.NDArray[np.int32]
    marks: dict[str, npt.NDArray[np.int64]]
    summary: dict[str, Any]
    complete: bool


def panel(run: DrawnRun, until: float, most: int) -> str:
    """One run: its figures and its SVG."""
    known = [
        (words, shape.format(run.summary[key])) for key, words, shape in FIGURES if run.summary.get(key) is not None
    ]
    figures = "".join(f"<span><b>{escape(value)}</b> {escape(words)}</span>" for words, value in known)
    note = "" if run.complete else "<p class=note>This run has not come to its end: shown as far as it is written.</p>"
    parts = [
        _picture(run, until),
        _marks(run),
        _stack(run),
        _lines(run, most),
        _time_axis(until),
        f'<rect class="cursor" x="{LEFT}" y="{HEAT[0]}" width="1" height="{LINE[0] + LINE[1] - HEAT[0]}"/>',
    ]
    height = LINE[0] + LINE[1] + 44
    return (
        f"<section><h2>{escape(run.name)}</h2><p class=figures>{figures}</p>{note}"
        f'<svg viewBox="0 0 {LEFT + WIDTH + 14} {height}" role="img" '
        f'aria-label="Block occupancy of {escape(run.name)}" '
        f"data-run='{_hover_data(run, until)}'>{''.join(parts)}</svg></section>"
    )


def _picture(run: DrawnRun, until: float) -> str:
    """The blocks as an image inside the SVG, its length that of the run."""
    occupancy = run.occupancy
    num_rows = min(occupancy.num_blocks, PICTURE[1])
    last = occupancy.times.last_s or until
    parts = shares(occupancy, (0.0, last), (0, occupancy.num_blocks), PICTURE[0], num_rows)
    pixels = textured(
        enlarge(dominant(parts).astype(np.uint8), *PICTURE), [look.hatch for look in BLOCK_LOOKS.values()]
    )
    png = indexed_png(pixels, textured_colours([look.colour for look in BLOCK_LOOKS.values()]), clear=0)
    top, height = HEAT
    ticks = "".join(
        _y_tick(top + height * block / occupancy.num_blocks, str(block))
        for block in _ticks(occupancy.num_blocks, 4)
        if block < occupancy.num_blocks
    )
    return (
        f'<rect class="free" x="{LEFT}" y="{top}" width="{WIDTH * last / until:.2f}" height="{height}"/>'
        f'<image href="{data_uri(png)}" x="{LEFT}" y="{top}" width="{WIDTH * last / until:.2f}" height="{height}" '
        f'preserveAspectRatio="none"/>{_frame(HEAT)}{ticks}{_title(HEAT, "block number", "Which block is what")}'
    )


def _marks(run: DrawnRun) -> str:
    """Below the picture: preemptions as triangles, compressions as bars; in red where no block was available."""
    top = HEAT[0] + HEAT[1]
    step = WIDTH / NUM_BINS
    drawn = [f'<text class="tick" x="{LEFT - 6}" y="{top + 16}" text-anchor="end">events</text>']
    for index in np.flatnonzero(run.marks["compression"]):
        height = min(7.0, 2.0 + float(run.marks["compression"][index]))
        colour = MARK_LOOKS["compression"].colour
        drawn.append(
            f'<rect x="{LEFT + index * step:.1f}" y="{top + 18 - height:.1f}" width="{step:.2f}" height="{height:.1f}" '
            f'fill="{colour}"/>'
        )
    for index in np.flatnonzero(run.marks["preemption"]):
        x = LEFT + (index + 0.5) * step
        drawn.append(f'<path class="preempted" d="M{x - 2.5:.1f} {top + 2}h5l-2.5 6z"/>')
    drawn += [
        f'<rect class="full" x="{LEFT + index * step:.1f}" y="{top + 22}" width="{step:.2f}" height="4"/>'
        for index in np.flatnonzero(run.marks["full"])
    ]
    return "".join(drawn)


def _stack(run: DrawnRun) -> str:
    """Blocks by state, stacked; each bin as it was when fewest blocks were available."""
    top, height = STACK
    edges = np.linspace(LEFT, LEFT + WIDTH, NUM_BINS + 1)
    scale = height / run.occupancy.num_blocks
    below = np.zeros(NUM_BINS)
    shapes = []
    for name in STACKED:
        above = below + run.counts[:, STATES.index(name)]
        upper = [f"{x:.1f} {top + height - value * scale:.1f}" for x, value in _corners(edges, above)]
        lower = [f"{x:.1f} {top + height - value * scale:.1f}" for x, value in _corners(edges, below)]
        shapes.append(f'<path fill="url(#{name})" d="M{"L".join(upper)}L{"L".join(reversed(lower))}Z"/>')
        below = above
    ticks = "".join(_y_tick(top + height - block * scale, str(block)) for block in _ticks(run.occupancy.num_blocks, 2))
    return "".join(shapes) + _frame(STACK) + ticks + _title(STACK, "blocks", "How many blocks are in each state")


def _corners(edges: npt.NDArray[np.float64], values: npt.NDArray[Any]) -> list[tuple[float, float]]:
    """The outline of a bar for each bin, without the points a straight line needs not."""
    corners: list[tuple[float, float]] = []
    for index, value in enumerate(values):
        if index == 0 or value != values[index - 1]:
            corners.append((float(edges[index]), float(value)))
        if index == len(values) - 1 or values[index + 1] != value:
            corners.append((float(edges[index + 1]), float(value)))
    return corners


def _lines(run: DrawnRun, most: int) -> str:
    """Running and waiting requests, the most in each bin; the scale is that of all runs of the page."""
    top, height = LINE
    edges = np.linspace(LEFT, LEFT + WIDTH, NUM_BINS + 1)
    drawn = []
    for name in ("running", "waiting", "waiting_for_slot"):
        points = [
            f"{x:.1f} {top + height * (1 - value / most):.1f}" for x, value in _corners(edges, run.series.peaks[name])
        ]
        drawn.append(f'<path class="line {name}" d="M{"L".join(points)}"/>')
    ticks = "".join(_y_tick(top + height * (1 - value / most), str(value)) for value in _ticks(most, 2))
    title = _title(LINE, "requests", "Requests: running (solid), waiting (dashed), blocked for a slot (dotted)")
    return "".join(drawn) + _frame(LINE) + ticks + title


def _frame(plot: tuple[int, int]) -> str:
    return f'<rect class="frame" x="{LEFT}" y="{plot[0]}" width="{WIDTH}" height="{plot[1]}"/>'


def _title(plot: tuple[int, int], axis: str, words: str) -> str:
    middle = plot[0] + plot[1] / 2
    return (
        f'<text class="title" x="{LEFT}" y="{plot[0] - 8}">{escape(words)}</text>'
        f'<text class="axis" x="12" y="{middle}" transform="rotate(-90 12 {middle})" text-anchor="middle">{axis}</text>'
    )


def _y_tick(y: float, words: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT - 4}" x2="{LEFT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{words}</text>'
    )


def _time_axis(until: float) -> str:
    bottom = LINE[0] + LINE[1]
    ticks = "".join(
        f'<line class="grid" x1="{LEFT + WIDTH * value / until:.1f}" x2="{LEFT + WIDTH * value / until:.1f}" '
        f'y1="{bottom}" y2="{bottom + 4}"/><text class="tick" x="{LEFT + WIDTH * value / until:.1f}" y="{bottom + 16}" '
        f'text-anchor="middle">{value:g}</text>'
        for value in _ticks(until, 6)
    )
    middle = LEFT + WIDTH / 2
    return (
        f'{ticks}<text class="axis" x="{middle}" y="{bottom + 34}" text-anchor="middle">seconds since the start</text>'
    )


def _ticks(until: float, about: int) -> list[float]:
    """Round values from 0 up to `until`, `about` that many steps."""
    rough = until / about
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
    if until >= about:
        step = max(step, 1.0)
    values = np.arange(0.0, until * (1 + 1e-9), step)
    return [int(value) if step >= 1 else round(float(value), 6) for value in values]


def legend() -> str:
    """Words for every colour and sign."""
    boxes = "".join(
        f'<span><svg width="22" height="14"><rect width="22" height="14" fill="url(#{name})"/></svg>'
        f"{escape(look.words)}</span>"
        for name, look in BLOCK_LOOKS.items()
    )
    colour = MARK_LOOKS["compression"].colour
    bar = f'<svg width="14" height="14"><rect x="4" y="5" width="6" height="7" fill="{colour}"/></svg>'
    triangle = '<svg width="14" height="14"><path class="preempted" d="M3 4h8l-4 8z"/></svg>'
    full = '<svg width="22" height="14"><rect class="full" y="5" width="22" height="4"/></svg>'
    signs = ((triangle, "preemption"), (bar, "compression started"), (full, "no block available"))
    return boxes + "".join(f"<span>{sign}{words}</span>" for sign, words in signs)


def patterns() -> str:
    """A fill of the SVG for each state: its colour, and its hatch as thin lines."""
    lines = {"": "", "/": "M0 6L6 0", "x": "M0 6L6 0M0 0L6 6", "|": "M3 0V6", ".": "M2.4 3h1.2"}
    drawn = []
    for name, look in BLOCK_LOOKS.items():
        fill = 'class="free"' if name == "free" else f'fill="{look.colour}"'
        drawn.append(
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" {fill}/>'
            f'<path d="{lines[look.hatch]}" stroke="{darker(look.colour)}" stroke-width="1.2"/></pattern>'
        )
    return "".join(drawn)


def _hover_data(run: DrawnRun, until: float) -> str:
    """What the page's script says under the pointer, as JSON that may stand between single quotes."""
    data = {
        "until": until,
        "last": run.occupancy.times.last_s,
        "blocks": run.occupancy.num_blocks,
        "counts": run.counts.tolist(),
        "running": run.series.peaks["running"].tolist(),
        "waiting": run.series.peaks["waiting"].tolist(),
        "tokens": [round(float(value)) for value in run.series.output_tokens_per_s],
        "preempted": run.marks["preemption"].tolist(),
        "compressed": run.marks["compression"].tolist(),
        "heat": [LEFT, HEAT[0], WIDTH, HEAT[1]],
    }
    return escape(json.dumps(data, separators=(",", ":")))
