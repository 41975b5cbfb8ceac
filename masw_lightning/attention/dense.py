"""Attention by its definition: one matrix of scores, one mask, one softmax. The reference for every faster form.

Small sizes only: it materialises ``T x S`` scores. It knows no layout, adapter or cache.
Shapes: B batch, T queries, S keys, H query heads, G KV heads (H is a multiple of G), D head dim.
"""

import torch
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``q [B,H,T,D]`` over ``k, v [B,G,S,D]``.

    Args:
        mask: bool, broadcastable to ``[B,H,T,S]``, True = may look; ``None`` = everything.
        scale: factor on the scores.

    Returns:
        output ``[B,H,T,D]`` and log-sum-exp of the scores ``[B,H,T]`` (at least float32).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(compute) @ k.to(compute).transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores.softmax(-1) @ v.to(compute)).to(q.dtype), lse
