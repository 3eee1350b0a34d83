"""Two streams on one card: processor sharing worked out by hand."""

import pytest
import simpy

from sim.device import Device


def ends(
    share: float, compute: list[tuple[int, float]], compress: list[tuple[int, float]], rate: float | None = None
) -> dict[str, list[int]]:
    """Start jobs (at, work) on both streams; returns when each ended."""
    env = simpy.Environment(initial_time=0)
    device = Device(env, share, rate)
    found: dict[str, list[int]] = {"compute": [], "compress": []}

    def start(at: int, work: float, stream: str):  # type: ignore[no-untyped-def]
        yield env.timeout(at)
        yield device.compute(work) if stream == "compute" else device.compress(work)
        found[stream].append(int(env.now))

    for stream, jobs in (("compute", compute), ("compress", compress)):
        for at, work in jobs:
            env.process(start(at, work, stream))
    env.run()
    assert not device.compressing
    return found


def test_alone_a_job_takes_its_work() -> None:
    assert ends(0.25, [(5, 100)], []) == {"compute": [105], "compress": []}
    assert ends(0.25, [], [(5, 100)]) == {"compute": [], "compress": [105]}


def test_beside_each_other_they_share() -> None:
    # compute at 3/4 of the card ends at 100 / 0.75 = 133.3 -> 134; compression then has 33.5 of 40, and ends at 140.5
    assert ends(0.25, [(0, 100)], [(0, 40)]) == {"compute": [134], "compress": [141]}


def test_a_late_compression_slows_only_what_is_left() -> None:
    # 60 of 100 are done at t = 60; 40 left at rate 3/4 take 53.3 -> 54; compression then has 13.5 of 20, 6.5 left
    assert ends(0.25, [(0, 100)], [(60, 20)]) == {"compute": [114], "compress": [121]}


def test_each_stream_is_first_in_first_out() -> None:
    assert ends(0.5, [], [(0, 10), (0, 20)]) == {"compute": [], "compress": [10, 30]}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_work_is_lost_or_made(share: float) -> None:
    found = ends(share, [(0, 50), (0, 70)], [(10, 30), (40, 25)])
    assert max(found["compute"] + found["compress"]) == pytest.approx(50 + 70 + 30 + 25, abs=4)


def test_a_compression_may_run_faster_than_what_it_takes_away() -> None:
    # at half its speed compression ends at 40 / 0.5 = 80, when compute has done 0.75 x 80 = 60 of 100
    assert ends(0.25, [(0, 100)], [(0, 40)], rate=0.5) == {"compute": [120], "compress": [80]}
    # compute ends at 100 / 0.75 = 133.3 -> 134, compression then has 67 of 120, and ends at 134 + 53
    assert ends(0.25, [(0, 100)], [(0, 120)], rate=0.5) == {"compute": [134], "compress": [187]}
