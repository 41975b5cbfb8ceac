"""One signature over the fused attention kernels that also return the log-sum-exp (LSE), and their backward.

On the CPU this is PyTorch's flash kernel (float64, float32, bfloat16; grouped heads without repeating KV). Elsewhere
``plain_attend`` stands in: matrix products over blocks of queries, right on any device and of bounded memory, but
slower than a fused kernel; **not run on a GPU yet**. Nothing here knows layouts, adapters or caches.
Shapes: B batch, T queries, S keys, H query heads, G KV heads (H is a multiple of G), D head dim.
"""

import torch
from torch import Tensor

SCORES = 1 << 27  # most scores that the plain form holds at a time (512 MiB in float32)

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with LSE.

    Args:
        q: ``[B,H,T,D]``.  k, v: ``[B,G,S,D]``.
        causal: query ``t`` sees keys ``0..t`` (aligned top-left; use it with ``T == S``).
        bias: ``[T,S]`` or ``[B or 1,1,T,S]``, ``q``'s dtype, 0 where a query may look and ``-inf`` elsewhere. Every
            query must see a key.

    Returns:
        output ``[B,H,T,D]`` in ``q``'s dtype, LSE ``[B,H,T]`` in at least float32. No autograd: see ``structured``.
    """
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return plain_attend(q, k, v, scale=scale, causal=causal, bias=bias)


def attend_backward(
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
    """Gradients of one part of a joint softmax.

    ``out [B,H,T,D]`` and ``lse [B,H,T]`` are those of the *joint* softmax over all parts: then the parts' ``dq`` add up
    and their ``dk, dv`` are exact, without a gradient through the LSE (flash attention's backward has this form).
    """
    if q.device.type == "cpu":
        return _cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return plain_attend_backward(grad, q, k, v, out, lse, scale=scale, causal=causal, bias=bias)


def plain_attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``attend`` by matrix products, a block of queries at a time."""
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
    """``attend_backward`` by matrix products, a block of queries at a time."""
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
