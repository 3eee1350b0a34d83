"""The Triton set of kernels: for CUDA, and for the CPU if `TRITON_INTERPRET=1` was set before triton's import."""

from engine.kernels.triton_compaction import compact
from engine.kernels.triton_decode import decode_attention, plan_decodes
from engine.kernels.triton_lightning import lightning_redundancy
from engine.kernels.triton_prefill import prefill_attention
from engine.kernels.triton_redundancy import full_redundancy
from engine.kernels.triton_scores import attention_score
from engine.kernels.triton_select import combine, random_score, select
from engine.kernels.triton_store import store

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
