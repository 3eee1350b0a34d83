"""From a prompt and sampling parameters to a sequence in the loop: the door that every caller of the engine uses."""

from collections.abc import Callable
from collections.abc import Sequence as Items

from engine.build import Engine
from engine.errors import EngineError
from engine.loop import Sequence
from engine.sampling_params import SamplingParams
from engine.stopping import Output, Piece
from traces.workload import TraceRequest


def submit(
    engine: Engine,
    asked: TraceRequest,
    prompt_ids: Items[int],
    params: SamplingParams,
    *,
    copy: int = 0,
    with_text: bool = True,
    on_piece: Callable[[Piece], None] | None = None,
    arrival_ns: int | None = None,
) -> Sequence:
    """Hand one output of one request to the engine.

    `asked` says what the scheduler is told (its length limits count, not `params.max_tokens`); an output of forced
    length never stops earlier. `copy` is which of `params.n` outputs this is; without `with_text` (and stop strings)
    tokens are not turned into text. A request that can never be served comes back closed, refused, with the reason in
    `request.message`.
    """
    eos = engine.loaded.eos_token_ids
    may_stop = bool((eos and not params.ignore_eos) or params.stop_token_ids or params.stop_strings)
    if asked.output_tokens is not None and may_stop:
        raise EngineError(
            f"request {asked.id!r} has a forced output length; its parameters must have nothing to stop it"
        )
    tokenizer = engine.loaded.tokenizer
    if params.stop_strings and tokenizer is None:
        raise EngineError(
            f"stop strings {list(params.stop_strings)} need a tokenizer, and model {engine.loaded.config.name!r} has "
            "none; stop_token_ids work"
        )
    output = Output(params, eos, tokenizer if with_text or params.stop_strings else None)
    return engine.loop.submit(
        asked, list(prompt_ids), params, output, may_stop=may_stop, copy=copy, on_piece=on_piece, arrival_ns=arrival_ns
    )


def plain_request(id: str, prompt_ids: Items[int], params: SamplingParams) -> TraceRequest:
    """What the scheduler is told of a request that came without a trace."""
    return TraceRequest(
        id=id, prompt_tokens=len(prompt_ids), max_tokens=params.max_tokens, prompt_ids=tuple(prompt_ids)
    )


def check_token_ids(prompt_ids: Items[int], vocab_size: int) -> list[int]:
    """The prompt as a list; raises EngineError for what is no token of the model."""
    for place, token in enumerate(prompt_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise EngineError(f"prompt token {place} is {token!r}, not a token id in 0..{vocab_size - 1}")
    return list(prompt_ids)
