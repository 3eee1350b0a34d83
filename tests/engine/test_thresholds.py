"""The least logit that may be drawn, against the words of its definition: torch here, Triton interpreted and on a GPU.

Top-p's border is checked to 1e-5 of the mass, which is what float32 exponentials leave open: of the logits at which the
mass above is p to within that, each will do; everywhere else there is one answer.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import filters
from engine.filters import FilterSettings
from engine.sampler import Sampler, SampleRequest
from engine.sampling_params import SamplingParams
from tests.engine.kernel_cases import INTERPRETED

Thresholds = Callable[[torch.Tensor, torch.Tensor, FilterSettings], torch.Tensor]
Asked = tuple[int, float, float]  # top-k, top-p, min-p
TOLERANCE = 1e-5
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# None: the row has no filter. 10**6 is more than any vocabulary.
MIXED: tuple[Asked | None, ...] = (
    (0, 0.95, 0.0), None, (1, 1.0, 0.0), (50, 0.9, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.03), None, (20, 1.0, 0.0),
    (10**6, 0.8, 0.0), (7, 0.5, 0.2), (0, 0.9999, 0.0), (120, 1.0, 1e-4), (10**6, 1.0, 0.5), (0, 0.3, 1.0),
)  # fmt: skip


def _ways() -> list[pytest.param]:  # type: ignore[valid-type]
    if INTERPRETED:
        return [pytest.param("triton", "cpu", id="triton")]
    return [
        pytest.param("torch", "cpu", id="torch"),
        pytest.param("torch", "cuda", marks=ON_GPU, id="torch-cuda"),
        pytest.param("triton", "cuda", marks=ON_GPU, id="triton-cuda"),
    ]


on_every_way = pytest.mark.parametrize(("way", "device"), _ways())


def find(way: str) -> Thresholds:
    if way == "torch":
        return filters.thresholds
    found: Thresholds = pytest.importorskip("engine.fused_threshold").thresholds
    return found


def settings(asked: list[Asked | None], temperature: float, vocab: int, device: str) -> FilterSettings:
    params = [
        SamplingParams(temperature=temperature, top_p=item[1], top_k=item[0], min_p=item[2])
        if item is not None
        else SamplingParams()
        for item in asked
    ]
    sampler = Sampler(vocab, torch.device(device))
    made = sampler.plan([SampleRequest(item, 0, 0) for item in params]).filters
    assert made is not None
    return made


def right_borders(scaled: np.ndarray, asked: Asked) -> tuple[float, float]:
    """The least and the greatest right answer for a row of scaled logits (float32), in float64."""
    top_k, top_p, min_p = asked
    # The border of min-p is rounded as float32 rounds it.
    limit = float(np.float32(scaled.max()) + torch.tensor(min_p).log().numpy())
    if not (0 < top_k < len(scaled) or top_p < 1.0):
        return limit, limit
    ordered = np.sort(scaled[scaled > -np.inf].astype(np.float64))[::-1][: top_k if top_k > 0 else None]
    weights = np.exp(ordered - ordered[0])
    first = np.flatnonzero(np.append(True, ordered[1:] < ordered[:-1]))  # of every value that occurs, where it begins
    before = (np.cumsum(weights) - weights)[first] / weights.sum()
    found = []
    for share in (top_p + TOLERANCE, top_p - TOLERANCE):
        kept = np.ones(len(first), dtype=bool) if top_p >= 1.0 else before < share
        kept[0] = True
        found.append(max(limit, float(ordered[first[np.flatnonzero(kept)[-1]]])))
    return found[0], found[1]


def check(
    way: str, device: str, logits: torch.Tensor, asked: list[Asked | None], temperature: float
) -> tuple[torch.Tensor, int]:
    """The borders of all rows, all right, and how many rows have more than one right answer."""
    logits = logits.to(device)
    inverse = torch.full((len(asked),), 1.0 / temperature, device=device)
    found = find(way)(logits, inverse, settings(asked, temperature, logits.shape[1], device)).cpu()
    scaled = (logits.float() * inverse[:, None]).cpu().numpy()
    open_rows = 0
    for row, item in enumerate(asked):
        if item is None:
            assert found[row] == float("-inf")
            continue
        least, greatest = right_borders(scaled[row], item)
        assert least <= float(found[row]) <= greatest, (row, item)
        assert least != greatest or float(found[row]) == least
        assert item[2] > 0 or float(found[row]) in scaled[row]
        open_rows += least != greatest
    return found, open_rows


def random_logits(rows: int, vocab: int, scale: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor, with what would be seen at once if it were read beside them."""
    wide = torch.full((rows, vocab + 13), 1e4)
    wide[:, :vocab] = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return wide.to(dtype)[:, :vocab]


