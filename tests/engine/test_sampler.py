"""Draws against their distribution, filters against their definition, penalties by hand, batches
without effect.

The least logit that may be drawn, against the words of its definition: torch here, Triton
interpreted and on a GPU.

Top-p's border is checked to 1e-5 of the mass, which is what float32 exponentials leave open: of the
logits at which the mass above is p to within that, each will do; everywhere else there is one
answer.
"""

import importlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.engine.kernel_cases import INTERPRETED
from zlab.engine.errors import SamplingError
from zlab.engine.kernels.torch_backend import mix
from zlab.engine.sampling import torch_ops as filters
from zlab.engine.sampling.sampler import (
    Sampled,
    SamplePlan,
    Sampler,
    SampleRequest,
    StepSampler,
    TokenCounts,
    request_seed,
    thresholds,
)
from zlab.engine.sampling.torch_ops import FilterSettings, draw, exponentials, row_keys
from zlab.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
PROBABILITIES = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.06, 0.03, 0.01])
NUM_DRAWS = 20_000
# Upper 0.1 % points of the chi-square distribution by degrees of freedom (any table); seeds are
# fixed, so no flicker.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    assert (expected >= 5).all()
    return float(((counts - expected) ** 2 / expected).sum())


def sample(
    logits: torch.Tensor, requests: list[SampleRequest], counts: TokenCounts | None = None
) -> Sampled:
    sampler = Sampler(logits.shape[1], CPU, counts=counts)
    return sampler.sample(logits, sampler.plan(requests))


