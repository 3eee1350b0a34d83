"""R-KV: attention against redundancy (arXiv 2505.24133).

A token whose key is like many others is worth less; the newest of a group of like keys is spared.
All pairs of keys are compared, so this is slow, and the yardstick of the faster rules.
"""

from zlab.engine.scorers.interface import AttentionScorer


class RKV(AttentionScorer):
    """Attention of the window against redundancy over the whole sequence."""
