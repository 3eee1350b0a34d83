"""Zipage: attention with a memory against lightning redundancy (arXiv 2603.08743).

As G-KV and R-KV together, but like keys are looked for inside each block alone.
"""

from zlab.engine.scorers.interface import AttentionScorer


class Zipage(AttentionScorer):
    """Attention of all windows against redundancy inside each block."""
