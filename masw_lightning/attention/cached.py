"""Attention of a few new tokens over a preallocated cache.

The query heads that share a KV head, and the new tokens, become rows of one matrix per KV head, so keys are read once
and never repeated. On the CPU the cells of one sequence are cut into parts, as many as keep all cores busy however few
KV heads there are, read in one kernel call and merged by log-sum-exp. On other devices, whose fused kernels take no
mask, a long run of first cells that every row sees is read apart from the rest (**not run on a GPU yet**). Knows no
cache layout: the caller says which cells are visible.
Shapes: B batch, T new rows, S cells, H query heads, G KV heads, D head dim, N parts of C cells.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from masw_lightning.attention.kernels import attend

FEWEST = 1024  # cells of a part, at least: below, the merge costs more than an idle core
FREE = 512  # cells that every row sees, at least, to be read apart from the rest on other devices than the CPU
MASKED = -1e30  # finite: a row may see nothing of a part, which then weighs nothing


@dataclass(frozen=True)
class Reading:
    """How the layers of one forward read their cells, and who sees which: made by ``plan_reading``.

    Args:
        parts: N.  size: C, cells of a part.  step: from the start of a part to the next; parts may overlap by a few
            cells, which ``bias`` hides from the later one.
        bias: additive mask ``[N, 1, HT/G, C]``, or ``[B or 1, 1, HT/G, S - free]`` in one part; ``None``: all is
            visible.
        free: first cells, seen by every row, that are read apart from the rest; in one part only.
    """

    parts: int
    size: int
    step: int
    bias: Tensor | None
    free: int = 0


def plan_reading(keep: Tensor | None, cells: int, q: Tensor, kv_heads: int) -> Reading:
    """Cut ``cells`` for queries like ``q [B,H,T,D]``; the layers whose cells and ``q``'s shape agree share the result.

    Args:
        keep: bool ``[B or 1, T, S]``, True = may look; ``None``: every row sees every cell.
    """
    n = _parts(q, cells, kv_heads)
    size = -(-cells // n)
    while n > 1 and (cells - size) % (n - 1):
        size += 1
    step = (cells - size) // (n - 1) if n > 1 else size
    if keep is None and n * size == cells:
        return Reading(n, size, step, None)
    seen = torch.ones(1, q.shape[2], cells, dtype=torch.bool) if keep is None else keep
    free = 0 if q.device.type == "cpu" else free_cells(seen)  # the CPU's kernel takes masks
    seen = seen[..., free:]
    if n > 1:
        seen = seen[0].unfold(-1, size, step).transpose(0, 1).clone()  # [N,T,C]
        seen[1:, :, : size - step] = False
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, MASKED)
    return Reading(n, size, step, bias.repeat(1, q.shape[1] // kv_heads, 1)[:, None].to(q.device), free)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, reading: Reading, scale: float) -> Tensor:
    """``q [B,H,T,D]`` over cells ``k, v [B,G,S,D]``; ``-> [B,H,T,D]``."""
    b, h, t, d = q.shape
    rows = q.reshape(b, k.shape[1], h // k.shape[1] * t, d)
    if reading.parts == 1:
        rest = (x[:, :, reading.free :] for x in (k, v)) if reading.free else (k, v)
        out, lse = attend(rows, *rest, scale=scale, bias=reading.bias)
        if reading.free:
            more, more_lse = attend(rows, *(x[:, :, : reading.free] for x in (k, v)), scale=scale)
            weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)
            out = torch.lerp(out.to(lse.dtype), more.to(lse.dtype), weight).to(q.dtype)
        return out.reshape(b, h, t, d)
    cut = (x[0].unfold(1, reading.size, reading.step).permute(1, 0, 3, 2) for x in (k, v))  # views [N,G,C,D]
    out, lse = attend(rows.expand(reading.parts, -1, -1, -1), *cut, scale=scale, bias=reading.bias)
    return (out * lse.softmax(0).unsqueeze(-1)).sum(0).to(q.dtype).reshape(b, h, t, d)


def _parts(q: Tensor, cells: int, kv_heads: int) -> int:
    """N: on the CPU the fewest that share out evenly, KV heads times parts over threads, if there are cells enough."""
    if q.device.type != "cpu" or q.shape[0] > 1:
        return 1
    threads = torch.get_num_threads()
    return max(1, min(threads // gcd(threads, kv_heads), cells // FEWEST))


def free_cells(seen: Tensor) -> int:
    """Leading cells that every row sees, of ``seen [B,T,S]``; 0 where they are few, or all."""
    first = int(seen.flatten(0, 1).all(0).cumprod(0).sum())
    return first if FREE <= first < seen.shape[-1] else 0
