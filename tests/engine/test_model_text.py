"""Text that grows token by token, and the strings and tokens that end it."""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from engine.errors import ModelError
from engine.loading import BUNDLED_PACKAGE, bundled_gguf
from engine.sampling_params import SamplingParams
from engine.stopping import Output
from engine.tokenizer import REPLACEMENT, GrowingText, Tokenizer

TEXT = "Zürich und 東京, naïve 👩‍🚀 emoji\n\n  two  spaces\tand a tab — done. \u200b"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII is cut; and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")  # type: ignore[no-untyped-call]
    )


@pytest.fixture(scope="module")
def by_byte() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if find_spec(BUNDLED_PACKAGE) is None:
        pytest.skip(f"{BUNDLED_PACKAGE} is not installed")
    return Tokenizer.from_gguf(bundled_gguf())


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    text = GrowingText(tokenizer, skip_special_tokens=skip)
    return [*(text.push(token) for token in token_ids), text.finish()]


def test_no_character_is_cut(by_byte: Tokenizer) -> None:
    ids = by_byte.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    pieces = pieces_of(by_byte, ids)
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert [piece for piece in pieces if piece][:4] == ["Z", "ü", "r", "i"]


def test_bytes_that_are_no_character_come_out_in_the_end(by_byte: Tokenizer) -> None:
    ids = by_byte.encode("a東b")
    for broken in (ids[:2], ids[:3], [*ids[:2], ids[4]], [ids[0], *[ids[2]] * 30, ids[4]]):
        pieces = pieces_of(by_byte, broken)
        assert "".join(pieces) == by_byte.decode(broken)
        assert REPLACEMENT in "".join(pieces)
    # Not everything waits for the end: what can never become a character is given up on.
    assert "b" in "".join(pieces_of(by_byte, [*[ids[2]] * 30, ids[4]])[:-1])


def test_pieces_add_up_to_the_whole_for_a_real_tokenizer(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(TEXT)
    assert "".join(pieces_of(smollm2, ids)) == TEXT
    draw = random.Random(1)
    for _ in range(30):  # any tokens, as a random model draws them; special ones among them
        ids = [draw.randrange(49_152 if draw.random() < 0.9 else 17) for _ in range(25)]
        for skip in (True, False):
            whole = smollm2.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces_of(smollm2, ids, skip=skip)) == whole


def test_decoding_is_that_of_transformers(smollm2: Tokenizer, by_byte: Tokenizer) -> None:
    """The shorter way to it, special tokens and broken characters included."""
    draw = random.Random(2)
    for tokenizer, most in ((smollm2, 49_152), (by_byte, 257)):
        assert tokenizer._backend is not None
        for _ in range(100):
            ids = [draw.randrange(17 if draw.random() < 0.1 else most) for _ in range(draw.randrange(6))]
            for skip in (True, False):
                wanted = tokenizer._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == wanted


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(by_byte: Tokenizer) -> None:
    class Loud(transformers.PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **more: Any) -> str:
            return super()._decode(*given, **more).upper()

    loud = Tokenizer(Loud(tokenizer_object=by_byte._tokenizer.backend_tokenizer))  # type: ignore[no-untyped-call]
    assert loud.decode(by_byte.encode("quiet")) == "QUIET"


def test_chat_follows_the_models_own_template(smollm2: Tokenizer, by_byte: Tokenizer) -> None:
    ids = smollm2.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.decode(ids, skip_special_tokens=False) == expected
    assert ids == smollm2.encode(expected)
    with pytest.raises(ModelError, match="no chat template"):
        by_byte.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ModelError, match="the chat template refuses the messages"):
        smollm2.chat([{"role": "user"}])


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer that can be read"):
        Tokenizer.from_folder(tmp_path)


def run(params: SamplingParams, text: str, tokenizer: Tokenizer, eos: tuple[int, ...] = ()) -> tuple[str, object, int]:
    """What is given out, the reason of the stop (None: it did not stop), and how many tokens were taken."""
    output = Output(params, eos, tokenizer)
    given = ""
    for token in tokenizer.encode(text):
        piece = output.push(token)
        given += piece.text
        if piece.stopped:
            return given, piece.stop_reason, len(output.token_ids)
        for stop in params.stop_strings:
            assert stop not in given
    return given + output.finish(), None, len(output.token_ids)


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("END",), "one END two", ("one ", "END", 7)),
        (("END",), "one ENE END", ("one ENE ", "END", 11)),
        (("END",), "one EN", ("one EN", None, 6)),
        (("aab",), "aaaab", ("aa", "aab", 5)),
        (("b", "ab"), "xab", ("x", "ab", 3)),  # of two that end together, the one that begins first
        (("é",), "caf" + "é!", ("caf", "é", 5)),
        ((), "all", ("all", None, 3)),
    ],
)
def test_stop_strings(stop: tuple[str, ...], text: str, expected: tuple[str, object, int], by_byte: Tokenizer) -> None:
    assert run(SamplingParams(stop=stop), text, by_byte) == expected


def test_a_stop_string_can_be_kept(by_byte: Tokenizer) -> None:
    params = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    assert run(params, "one END two", by_byte) == ("one END", "END", 7)


def test_tokens_that_stop(by_byte: Tokenizer) -> None:
    x, y = by_byte.encode("xy")
    assert run(SamplingParams(), "abxc", by_byte, (y, x)) == ("ab", None, 3)
    assert run(SamplingParams(stop="bz"), "abxc", by_byte, (x,)) == ("ab", None, 3)  # what was held comes out
    assert run(SamplingParams(ignore_eos=True), "abxc", by_byte, (x,)) == ("abxc", None, 4)
    assert run(SamplingParams(ignore_eos=True, stop_token_ids=[x]), "abxc", by_byte, (x,)) == ("ab", x, 3)
    output = Output(SamplingParams(stop_token_ids=[7]), (9,), None)  # token ids only
    assert [output.push(token).stopped for token in (1, 2, 7)] == [False, False, True]
    assert Output(SamplingParams(), (9,), None).push(9).stopped
