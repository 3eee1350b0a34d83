"""A process that records traffic until it is killed: `python -m tests.engine.server.live_process
FOLDER`.

It leaves transformers out, which takes long to load.
"""

import random
import sys
from pathlib import Path

import torch

from tests.engine.server.server_cases import play
from zlab.engine import recorder
from zlab.engine.engine import EngineSettings
from zlab.engine.server.context import open_context
from zlab.engine.server.traffic_recorder import LiveRecording
from zlab.traces.workload import TraceRequest

torch.set_num_threads(1)
BLOCK = 8
SETTINGS = EngineSettings(
    model="dummy:tiny",
    policy="hybrid:tokens=40,window=4",
    num_blocks=20,
    block_size=BLOCK,
    max_batched_tokens=64,
    max_running=16,
    max_model_len=400,
    device="cpu",
)


def load(batch: int) -> list[TraceRequest]:
    """Twelve requests, some of which begin alike."""
    rng = random.Random(batch % 5)
    found = []
    for place in range(12):
        prompt = (
            *range(3 * BLOCK * (place % 2)),
            *(rng.randrange(50) for _ in range(3 + rng.randrange(30))),
        )
        found.append(
            TraceRequest(
                f"{batch}-{place}", len(prompt), max_tokens=1 + rng.randrange(60), prompt_ids=prompt
            )
        )
    return found


def serve(folder: Path) -> None:
    """Requests for ever, a batch after the other, with a checkpoint every few steps."""
    recorder.CHECKPOINT_EVERY_S = 0.02
    served = open_context(SETTINGS, observers=[LiveRecording(folder, BLOCK)])
    batch = 0
    while True:
        play(served, load(batch), cancelled=lambda id: id.endswith("-4"))
        batch += 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
