"""Pictures of whole matrices as PNG bytes, without a drawing library: one palette colour a cell, textured by state."""

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from traces.palette import darker, rgb

ByteArray = npt.NDArray[np.uint8]


def indexed_png(pixels: ByteArray, colours: Sequence[str], clear: int | None = None, alpha: int = 0) -> bytes:
    """An 8-bit PNG of `pixels` [height, width], each an index into `colours` ("#rrggbb").

    Index `clear` is see-through: 0 (entirely) to 255 (not at all) of its colour covers what is behind.

    Layout: W3C, Portable Network Graphics (third edition), chunks IHDR, PLTE, tRNS, IDAT, IEND.
    """
    height, width = pixels.shape
    assert len(colours) <= 256
    assert not pixels.size or int(pixels.max()) < len(colours)
    lines = np.zeros((height, width + 1), dtype=np.uint8)  # each line begins with its filter: 0, none
    lines[:, 1:] = pixels
    palette = bytes(part for colour in colours for part in rgb(colour))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)), (b"PLTE", palette)]
    if clear is not None:
        chunks.append((b"tRNS", bytes(alpha if index == clear else 255 for index in range(len(colours)))))
    chunks += [(b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_uri(png: bytes) -> str:
    """The picture as an address that stands in a page itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def enlarge(cells: ByteArray, width: int, height: int) -> ByteArray:
    """Cells repeated a whole number of times, so that the picture is about `width` x `height` or larger as it is."""
    rows, columns = cells.shape
    return cells.repeat(max(1, round(height / rows)), axis=0).repeat(max(1, round(width / columns)), axis=1)


def textured(pixels: ByteArray, hatches: Sequence[str]) -> ByteArray:
    """Pixel values 2 * value, plus 1 where the value's hatch (as in `traces.palette`) draws a line."""
    height, width = pixels.shape
    down, right = np.indices((height, width))
    drawn = {
        "/": (down + right) % 6 == 0,
        "\\": (down - right) % 6 == 0,
        "x": ((down + right) % 6 == 0) | ((down - right) % 6 == 0),
        "|": right % 4 == 0,
        "-": down % 4 == 0,
        ".": (down % 4 == 0) & (right % 4 == 0),
    }
    result = (pixels * 2).astype(np.uint8)
    for value, hatch in enumerate(hatches):
        if hatch:
            result[(pixels == value) & drawn[hatch]] += 1
    return result


def textured_colours(colours: Sequence[str]) -> list[str]:
    """The palette for `textured`: each colour and its darker line."""
    return [shade for colour in colours for shade in (colour, darker(colour))]
