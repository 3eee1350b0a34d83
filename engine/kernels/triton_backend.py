"""The Triton set of kernels: for CUDA, and for the CPU if `TRITON_INTERPRET=1` was set before
triton's import.
"""

from zlab.engine.kernels.triton_decode import decode_attention, plan_decodes
from zlab.engine.kernels.triton_distinct import distinct_score
from zlab.engine.kernels.triton_prefill import prefill_attention, store
from zlab.engine.kernels.triton_scores import attention_score, full_redundancy, lightning_redundancy
from zlab.engine.kernels.triton_select import combine, compact, random_score, select

__all__ = [
    "attention_score",
    "combine",
    "compact",
    "decode_attention",
    "distinct_score",
    "full_redundancy",
    "lightning_redundancy",
    "plan_decodes",
    "prefill_attention",
    "random_score",
    "select",
    "store",
]
