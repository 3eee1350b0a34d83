"""ServeGen's rates and lengths from made-up files: windows, independence, and cells that are no
literals.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces.cases import write_text
from zlab.traces.servegen import ServeGenSource, servegen
from zlab.traces.workload import TraceError
from zlab.traces.workload_stats import describe

CLIENT = "0,0,0,,0,0\r\n600,2.0,1.0,Gamma,1.0,9.9\r\n1200,4.0,1.4,Weibull,0.7,9.9\r\n"
SUMMED = "window_start_s,rate_req_per_s,rate_weighted_client_iat_cv,active_clients\n0,3.0,2.0,4\n600,0,0,0\n1200,1.0,1.0,2\n"
EMPTY = {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"}
BUSY = {
    "input_tokens": "{10: 0.25, 20: 0.75}",
    "output_tokens": "{100: 0.5, 300: 0.5}",
    "reason_ratio": "{0.0: 0.5, 0.5: 0.5}",
}
QUANTILES = {
    "m": {
        name: {"mean": 1.0, "quantiles_200": [0, 10, 100]}
        for name in ("input_tokens", "output_tokens")
    }
    | {"reason_ratio": {"quantiles_200": [0.0, 0.5, 1.0]}}
}


def source(tmp_path: Path, rates: str = CLIENT, lengths: Any = None) -> ServeGenSource:
    rates_path = write_text(tmp_path / "rates.csv", rates)
    content = {"0": EMPTY, "500": BUSY} if lengths is None else lengths
    return ServeGenSource.read(
        rates_path, write_text(tmp_path / "lengths.json", json.dumps(content))
    )


def test_windows_rates_and_masses(tmp_path: Path) -> None:
    found = source(tmp_path)
    assert [(w.start_s, w.end_s, w.rate_per_s, w.family, w.shape) for w in found.rates] == [
        (0, 600, 0, "Gamma", 1.0),
        (600, 1200, 2.0, "Gamma", 1.0),
        (1200, 1800, 4.0, "Weibull", 0.7),
    ]
    workload = servegen(found, seed=1)
    times = np.asarray([request.arrival_s for request in workload], dtype=float)
    assert times[0] == 0
    assert np.all(np.diff(times) >= 0)
    early = int(np.count_nonzero(times < 600))
    assert early == pytest.approx(1_200, rel=0.1)
    assert len(times) - early == pytest.approx(2_400, rel=0.1)
    prompts = np.asarray([request.prompt_tokens for request in workload])
    outputs = np.asarray([request.output_tokens for request in workload])
    assert set(prompts.tolist()) == {10, 20}
    assert np.mean(prompts == 20) == pytest.approx(0.75, abs=0.03)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.05
    assert {request.reasoning_tokens for request in workload} == {0, 50, 150}
    assert workload.sha256 == servegen(found, seed=1).sha256 != servegen(found, seed=2).sha256


def test_gaps_have_the_rate_whatever_the_family(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for window in source(tmp_path).rates[1:]:
        assert window.gaps(rng, 100_000).mean() == pytest.approx(1 / window.rate_per_s, rel=0.02)


def test_summed_rates_and_quantiles(tmp_path: Path) -> None:
    found = source(tmp_path, SUMMED, QUANTILES)
    assert [(w.start_s, w.end_s, w.rate_per_s, w.shape) for w in found.rates] == [
        (0, 600, 3.0, 0.25),
        (600, 1200, 0.0, 1.0),
        (1200, 1800, 1.0, 1.0),
    ]
    busy = servegen(found, duration_s=600, rate_factor=2.0)
    assert len(busy) == pytest.approx(3_600, rel=0.1)
    lengths = describe(busy).prompt_tokens
    assert lengths is not None
    assert lengths.p50 == pytest.approx(10, abs=1.5)
    assert 1 <= lengths.min <= lengths.max <= 100
    with pytest.raises(TraceError, match="no request between 600 s and 700 s"):
        servegen(found, start_s=600, duration_s=100)


def test_times_without_lengths_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="input_tokens is empty in the lengths from 0 s on"):
        servegen(source(tmp_path, lengths={"0": EMPTY}))
    with pytest.raises(TraceError, match="no lengths for the time 600 s"):
        servegen(source(tmp_path, lengths={"900": BUSY}))


@pytest.mark.parametrize(
    "cell",
    [
        "__import__('os').getcwd()",
        "{1: 2",
        "[1]",
        "{'a': 1}",
        "{1: -1}",
        "{1: 0}",
        "{-1: 1}",
        3,
        None,
        "{1: float('inf')}",
    ],
)
def test_cells_are_read_as_literals_only(tmp_path: Path, cell: Any) -> None:
    with pytest.raises(TraceError, match=r"lengths\.json: window 7, output_tokens"):
        source(tmp_path, lengths={"7": {**BUSY, "output_tokens": cell}})


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("", "has no rows"),
        (
            "0,1,1,Cauchy,1,1\n",
            r"rates\.csv:1: gap family is 'Cauchy', must be one of Gamma, Weibull",
        ),
        ("0,1,1,Gamma,0,1\n", r"rates\.csv:1: shape parameter is 0"),
        ("0,x,1,Gamma,1,1\n", r"rates\.csv:1: rate is 'x'"),
        ("0,1\n", r"rates\.csv:1: has 2 cells, must have 6"),
        ("600,0,0,,0,0\n600,0,0,,0,0\n", r"rates\.csv:2: window start 600 does not come after 600"),
        (SUMMED + "1800,1,0,1\n", r"rates\.csv:5: rate_weighted_client_iat_cv is 0"),
    ],
)
def test_bad_rates(tmp_path: Path, rates: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        source(tmp_path, rates)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "must hold an object"),
        ({}, "must hold an object"),
        ({"x": BUSY}, "window start is 'x'"),
        ({**QUANTILES, "n": QUANTILES["m"]}, "holds 2 models"),
        (
            {"m": {"input_tokens": {"quantiles_200": [3, 1]}}},
            "input_tokens has no ascending quantiles_200",
        ),
    ],
)
def test_bad_lengths(tmp_path: Path, lengths: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        source(tmp_path, lengths=lengths)