def drawn_counts(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """How often each token comes in `NUM_DRAWS` places of one output."""
    requests = [SampleRequest(params, 77, place) for place in range(NUM_DRAWS)]
    token_ids = sample(logits.expand(NUM_DRAWS, -1), requests).token_ids
    return torch.bincount(token_ids, minlength=logits.shape[-1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_every_temperature(temperature: float) -> None:
    counts = drawn_counts(SamplingParams(temperature=temperature), PROBABILITIES.log())
    expected = torch.softmax(PROBABILITIES.log() / temperature, dim=-1)
    merged, expected = counts[:5].clone(), expected.clone()
    merged[4], expected[4] = (
        counts[4:].sum(),
        expected[4:].sum(),
    )  # at 0.5 the last alone are too rare for the test
    assert chi_square(merged, expected[:5]) < CHI_SQUARE[4]


def test_draws_over_seeds_are_as_good_as_over_places() -> None:
    ones = torch.ones(NUM_DRAWS)
    seeds = torch.tensor([request_seed(SamplingParams(seed=number), engine_seed=0, request_number=0)
                          for number in range(NUM_DRAWS)])  # fmt: skip
    logits = PROBABILITIES.log().expand(NUM_DRAWS, -1)
    for chosen in (seeds, torch.arange(NUM_DRAWS)):  # also seeds that nobody has mixed
        token_ids = draw(logits, ones, ones, chosen, torch.zeros(NUM_DRAWS, dtype=torch.int64))
        assert chi_square(torch.bincount(token_ids, minlength=7), PROBABILITIES) < CHI_SQUARE[6]


def test_the_noise_is_exponential_and_independent() -> None:
    first, second = row_keys(torch.arange(40), torch.arange(40) * 7)
    noise = exponentials(first, second, 5000).double()
    assert abs(float(noise.mean()) - 1.0) < 5 / math.sqrt(noise.numel())
    assert abs(float(noise.var()) - 1.0) < 5 * math.sqrt(8 / noise.numel())
    for level in (
        1e-3,
        0.1,
        1.0,
        5.0,
    ):  # the distribution function, small values that decide rare tokens included
        share = float((noise < level).double().mean())
        expected = -math.expm1(-level)
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / noise.numel())
    centred = noise - 1.0
    for other in (centred.roll(1, dims=0), centred.roll(1, dims=1)):
        assert abs(float((centred * other).mean())) < 5 / math.sqrt(noise.numel())


def test_the_tensor_hash_is_the_integer_hash() -> None:
    seed, place = (123 << 40) + 9, 12
    low, high = seed & 0xFFFFFFFF, seed >> 32
    first, _ = row_keys(torch.tensor([seed]), torch.tensor([place]))
    assert int(first) == mix(mix(mix(low) + high) + place)


def test_a_request_gets_the_same_token_whatever_shares_its_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    wanted = [
        SampleRequest(SamplingParams(temperature=0.8), 11, 3),
        SampleRequest(SamplingParams(temperature=1.3, top_p=0.7), 12, 0),
        SampleRequest(SamplingParams(temperature=0.7, top_k=9, min_p=0.02), 13, 500),
        SampleRequest(SamplingParams(temperature=0.0), 14, 8),
        SampleRequest(SamplingParams(min_p=0.1), 15, 1),
        SampleRequest(SamplingParams(top_k=2000, top_p=0.5), 16, 1),
    ]
    logits = torch.randn(len(wanted), 3000, generator=generator) * 3
    alone = [
        int(sample(logits[row : row + 1], [request]).token_ids)
        for row, request in enumerate(wanted)
    ]
    together = sample(logits, wanted).token_ids.tolist()
    assert together == alone
    order = [5, 2, 0, 4, 1, 3]
    neighbours = torch.randn(len(order), 3000, generator=generator)
    mixed = torch.stack(
        [item for row, place in enumerate(order) for item in (neighbours[row], logits[place])]
    )
    requests = [
        item
        for place in order
        for item in (SampleRequest(SamplingParams(top_k=1 + place), place, 9), wanted[place])
    ]
    found = sample(mixed, requests).token_ids[1::2].tolist()
    assert found == [alone[place] for place in order]
    assert alone[3] == int(logits[3].argmax())


def allowed(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by the words of the definition, one token at a time."""
    scaled = logits / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    kept: list[int] = []
    mass = 0.0
    for token, share in zip(order, weights / weights.sum(), strict=True):
        if mass >= params.top_p and kept:
            break
        kept.append(token)
        mass += share
    return {token for token in kept if math.exp(scaled[token] - scaled[order[0]]) >= params.min_p}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=2.0, top_p=0.3),
        SamplingParams(min_p=0.25),
        SamplingParams(temperature=1.5, top_k=10, top_p=0.6),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.95, min_p=0.1),
        SamplingParams(top_p=1e-6),
    ],
    ids=str,
)
def test_only_and_all_allowed_tokens_are_drawn(params: SamplingParams) -> None:
    logits = torch.randn(25, generator=torch.Generator().manual_seed(2)) * 1.5
    expected = sorted(allowed(logits.double().numpy(), params))
    counts = drawn_counts(params, logits)
    assert counts[expected].sum() == NUM_DRAWS
    probabilities = torch.softmax(logits[expected] / params.temperature, dim=-1)
    likely = probabilities * NUM_DRAWS >= 5
    assert (counts[expected][likely] > 0).all()
    if 2 <= int(likely.sum()) <= 7:
        table = CHI_SQUARE[int(likely.sum()) - 1]
        assert chi_square(counts[expected][likely], probabilities[likely]) < table


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    counts = drawn_counts(SamplingParams(top_k=2), logits)
    assert (counts[:4] > 0).all()
    assert counts[4] == 0


def test_penalties_by_hand() -> None:
    counts = TokenCounts(2, 6, CPU)
    counts.begin(0, prompt=[1, 2], output=[2, 3, 3])
    counts.begin(1, prompt=[5])
    logits = torch.tensor([[1.0, 2.0, 4.0, 6.0, -1.0, -2.0], [1.0, 2.0, 4.0, 6.0, -1.0, -2.0]])
    found = counts.penalise(
        logits,
        torch.tensor([0, 1]),
        repetition=torch.tensor([2.0, 1.6]),
        presence=torch.tensor([0.5, 0.3]),
        frequency=torch.tensor([0.25, 0.0]),
    )
    # Slot 0: 1 and 2 are in the prompt, 2 once and 3 twice in the output. Slot 1: only 5, in the
    # prompt.
    expected = [
        [1.0, 1.0, 2.0 - 0.25 - 0.5, 3.0 - 0.5 - 0.5, -1.0, -2.0],
        [1.0, 2.0, 4.0, 6.0, -1.0, -2.0 * 1.6],
    ]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_drawn_tokens_are_counted_and_only_for_their_request() -> None:
    counts = TokenCounts(2, 4, CPU)
    counts.begin(0, prompt=[])
    counts.begin(1, prompt=[])
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.8]] * 3)
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.5)
    plain = SamplingParams(temperature=0.0)
    outputs: list[list[int]] = []
    for place in range(3):
        requests = [
            SampleRequest(penalised, 0, place, 1),
            SampleRequest(plain, 0, place),
            SampleRequest(penalised, 0, place, 0),
        ]
        outputs.append(sample(logits, requests, counts).token_ids.tolist())
    assert outputs == [[1, 1, 1], [2, 1, 2], [3, 1, 3]]
    counts.begin(
        1, prompt=[], output=[1]
    )  # a new request in the slot, or one that comes back: counts start over
    after = sample(logits[:1], [SampleRequest(penalised, 0, 1, 1)], counts).token_ids
    assert after.tolist() == [2]


def test_penalties_without_counts_or_slot_are_refused() -> None:
    params = SamplingParams(frequency_penalty=0.1)
    with pytest.raises(SamplingError, match="without token counts"):
        Sampler(4, CPU).plan([SampleRequest(params, 0, 0, 0)])
    sampler = Sampler(4, CPU, counts=TokenCounts(1, 4, CPU))
    with pytest.raises(SamplingError, match=r"rows \[1\] have penalties but no penalty slot"):
        sampler.plan([SampleRequest(SamplingParams(), 0, 0), SampleRequest(params, 0, 0)])
    with pytest.raises(SamplingError, match=r"0\.\.0, got 1"):
        TokenCounts(1, 4, CPU).begin(1, prompt=[])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    kept = logits.clone()
    counts = TokenCounts(1, 50, CPU)
    counts.begin(0, prompt=list(range(50)))
    params = [
        SamplingParams(temperature=0.3, logprobs=4, repetition_penalty=1.9),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=5.0),
    ]
    requests = [SampleRequest(item, 5, 0, 0 if item.penalises else None) for item in params]
    found = sample(logits, requests, counts)
    assert torch.equal(logits, kept)
    assert found.logprobs is not None
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row in range(3):
        token = int(found.token_ids[row])
        assert float(found.logprobs.chosen[row]) == pytest.approx(expected[row, token], abs=1e-5)
        order = np.argsort(-expected[row])
        assert int(found.logprobs.chosen_rank[row]) == list(order).index(token) + 1
        assert found.logprobs.top_ids[row].tolist() == list(order[:4])
        np.testing.assert_allclose(
            found.logprobs.top[row].numpy(), expected[row, order[:4]], atol=1e-5
        )
    assert int(found.logprobs.chosen_rank[1]) == 1


def test_rows_that_stay_are_laid_out_once_and_drawn_as_if_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laid_out: list[int] = []
    plan = Sampler.plan

    def counted(self: Sampler, requests: Sequence[SampleRequest]) -> SamplePlan:
        laid_out.append(len(requests))
        return plan(self, requests)

    params = (
        SamplingParams(),
        SamplingParams(frequency_penalty=1.0, top_k=9),
        SamplingParams(min_p=0.1, logprobs=1),
    )
    outputs: dict[int, list[int]] = {number: [] for number in range(3)}

    def step_sampler() -> StepSampler:
        made = StepSampler(
            40,
            CPU,
            lambda number: len(outputs[number]),
            outputs.__getitem__,
            max_penalised=2,
        )
        for number, item in enumerate(params):
            made.add(number, item, [number])
        return made

    kept = step_sampler()
    for step, numbers in enumerate([(0, 1, 2)] * 3 + [(2, 1)] * 2 + [(0,)] + [(1, 0)] * 2):
        logits = torch.randn(len(numbers), 40, generator=torch.Generator().manual_seed(step))
        expected = step_sampler().sample(logits, numbers).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "plan", counted)
            drawn = kept.sample(logits, list(numbers)).tolist()
        assert drawn == expected
        for number, token in zip(numbers, drawn, strict=True):
            outputs[number].append(token)
    assert laid_out == [3, 2, 1, 2]


def test_warming_up_finds_borders_in_both_dtypes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step launches for temperature with top-p is launched before, also for penalised logits
    (float32).
    """
    seen: list[tuple[torch.dtype, int]] = []

    def recorded(
        logits: torch.Tensor, inverse_temperature: torch.Tensor, settings: FilterSettings
    ) -> torch.Tensor:
        seen.append((logits.dtype, len(settings.rows)))
        return thresholds(logits, inverse_temperature, settings)

    monkeypatch.setattr("zlab.engine.sampling.sampler.thresholds", recorded)
    StepSampler(40, CPU, lambda number: 0, lambda number: [], max_penalised=1).warm_up(
        torch.zeros(2, 40, dtype=torch.bfloat16)
    )
    assert seen == [(torch.bfloat16, 2), (torch.float32, 2)]


def test_seeds() -> None:
    given = SamplingParams(seed=5, n=3)
    seeds = {request_seed(given, engine_seed=1, request_number=8, copy=copy) for copy in range(3)}
    assert len(seeds) == 3
    assert seeds == {
        request_seed(given, engine_seed=2, request_number=9, copy=copy) for copy in range(3)
    }
    free = SamplingParams()
    seeds = {
        request_seed(free, engine_seed=engine, request_number=number)
        for engine in (0, 1)
        for number in (0, 1, 2)
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (
        len(
            {request_seed(SamplingParams(seed=5 + (1 << 32)), engine_seed=0, request_number=0)}
            & seeds
        )
        == 0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be in \[0, inf\), got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number in .*, got 'hot'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01"),
        ({"top_k": -2}, "top_k must be a whole number at least -1, got -2"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \(0, 2\], got 0"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -3}, r"frequency_penalty must be in \[-2, 2\], got -3"),
        ({"n": 0}, r"n must be a whole number in \[1, 1024\], got 0"),
        ({"n": 2, "temperature": 0.0}, "n must be 1 with temperature 0"),
        ({"seed": -1}, "seed must be a whole number in"),
        ({"seed": True}, "seed must be a whole number in .*, got True"),
        ({"logprobs": 21}, r"logprobs must be a whole number in \[0, 20\], got 21"),
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1, got 0"),
        ({"stop": ["a", ""]}, "stop must be a string or a list of strings, none empty"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        (
            {"temprature": 1.0},
            "unknown sampling parameter 'temprature'; did you mean 'temperature'",
        ),
        ({"bogus": 1.0}, r"unknown sampling parameter 'bogus' \(choices: n, temperature"),
    ],
)
def test_bad_parameters_are_refused_by_name_and_range(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        SamplingParams.from_mapping(given)


def test_good_parameters_are_normalised() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], top_k=-1, top_p=1, temperature=1)
    assert params.stop_strings == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert not params.filters
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert hash(params) == hash(SamplingParams(stop="END", stop_token_ids=(3, 4), top_k=-1))


Thresholds = Callable[[torch.Tensor, torch.Tensor, FilterSettings], torch.Tensor]
Asked = tuple[int, float, float]  # top-k, top-p, min-p
TOLERANCE = 1e-5
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# None: the row has no filter. 10**6 is more than any vocabulary.
MIXED: tuple[Asked | None, ...] = (
    (0, 0.95, 0.0),
    None,
    (1, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.03),
    None,
    (20, 1.0, 0.0),
    (10**6, 0.8, 0.0),
    (7, 0.5, 0.2),
    (0, 0.9999, 0.0),
    (120, 1.0, 1e-4),
    (10**6, 1.0, 0.5),
    (0, 0.3, 1.0),
)


def _ways() -> list[pytest.param]:  # type: ignore[valid-type]
    if INTERPRETED:
        return [pytest.param("triton", "cpu", id="triton")]
    return [
        pytest.param("torch", "cpu", id="torch"),
        pytest.param("torch", "cuda", marks=ON_GPU, id="torch-cuda"),
        pytest.param("triton", "cuda", marks=ON_GPU, id="triton-cuda"),
    ]


TRITON_OPS = "zlab.engine.sampling.triton_ops"
POISON_BESIDE = torch.full((5, 13), 1e4)  # what `random_logits` has beside the rows
on_every_way = pytest.mark.parametrize(("way", "device"), _ways())


def find(way: str) -> Thresholds:
    if way == "torch":
        return filters.thresholds
    found: Thresholds = pytest.importorskip("zlab.engine.sampling.triton_ops").thresholds
    return found


def settings(
    asked: list[Asked | None], temperature: float, vocab: int, device: str
) -> FilterSettings:
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
    ordered = np.sort(scaled[scaled > -np.inf].astype(np.float64))[::-1][
        : top_k if top_k > 0 else None
    ]
    weights = np.exp(ordered - ordered[0])
    first = np.flatnonzero(
        np.append(True, ordered[1:] < ordered[:-1])
    )  # of every value that occurs, where it begins
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


def random_logits(
    rows: int, vocab: int, scale: float, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a wider tensor, with what would be seen at once if it were read beside them."""
    wide = torch.full((rows, vocab + 13), 1e4)
    wide[:, :vocab] = (
        torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    )
    return wide.to(dtype)[:, :vocab]


@on_every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab", "scale", "temperature"), [(300, 1.0, 1.0), (1003, 4.0, 0.8), (9001, 2.5, 0.6)]
)
def test_random_rows_with_mixed_filters(
    way: str, device: str, dtype: torch.dtype, vocab: int, scale: float, temperature: float
) -> None:
    logits = random_logits(len(MIXED), vocab, scale, vocab, dtype)
    _, open_rows = check(way, device, logits, list(MIXED), temperature)
    assert open_rows <= 2, "the case says too little"


@on_every_way
@pytest.mark.parametrize("vocab", [31, 300, 9001])
def test_a_mask_excludes_what_it_does_not_allow(way: str, device: str, vocab: int) -> None:
    beside = len(POISON_BESIDE[0])
    padded = random_logits(5, vocab, 2.0, vocab, torch.float32)
    padded = padded.as_strided((5, vocab + beside), (vocab + beside, 1)).to(device)
    logits = padded[:, :vocab]
    words = -(-vocab // 32)
    bits = torch.randint(
        0, 2, (3, words * 32), generator=torch.Generator().manual_seed(1), dtype=torch.bool
    )
    packed = np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int32)
    rows = torch.tensor([4, 0, 3])
    wanted = logits.clone()
    wanted[rows] = wanted[rows].masked_fill(~bits[:, :vocab].to(device), float("-inf"))
    module = filters if way == "torch" else importlib.import_module(TRITON_OPS)
    module.keep_allowed(logits, rows.to(device), torch.from_numpy(packed).to(device))
    assert torch.equal(logits, wanted)
    assert torch.equal(padded[:, vocab:].cpu(), POISON_BESIDE)


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
    """Floats of every size and both signs, zeros of both signs, the smallest there are: halves must
    still end.
    """
    powers = torch.logspace(-45, 38, vocab // 2 - 4, dtype=torch.float64).float()
    return torch.cat(
        [powers, -powers, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 0.0, -0.0, 3e-45, 5.0])]
    )


def peaked(vocab: int) -> torch.Tensor:
    """As a language model's logits: they fall with the logarithm of the rank; through 0."""
    return 4.0 - 1.5 * torch.arange(1, vocab + 1).float().log()


def two_values(vocab: int) -> torch.Tensor:
    """Neighbours among floats."""
    row = torch.full((vocab,), 1.0)
    row[::3] = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
    return row


def around_zero(vocab: int) -> torch.Tensor:
    """The float before 0.0 and it: their middle rounds to 0.0, and -0.0, between them as bits,
    equals it.
    """
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
        ((0, 0.49, 0.0), 0.5),
        ((0, 0.51, 0.0), 0.25),
        ((0, 0.76, 0.0), 0.0625),
        ((0, 0.9, 0.0), 0.0625),
        ((3, 1.0, 0.0), 0.0625),
        ((2, 1.0, 0.0), 0.25),
        ((2, 0.65, 0.0), 0.5),
        ((2, 0.68, 0.0), 0.25),
        # Of the four that tie one counts to the three kept: 0.5 and 0.25 of 0.8125 are 0.923.
        ((3, 0.93, 0.0), 0.0625),
        ((3, 0.91, 0.0), 0.25),
        ((3, 0.99, 0.3), 0.15),
    ]
    logits = row.expand(len(asked), -1).clone().to(device)
    ones = torch.ones(len(asked), device=device)
    found = find(way)(logits, ones, settings([item for item, _ in asked], 1.0, 6, device))
    assert found.exp().tolist() == pytest.approx([least for _, least in asked])


@on_every_way
def test_a_row_without_any_token_and_one_beside_it(way: str, device: str) -> None:
    logits = torch.stack([forbidden(300), torch.arange(300).float()])
    asked: list[Asked | None] = [(5, 0.9, 0.1), (5, 1.0, 0.0)]
    found = find(way)(
        logits.to(device), torch.ones(2, device=device), settings(asked, 1.0, 300, device)
    )
    assert found.tolist() == [float("-inf"), 295.0]


@on_every_way
def test_a_row_alone_has_the_same_bits(way: str, device: str) -> None:
    logits = random_logits(len(MIXED), 9001, 3.0, 5, torch.bfloat16).to(device)
    inverse = torch.linspace(0.5, 2.0, len(MIXED)).to(device)
    together = find(way)(logits, inverse, settings(list(MIXED), 1.0, 9001, device))
    for row, item in enumerate(MIXED):
        if item is None:
            continue
        alone = find(way)(
            logits[row : row + 1], inverse[row : row + 1], settings([item], 1.0, 9001, device)
        )
        assert (
            alone.view(torch.int32).tolist() == together[row : row + 1].view(torch.int32).tolist()
        )


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
    make: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused_threshold = pytest.importorskip("zlab.engine.sampling.triton_ops")
    one_pass, passes = fused_threshold._above, []

    def counted(*arguments: object) -> object:
        passes.append(arguments)
        return one_pass(*arguments)

    monkeypatch.setattr(fused_threshold, "_above", counted)
    for asked in (
        (0, 0.95, 0.0),
        (30, 1.0, 0.0),
        (290, 1.0, 0.0),
        (500, 1.0, 0.0),
        (0, 0.999999, 0.0),
    ):
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
    """176 rows of Qwen3's vocabulary at temperature 0.8: both ways right, and equal but where
    several are right.
    """
    logits = random_logits(176, 151_936, scale, 9, dtype)
    asked: list[Asked | None] = [
        (0, 0.95, 0.0) if row % 4 else MIXED[row // 4 % len(MIXED)] for row in range(176)
    ]
    found, open_rows = check("triton", "cuda", logits, asked, 0.8)
    expected, _ = check("torch", "cuda", logits, asked, 0.8)
    assert int((found != expected).sum()) <= open_rows
