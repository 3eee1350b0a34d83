"""Rotary position embedding: how fast each pair of a head turns, and the table of its cosines and sines."""

import math

import torch

from engine.config import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of every pair, `[head_dim / 2]` float32.

    `llama3` (Llama 3.1's rule): pairs that turn at least `high_freq_factor` times within the original context stay,
    those that turn at most `low_freq_factor` times are slowed by `factor`, between them it is interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * plain / (2 * math.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1.0 - share) * plain / rope.factor + share * plain
    return plain


def rotation_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """`[num_positions, head_dim]` float32 on `device`: the cosines of all pairs, then their sines."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies(rope, head_dim).to(device)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
