"""Colours and textures of block states and request phases. No pair differs by colour alone.

The colours are from the palette of Okabe and Ito (2008, "Color Universal Design"), chosen so that
neighbours also differ in lightness. Every state also has a texture in pictures, a hatch in areas
and a letter in cells.
"""

from dataclasses import dataclass

from zlab.traces.schema import BlockState, Phase


@dataclass(frozen=True)
class Look:
    """How one item is drawn. `hatch` is a fill pattern as Plotly names them, "" for a plain
    fill.
    """

    words: str
    colour: str
    hatch: str
    letter: str
    symbol: str


_BLOCK_LOOKS = {  # colour, hatch, letter, symbol
    "free": ("#d9dde3", "", "·", "circle-open"),
    "owned": ("#56b4e9", "", "o", "circle"),
    "shared": ("#0072b2", "/", "S", "square"),
    "cached": ("#e8d95a", ".", "c", "diamond"),
    "target": ("#d55e00", "x", "T", "x"),
    "held": ("#cc79a7", "|", "H", "cross"),
}
BLOCK_LOOKS = {state.label: Look(state.words, *_BLOCK_LOOKS[state.label]) for state in BlockState}

_PHASE_LOOKS = {
    "queued": ("#b8bec8", "+", "q", "circle-open"),
    "prefill": ("#009e73", "/", "p", "triangle-right"),
    "decode": ("#56b4e9", "", "d", "circle"),
    "slot_wait": ("#e69f00", "x", "s", "diamond"),
    "block_wait": ("#f0e442", ".", "b", "square"),
    "compressing": ("#d55e00", "\\", "C", "x"),
    "preempted": ("#6f6f6f", "", "P", "triangle-down"),
    "swapped": ("#cc79a7", "|", "H", "cross"),
    "paused": ("#0072b2", "-", "u", "square-open"),
}
PHASE_LOOKS = {
    phase.label: Look(phase.words, *_PHASE_LOOKS[phase.label])
    for phase in Phase
    if phase is not Phase.DONE
}

# For items without a meaning of their own (runs, requests); they also differ by dash or symbol.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#7d5fb8")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")

MARK_LOOKS = {
    "preemption": Look("preemption", "#6f6f6f", "", "P", "triangle-down"),
    "compression": Look("compression", "#d55e00", "", "C", "x"),
    "full": Look("no block available", "#d7263d", "", "!", "line-ns"),
}


def rgb(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def darker(colour: str, factor: float = 0.62) -> str:
    """Return the same hue with less light."""
    return "#" + "".join(f"{int(part * factor):02x}" for part in rgb(colour))
