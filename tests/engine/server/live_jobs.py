"""Jobs played through a worker as API requests would be."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError
from engine.server.house import House
from engine.server.job import Delta, Job, Refusal, Stream
from traces.workload import TraceRequest


@dataclass
class Answer:
    finish_reason: str
    token_ids: list[int]


def play(
    house: House,
    requests: Sequence[TraceRequest],
    cancelled: Callable[[str], bool] = lambda _: False,
    params: SamplingParams | None = None,
) -> dict[str, Answer]:
    """All requests at once; those `cancelled` are called off after their first token. Returns how each ended."""
    chosen = params or SamplingParams(temperature=0.0, ignore_eos=True)

    async def one(asked: TraceRequest) -> Answer:
        stream = Stream(asyncio.get_running_loop())
        assert asked.prompt_ids is not None
        job = Job(
            asked.id, [list(asked.prompt_ids)], chosen, asked.max_tokens, stream, streamed=True, with_text=False,
            session=asked.session,
        )  # fmt: skip
        house.worker.submit(job)
        tokens: list[int] = []
        while True:
            for event in await stream.read():
                if isinstance(event, Refusal):
                    return Answer("refused", [])
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    if event.finish_reason is not None:
                        return Answer(event.finish_reason, tokens)
                    if cancelled(asked.id):
                        house.worker.abort(job, ApiError(499, "called off"))

    async def every() -> list[Answer]:
        return list(await asyncio.gather(*(one(asked) for asked in requests)))

    return dict(zip([asked.id for asked in requests], asyncio.run(every()), strict=True))
