"""Attention with its log-sum-exp (LSE) by matrix products over blocks of queries, and its backward pass.

Right on any device and of bounded memory: the reference for fused kernels, and what stands in where there is none.
Shapes: B batch, T queries, S keys, H query heads, G KV heads (H is a multiple of G), D head dim.
"""

import torch
from torch import Tensor

SCORES = 1 << 27  # most scores held at a time (512 MiB in float32)


def plain_attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``kernels.attend``, a block of queries at a time."""
    outs, lses = [], []
    for start, stop in _blocks(q, k):
        rows, keys = q[:, :, start:stop], k[:, :, : stop if causal else None]
        scores = _scores(rows, keys, scale, causal, bias, start)
        lses.append(scores.logsumexp(-1))
        outs.append(_rows(_grouped(scores.softmax(-1), keys) @ _compute(v[:, :, : keys.shape[2]]), rows).to(q.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``kernels.attend_backward``, a block of queries at a time."""
    dqs, dk, dv = [], torch.zeros_like(_compute(k)), torch.zeros_like(_compute(v))
    for start, stop in _blocks(q, k):
        rows, seen = q[:, :, start:stop], stop if causal else k.shape[2]
        keys, values = _compute(k[:, :, :seen]), _compute(v[:, :, :seen])
        grad_, out_ = _compute(grad[:, :, start:stop]), _compute(out[:, :, start:stop])
        weights = (_scores(rows, keys, scale, causal, bias, start) - lse[:, :, start:stop].unsqueeze(-1)).exp()
        d_weights = _rows(_grouped(grad_, k) @ values.transpose(-1, -2), rows)
        d_scores = weights * (d_weights - (grad_ * out_).sum(-1, keepdim=True)) * scale
        dqs.append(_rows(_grouped(d_scores, k) @ keys, rows).to(q.dtype))
        dk[:, :, :seen] += _grouped(d_scores, k).transpose(-1, -2) @ _grouped(_compute(rows), k)
        dv[:, :, :seen] += _grouped(weights, k).transpose(-1, -2) @ _grouped(grad_, k)
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Ranges of queries whose scores against all keys stay below ``SCORES``."""
    b, h, t, _ = q.shape
    step = max(1, SCORES // max(1, b * h * k.shape[2]))
    return [(start, min(start + step, t)) for start in range(0, t, step)]


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[B,H,T,X] -> [B,G,(H/G)T,X]``: the query heads of a KV head become rows of one matrix."""
    b, h, t, x_dim = x.shape
    return x.reshape(b, k.shape[1], (h // k.shape[1]) * t, x_dim)


def _rows(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of ``_grouped``."""
    return x.reshape(q.shape[0], q.shape[1], q.shape[2], x.shape[-1])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, bias: Tensor | None, start: int) -> Tensor:
    """Masked scores of the queries from ``start`` on."""
    scores = _rows(_grouped(_compute(q), k) @ _compute(k).transpose(-1, -2), q) * scale
    t = q.shape[2]
    if causal:
        last = torch.arange(start, start + t, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > last, float("-inf"))
    return scores if bias is None else scores + bias[..., start : start + t, :]
