"""Attention of a few new tokens over a preallocated cache.

The query heads that share a KV head, and the new tokens, become rows of one matrix per KV head, so keys are read once
and never repeated. A long run of cells that every row sees is cut into chunks, which keeps all cores busy however few
KV heads there are, and merged by log-sum-exp. Knows no cache layout: the caller says which cells are visible.
Shapes: B batch, T new rows, S cells, H query heads, G KV heads, D head dim, N chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from masw_lightning.attention.kernels import attend

CHUNK = 1024  # cells per chunk, at least
MASKED = -1e30  # finite: a row may see nothing of a part, which then weighs nothing


def worth_splitting(batch: int, cells: int) -> bool:
    """Whether a run of ``cells`` that all rows see should be passed as ``free``: long, and one sequence."""
    return batch == 1 and cells >= 2 * CHUNK


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, free: tuple[int, int] | None = None
) -> Tensor:
    """``q [B,H,T,D]`` over cells ``k, v [B,G,S,D]``; ``-> [B,H,T,D]``.

    Args:
        bias: additive mask ``[B or 1, 1, T, S]`` in ``q``'s dtype, ``MASKED`` where a row may not look; ``None``: every
            row sees every cell.
        free: ``(start, stop)``, cells that every row sees, at least two chunks of them (``worth_splitting``). ``bias``
            then covers the other cells only, ``[1, 1, T, S - (stop - start)]``.
    """
    b, h, t, d = q.shape
    group = h // k.shape[1]
    rows = q.reshape(b, k.shape[1], group * t, d)
    if bias is not None:
        bias = bias[:, :, None].expand(-1, -1, group, -1, -1).reshape(bias.shape[0], 1, group * t, -1)
    if free is None:
        return attend(rows, k, v, scale=scale, bias=bias)[0].reshape(b, h, t, d)
    start, stop = free
    chunks = (stop - start) // CHUNK
    size = (stop - start) // chunks
    end = start + chunks * size  # what is left of the run, fewer cells than there are chunks, joins those behind it
    chunked = (x[0, :, start:end].unflatten(1, (chunks, size)).transpose(0, 1) for x in (k, v))  # views [N,G,.,D]
    parts = [attend(rows.expand(chunks, -1, -1, -1), *chunked, scale=scale)]
    if start:
        before = None if bias is None else bias[..., :start]
        parts.append(attend(rows, k[:, :, :start], v[:, :, :start], scale=scale, bias=before))
    if end < k.shape[2]:
        behind = None if bias is None else F.pad(bias[..., start:], (stop - end, 0))
        parts.append(attend(rows, k[:, :, end:], v[:, :, end:], scale=scale, bias=behind))
    weights = torch.cat([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    merged = (torch.cat([out for out, _ in parts]) * weights).sum(0)
    return merged.to(q.dtype).reshape(b, h, t, d)
