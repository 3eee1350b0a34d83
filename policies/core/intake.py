"""At the door: what the outside world asks for becomes a request, or is refused with the numbers."""

from policies.core.errors import ConfigError
from policies.core.events import Kind, Reason
from policies.core.limits import Limits
from policies.core.prefix import PromptContent
from policies.core.request import Request
from policies.core.state import State
from traces.workload import TraceRequest


def make_request(
    asked: TraceRequest, number: int, arrival_ns: int, limits: Limits, prefix_block_size: int | None
) -> Request:
    """The scheduler's view of a request. Raises ConfigError when its prefix ids do not fit the pool's block size."""
    if asked.prefix_ids:
        size = prefix_block_size or 0
        if not size or (size % limits.block_size and limits.block_size % size):
            raise ConfigError(
                f"a block of {limits.block_size} tokens and a prefix id of the workload, {size}, do not "
                "divide one another"
            )
    content = PromptContent(
        asked.prompt_tokens, limits.block_size, asked.prompt_ids, asked.prefix_ids, prefix_block_size
    )
    return Request(
        number=number,
        id=asked.id,
        arrival_ns=arrival_ns,
        prompt_tokens=asked.prompt_tokens,
        max_tokens=asked.max_tokens,
        forced_output_tokens=asked.output_tokens,
        content=content,
        session=asked.session,
        cls=asked.cls,
        priority=asked.priority,
    )


def admissible(state: State, request: Request, asked: TraceRequest) -> tuple[Reason, str] | None:
    """None if the request can be served alone in this pool, else why it never can; sets its `target_tokens`.

    Asked for more output than the model has positions for, it is served up to there and ends with reason length. A
    request that leaves its length open gets as much as model and pool hold.
    """
    limits = state.limits
    if request.prompt_tokens < 1:
        return Reason.EMPTY_PROMPT, f"the prompt has {request.prompt_tokens} tokens, at least 1 is needed"
    for name, value in (("max_tokens", asked.max_tokens), ("output_tokens", asked.output_tokens)):
        if value is not None and value < 0:
            return Reason.BAD_MAX_TOKENS, f"{name} must be 0 or more, not {value}"
    room = limits.max_model_len - request.prompt_tokens
    if room < 1:
        return Reason.TOO_LONG, (
            f"the prompt has {request.prompt_tokens} tokens; with at least one of output the model's limit is "
            f"{limits.max_model_len}"
        )
    wanted = request.wanted_tokens
    request.target_tokens = room if wanted is None else min(wanted, room)
    if state.peak_blocks(request) > limits.num_blocks and wanted is None and state.floor is None:
        request.target_tokens = max(1, limits.num_blocks * limits.block_size - request.prompt_tokens + 1)
    need = state.peak_blocks(request)
    if need > limits.num_blocks:
        return Reason.NEVER_FITS, (
            f"it needs {need} blocks of {limits.block_size} tokens at its largest ({request.prompt_tokens} prompt and "
            f"{request.target_tokens} output tokens), the pool has {limits.num_blocks}"
        )
    if wanted is None or request.target_tokens < wanted:
        state.journal.emit(Kind.CAPPED, request.number, request.target_tokens)
        if wanted is not None:
            request.message = (
                f"output capped at {request.target_tokens} of {wanted} tokens by the limit {limits.max_model_len}"
            )
    return None
