"""Python's garbage collector and an engine: what was there before it serves is not looked at again while it does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside() -> Iterator[None]:
    """While entered, full collections pass over everything that was alive at the start.

    Libraries and a loaded model are some 370,000 objects: one full pass over them takes 0.4 s, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
