"""Integer hashing behind the `random` scorer: the same bits on the host, in torch and in Triton."""

LAYER_STEP = 0x9E3779B9
TOKEN_STEP = 0x85EBCA6B
MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # of a 32-bit finaliser with low bias (C. Wellons' search, `lowbias32`)


def mix(state: int) -> int:
    """A 32-bit finaliser: every bit of the input reaches every bit of the output."""
    state &= MASK_32
    state ^= state >> 16
    state = state * MULTIPLIERS[0] & MASK_32
    state ^= state >> 15
    state = state * MULTIPLIERS[1] & MASK_32
    return state ^ state >> 16


def seed_of(*parts: int) -> int:
    """One signed 32-bit seed from several numbers, in order."""
    state = 0
    for part in parts:
        state = mix(mix(state) + part)
    return state - (1 << 32) if state >= 1 << 31 else state
