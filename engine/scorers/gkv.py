"""G-KV: attention with a memory.

The score of a carried token is the maximum of its attention now and its decayed score of the last
compression.
"""

from zlab.engine.scorers.interface import AttentionScorer


class GKV(AttentionScorer):
    """Attention of the window and of earlier ones."""
