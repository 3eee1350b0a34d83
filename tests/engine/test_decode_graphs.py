"""Which batch sizes are prepared before serving."""

import itertools

import pytest

from engine.decode_graphs import product_sizes


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 64, 100, 255, 256, 257, 1000, 1024, 2048, 4096, 4097, 8192, 40_960])
def test_products_are_prepared_close_to_every_number_of_rows(most: int) -> None:
    """A kernel is chosen by the number of rows, so one in a wide gap would be loaded while serving."""
    sizes = product_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    for size, larger in itertools.pairwise(sizes):
        assert 0 < larger - size <= max(8, size // 8)
    assert len(sizes) < 100 + most // 512, "each is run before serving"


def test_few_rows_are_prepared_one_by_one_only_where_they_end() -> None:
    assert [product_sizes(most) for most in (1, 2, 8, 17)] == [(1,), (1, 2), (1, 8), (1, 8, 16, 17)]
