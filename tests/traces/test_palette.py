"""The looks of block states tell them apart without colour."""

import numpy as np

from zlab.traces.palette import BLOCK_LOOKS, rgb


def test_looks_differ_in_lightness_or_texture() -> None:
    def lightness(colour: str) -> float:
        return float(np.dot(rgb(colour), (0.2126, 0.7152, 0.0722)))

    looks = list(BLOCK_LOOKS.values())
    assert (
        len({look.letter for look in looks}) == len({look.symbol for look in looks}) == len(looks)
    )
    for i, one in enumerate(looks):
        for other in looks[i + 1 :]:
            assert (
                one.hatch != other.hatch
                or abs(lightness(one.colour) - lightness(other.colour)) > 20
            )