@on_every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "scale", "temperature"), [(300, 1.0, 1.0), (1003, 4.0, 0.8), (9001, 2.5, 0.6)])
def test_random_rows_with_mixed_filters(
    way: str, device: str, dtype: torch.dtype, vocab: int, scale: float, temperature: float
) -> None:
    logits = random_logits(len(MIXED), vocab, scale, vocab, dtype)
    _, open_rows = check(way, device, logits, list(MIXED), temperature)
    assert open_rows <= 2, "the case says too little"


def flat(vocab: int) -> torch.Tensor:
    return torch.full((vocab,), 1.25)


def dominated(vocab: int) -> torch.Tensor:
    return torch.linspace(-9.0, -8.0, vocab).index_fill(0, torch.tensor(vocab // 3), 30.0)


def masked(vocab: int) -> torch.Tensor:
    """Nearly all tokens are forbidden: fewer are left than top-k asks for."""
    row = torch.full((vocab,), float("-inf"))
    row[5::40] = torch.linspace(-3.0, 4.0, len(row[5::40]))
    return row


def forbidden(vocab: int) -> torch.Tensor:
    return torch.full((vocab,), float("-inf"))


def tied(vocab: int) -> torch.Tensor:
    """Few values, every one many times: ties at every border."""
    return (torch.arange(vocab) % 7).float() * 0.5


def far_apart(vocab: int) -> torch.Tensor:
    """Floats of every size and both signs, zeros of both signs, the smallest there are: halves must still end."""
    powers = torch.logspace(-45, 38, vocab // 2 - 4, dtype=torch.float64).float()
    return torch.cat([powers, -powers, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 0.0, -0.0, 3e-45, 5.0])])


def peaked(vocab: int) -> torch.Tensor:
    """As a language model's logits: they fall with the logarithm of the rank; through 0."""
    return 4.0 - 1.5 * torch.arange(1, vocab + 1).float().log()


def two_values(vocab: int) -> torch.Tensor:
    """Neighbours among floats."""
    row = torch.full((vocab,), 1.0)
    row[::3] = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
    return row


def around_zero(vocab: int) -> torch.Tensor:
    """The float before 0.0 and it: their middle rounds to 0.0, and -0.0, between them as bits, equals it."""
    row = torch.zeros(vocab)
    row[::3] = -1e-45
    return row


HARD = (flat, dominated, masked, tied, far_apart, two_values, around_zero)


@on_every_way
@pytest.mark.parametrize("make", HARD, ids=lambda make: make.__name__)
def test_rows_made_to_be_hard(way: str, device: str, make: Callable[[int], torch.Tensor]) -> None:
    vocab = 402
    logits = make(vocab).expand(len(MIXED), vocab).clone()
    check(way, device, logits, list(MIXED), 1.0)


@on_every_way
def test_ties_by_hand(way: str, device: str) -> None:
    row = torch.tensor([0.5, 0.25, 0.0625, 0.0625, 0.0625, 0.0625]).log()
    asked: list[tuple[Asked, float]] = [
        ((0, 0.49, 0.0), 0.5), ((0, 0.51, 0.0), 0.25), ((0, 0.76, 0.0), 0.0625), ((0, 0.9, 0.0), 0.0625),
        ((3, 1.0, 0.0), 0.0625), ((2, 1.0, 0.0), 0.25), ((2, 0.65, 0.0), 0.5), ((2, 0.68, 0.0), 0.25),
        # Of the four that tie one counts to the three kept: 0.5 and 0.25 of 0.8125 are 0.923.
        ((3, 0.93, 0.0), 0.0625), ((3, 0.91, 0.0), 0.25), ((3, 0.99, 0.3), 0.15),
    ]  # fmt: skip
    logits = row.expand(len(asked), -1).clone().to(device)
    ones = torch.ones(len(asked), device=device)
    found = find(way)(logits, ones, settings([item for item, _ in asked], 1.0, 6, device))
    assert found.exp().tolist() == pytest.approx([least for _, least in asked])


@on_every_way
def test_a_row_without_any_token_and_one_beside_it(way: str, device: str) -> None:
    logits = torch.stack([forbidden(300), torch.arange(300).float()])
    asked: list[Asked | None] = [(5, 0.9, 0.1), (5, 1.0, 0.0)]
    found = find(way)(logits.to(device), torch.ones(2, device=device), settings(asked, 1.0, 300, device))
    assert found.tolist() == [float("-inf"), 295.0]


@on_every_way
def test_a_row_alone_has_the_same_bits(way: str, device: str) -> None:
    logits = random_logits(len(MIXED), 9001, 3.0, 5, torch.bfloat16).to(device)
    inverse = torch.linspace(0.5, 2.0, len(MIXED)).to(device)
    together = find(way)(logits, inverse, settings(list(MIXED), 1.0, 9001, device))
    for row, item in enumerate(MIXED):
        if item is None:
            continue
        alone = find(way)(logits[row : row + 1], inverse[row : row + 1], settings([item], 1.0, 9001, device))
        assert alone.view(torch.int32).tolist() == together[row : row + 1].view(torch.int32).tolist()


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter calls")
@pytest.mark.parametrize(
    ("make", "dtype", "most"),
    [
        (tied, torch.float32, 5),
        (peaked, torch.bfloat16, 11),
        (peaked, torch.float32, 14),
        (far_apart, torch.float32, 49),
    ],
)
def test_few_passes_settle_a_row(
    make: Callable[[int], torch.Tensor], dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_threshold = pytest.importorskip("engine.fused_threshold")
    one_pass, passes = fused_threshold._above, []

    def counted(*arguments: object) -> object:
        passes.append(arguments)
        return one_pass(*arguments)

    monkeypatch.setattr(fused_threshold, "_above", counted)
    for asked in ((0, 0.95, 0.0), (30, 1.0, 0.0), (290, 1.0, 0.0), (500, 1.0, 0.0), (0, 0.999999, 0.0)):
        passes.clear()
        check("triton", "cpu", make(600).to(dtype)[None], [asked], 0.8)
        assert 0 < len(passes) <= most, asked


@pytest.mark.skipif(not INTERPRETED, reason="of the kernel alone; plain torch gives NaN")
def test_nan_counts_as_forbidden() -> None:
    broken = random_logits(1, 300, 2.0, 3, torch.float32).contiguous()
    broken[0, 40:90] = float("nan")
    asked: list[Asked | None] = [(60, 0.9, 0.0)]
    expected, _ = check("triton", "cpu", broken.nan_to_num(nan=float("-inf")), asked, 1.0)
    found = find("triton")(broken, torch.ones(1), settings(asked, 1.0, 300, "cpu"))
    assert found.tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_whole_vocabulary_as_it_is_served(dtype: torch.dtype, scale: float) -> None:
    """176 rows of Qwen3's vocabulary at temperature 0.8: both ways right, and equal but where several are right."""
    logits = random_logits(176, 151_936, scale, 9, dtype)
    asked: list[Asked | None] = [(0, 0.95, 0.0) if row % 4 else MIXED[row // 4 % len(MIXED)] for row in range(176)]
    found, open_rows = check("triton", "cuda", logits, asked, 0.8)
    expected, _ = check("torch", "cuda", logits, asked, 0.8)
    assert int((found != expected).sum()) <= open_rows
