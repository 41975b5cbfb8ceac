"""Attention of a few new tokens over a preallocated cache.

The query heads that share a KV head, and the new tokens, become rows of one matrix per KV head, so keys are read once
and never repeated. Knows no cache layout: the caller's bias says which cells are visible.
Shapes: B batch, T new rows, S cells, H query heads, G KV heads, D head dim.
"""

from torch import Tensor

from masw_lightning.attention.kernels import attend


def attend_cached(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """``q [B,H,T,D]`` over cells ``k, v [B,G,S,D]``; ``-> [B,H,T,D]``.

    Args:
        bias: additive mask ``[B or 1, 1, T, S]`` in ``q``'s dtype, or ``None`` when every cell is visible to every row.
    """
    b, h, t, d = q.shape
    group = h // k.shape[1]
    rows = q.reshape(b, k.shape[1], group * t, d)
    if bias is not None:
        bias = bias[:, :, None].expand(-1, -1, group, -1, -1).reshape(bias.shape[0], 1, group * t, -1)
    return attend(rows, k, v, scale=scale, bias=bias)[0].reshape(b, h, t, d)
