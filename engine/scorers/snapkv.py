"""SnapKV: what the latest queries attend to (arXiv 2404.14469).

The attention of the window's queries: the maximum over a group's query heads, the mean over the
window, pooled over neighbours at a first compression. SnapKV compresses a prompt once; here the
same rule is applied whenever a request is compressed.
"""

from zlab.engine.scorers.interface import AttentionScorer


class SnapKV(AttentionScorer):
    """Attention of the window alone."""
