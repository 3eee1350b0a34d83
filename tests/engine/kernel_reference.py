"""What every stage means, in float64 and in the words of the design page; slow, and written to be
read.

One request and one layer at a time. `num_kv_heads` is H, `group` is G = query heads per KV head,
`w` the window, `S` the tokens taking part in cache order (block table order, then slot). Query head
`h * G + j` belongs to KV head `h`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Int = NDArray[np.int64]

SMALLEST_NORM = 1e-6  # a key shorter than this is divided by it instead of by its length


def gather_cache_order(cache: Float, block_table: list[int]) -> Float:
    """`cache [blocks, b, H, ...]` of one layer -> `[H, S, ...]` in cache order."""
    rows = np.asarray(cache, dtype=np.float64)[block_table]
    rows = rows.reshape(-1, *rows.shape[2:])
    ordered: Float = np.moveaxis(rows, 1, 0)
    return ordered


def softmax(values: Float) -> Float:
    """Over the last axis."""
    exponentials = np.exp(values - values.max(axis=-1, keepdims=True))
    result: Float = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def causal_weights(queries: Float, keys: Float) -> Float:
    """Softmax weights `[H, G, n, S]` of `queries [n, H * G, d]` that stand at the last n of the S
    `keys [H, S, d]`.
    """
    num_queries, num_query_heads, head_dim = queries.shape
    num_kv_heads, num_tokens, _ = keys.shape
    grouped = queries.reshape(num_queries, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    logits = np.einsum("nhjd,htd->hjnt", grouped, keys) / np.sqrt(head_dim)
    place = num_tokens - num_queries + np.arange(num_queries)
    visible = np.arange(num_tokens)[None, :] <= place[:, None]
    return softmax(np.where(visible, logits, -np.inf))


def attention(queries: Float, keys: Float, values: Float) -> Float:
    """Causal attention output `[n, H * G, d]`; a decode step is n = 1, a prefill chunk any n up to
    S.
    """
    weights = causal_weights(queries, keys)
    output: Float = np.einsum("hjnt,htd->nhjd", weights, values)
    return output.reshape(queries.shape)


def window_attention(window_queries: Float, keys: Float) -> Float:
    """`A [H, S]`: softmax, then max over the query heads of a group, then mean over the window; in
    this order.
    """
    result: Float = causal_weights(window_queries, keys).max(axis=1).mean(axis=1)
    return result


def global_score(
    attention_score: Float, prior: Float | None, block_size: int, decay: float
) -> Float:
    """`F [H, S]`; `prior [H, S]` is the stored history, None for a request that was never
    compressed.

    The last block holds only tokens newer than the last compression, so it has no history whatever
    `prior` says there.
    """
    score = attention_score.copy()
    if prior is not None:
        carried = slice(0, attention_score.shape[1] - block_size)
        score[:, carried] = np.maximum(attention_score[:, carried], decay * prior[:, carried])
    return score


def pool(score: Float, size: int) -> Float:
    """Running maximum over `size` neighbours, clipped at the two ends of the sequence."""
    reach = size // 2
    num_tokens = score.shape[1]
    return np.stack(
        [
            score[:, max(0, t - reach) : min(num_tokens, t + reach + 1)].max(axis=1)
            for t in range(num_tokens)
        ],
        axis=1,
    )


def redundancy_logits(keys: Float, segment: int, threshold: float) -> Float:
    """`L [H, S]` inside each run of `segment` tokens: a block for lightning, S for full redundancy.

    In every column of the similarity matrix the last row strictly above the threshold is spared
    (its entry becomes zero); a token's logit is what is left in its row. Negative similarities
    count.
    """
    num_kv_heads, num_tokens, _ = keys.shape
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), SMALLEST_NORM)
    logits = np.zeros((num_kv_heads, num_tokens))
    for head in range(num_kv_heads):
        for start in range(0, num_tokens, segment):
            rows = unit[head, start : start + segment]
            similarity = rows @ rows.T
            np.fill_diagonal(similarity, 0.0)
            for column in range(segment):
                above = np.flatnonzero(similarity[:, column] > threshold)
                if above.size:
                    similarity[above[-1], column] = 0.0
            logits[head, start : start + segment] = similarity.sum(axis=1)
    return logits


def redundancy(logits: Float, temperature: float, segment: int) -> Float:
    """`R [H, S]`: softmax over all S tokens of `L / (T * segment)`."""
    return softmax(logits / (temperature * segment))


def combined_score(pooled: Float, redundant: Float, attention_weight: float) -> Float:
    """`lambda * P - (1 - lambda) * R`."""
    return attention_weight * pooled - (1.0 - attention_weight) * redundant


def unrotated(keys: Float, positions: Int, rotation: Float) -> Float:
    """`keys [H, S, d]` turned back from `positions [H, S]`; a pair is (i, i + d / 2), and
    `rotation [positions, d]` holds the cosines of all pairs, then their sines.
    """
    cosines, sines = np.split(rotation[np.minimum(positions, len(rotation) - 1)], 2, axis=-1)
    first, second = np.split(keys, 2, axis=-1)
    turned = (first * cosines + second * sines, second * cosines - first * sines)
    plain: Float = np.concatenate(turned, axis=-1)
    return plain


def standardised(values: Float, smallest_spread: float = 0.0) -> Float:
    """Distance of `values [H, S]` from their mean over S, in standard deviations."""
    mean = values.mean(axis=-1, keepdims=True)
    spread = values.std(axis=-1, keepdims=True)
    result: Float = (values - mean) / np.maximum(
        np.maximum(spread, smallest_spread * np.abs(mean)), SMALLEST_NORM
    )
    return result


def latest_copies(unit: Float, num_latest: int, rounded: Callable[[Float], Float]) -> Float:
    """The highest cosine of each unit key `[..., S, d]`, less the mean key, with a later one of the
    last `num_latest`, after `rounded`; 0 for the last.
    """
    centred = unit - unit.mean(axis=-2, keepdims=True)
    centred = rounded(centred / np.linalg.norm(centred, axis=-1, keepdims=True))
    found = np.zeros(unit.shape[:-1])
    total = unit.shape[-2]
    for place in range(total - 1):
        later = max(place + 1, total - num_latest)
        similar = np.einsum("...d,...td->...t", centred[..., place, :], centred[..., later:, :])
        found[..., place] = similar.max(axis=-1)
    return found


def likeness(unit: Float) -> Float:
    """Sum of the similarities of each of `unit [H, S, d]` to all of them, itself included: all
    pairs, not the shortcut of the kernels.
    """
    total: Float = (unit @ np.swapaxes(unit, -1, -2)).sum(axis=-1)
    return total


def keep_tokens(score: Float, num_keep: int, window: int, sink: int = 0) -> Bool:
    """Keep flags `[H, S]`: window and sink always, then the highest score, of equal scores the
    later token.
    """
    num_kv_heads, num_tokens = score.shape
    always = np.zeros(num_tokens, dtype=bool)
    always[num_tokens - window :] = True
    always[:sink] = True
    keep = np.zeros(score.shape, dtype=bool)
    for head in range(num_kv_heads):
        order = sorted(
            range(num_tokens), key=lambda t: (always[t], score[head, t], t), reverse=True
        )
        keep[head, order[:num_keep]] = True
    return keep


def kept_rows(rows: Float, keep: Bool) -> Float:
    """`rows [H, S, ...]` and flags -> `[H, k, ...]`: what fills the target blocks, in unchanged
    cache order.
    """
    return np.stack([rows[head][keep[head]] for head in range(rows.shape[0])])
