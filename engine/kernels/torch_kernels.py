"""The plain-torch set of kernels: runs on any device, and is the oracle on the GPU."""

from engine.kernels.torch_attention import decode_attention, plan_decodes, prefill_attention, store
from engine.kernels.torch_compaction import compact, select
from engine.kernels.torch_scores import (
    attention_score,
    combine,
    full_redundancy,
    lightning_redundancy,
    random_score,
)

__all__ = [
    "attention_score",
    "combine",
    "compact",
    "decode_attention",
    "full_redundancy",
    "lightning_redundancy",
    "plan_decodes",
    "prefill_attention",
    "random_score",
    "select",
    "store",
]
