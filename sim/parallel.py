"""Many simulations at once, over whatever joblib's `parallel_config` names: processes here, a Dask or a Ray cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from joblib import Parallel, delayed
from joblib.parallel import get_active_backend

Item = TypeVar("Item")
Result = TypeVar("Result")
PORTION = 2  # calls a worker gets at once where results only come back as a whole list


def results(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
    """Call `function` with each item and give back (index of the item, result) as they finish, in no certain order.

    Function, items and results must be picklable. Without `joblib.parallel_config(backend=..., n_jobs=...)` around it
    everything runs in this process, one after the other. What the function raises ends the iteration.
    """
    backend, num_jobs = get_active_backend()
    calls = [delayed(_numbered)(function, index, item) for index, item in enumerate(items)]
    if backend.supports_return_generator or num_jobs == 1:
        yield from Parallel(return_as="generator_unordered", batch_size=1)(calls)
        return
    size = PORTION * backend.effective_n_jobs(num_jobs)  # such as Ray's: no results before all of a call are there
    for start in range(0, len(calls), size):
        yield from Parallel(batch_size=1)(calls[start : start + size])


def _numbered(function: Callable[[Item], Result], index: int, item: Item) -> tuple[int, Result]:
    return index, function(item)
