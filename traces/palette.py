"""Colours and textures of block states and request phases, chosen so that no pair depends on colour alone.

Colours are from the palette of Okabe and Ito (2008, "Color Universal Design"), picked so that neighbours differ in
lightness too; every state also has a texture in pictures, a hatch in areas and a letter in cells.
"""

from dataclasses import dataclass

from traces.occupancy import STATE_WORDS, STATES


@dataclass(frozen=True)
class Look:
    """How one thing is shown. `hatch` is a fill pattern as Plotly names them, "" for a plain fill."""

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
BLOCK_LOOKS = {state: Look(STATE_WORDS[state], *_BLOCK_LOOKS[state]) for state in STATES}

PHASE_LOOKS = {
    "queued": Look("queued", "#b8bec8", "", "q", "circle-open"),
    "prefill": Look("prefill", "#009e73", "/", "p", "triangle-right"),
    "decode": Look("decode", "#56b4e9", "", "d", "circle"),
    "slot_wait": Look("blocked: waits for a query slot", "#e69f00", "x", "s", "diamond"),
    "block_wait": Look("blocked: waits for a block", "#f0e442", ".", "b", "square"),
    "compressing": Look("compressing", "#d55e00", "\\", "C", "x"),
    "preempted": Look("preempted, to be recomputed", "#3c3c3c", "", "P", "triangle-down"),
    "swapped": Look("swapped to host memory", "#cc79a7", "|", "H", "cross"),
    "paused": Look("paused: the step takes no more requests", "#0072b2", "-", "u", "square-open"),
}

# For things without a meaning of their own (runs, requests): told apart by dash or symbol as well.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#6b4fa0")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")

MARK_LOOKS = {
    "preemption": Look("preemption", "#3c3c3c", "", "P", "triangle-down"),
    "compression": Look("compression", "#d55e00", "", "C", "x"),
    "full": Look("no block available", "#d7263d", "", "!", "line-ns"),
}


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def darker(colour: str, factor: float = 0.62) -> str:
    """The same hue with less light."""
    return "#" + "".join(f"{int(part * factor):02x}" for part in rgb(colour))
