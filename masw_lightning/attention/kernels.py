"""One signature over the fused attention kernels that also return the log-sum-exp (LSE), and their backward.

On the CPU this is PyTorch's flash kernel (float64, float32, bfloat16; grouped heads without repeating KV). Elsewhere it
is the plain matrix form, correct on any device but with ``T x S`` memory; **not run on a GPU yet**. Nothing here knows
layouts, adapters or caches.
Shapes: B batch, T queries, S keys, H query heads, G KV heads (H is a multiple of G), D head dim.
"""

import torch
from torch import Tensor

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with LSE.

    Args:
        q: ``[B,H,T,D]``.  k, v: ``[B,G,S,D]``.
        causal: query ``t`` sees keys ``0..t`` (aligned top-left; use it with ``T == S``).
        bias: ``[T,S]``, ``q``'s dtype, 0 where a query may look and ``-inf`` elsewhere. Every query must see a key.

    Returns:
        output ``[B,H,T,D]`` in ``q``'s dtype, LSE ``[B,H,T]`` in at least float32. No autograd: see ``structured``.
    """
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    scores = _scores(q, k, scale, causal, bias)
    lse = scores.logsumexp(-1)
    return _rows(_grouped(scores.softmax(-1), k) @ _compute(v), q).to(q.dtype), lse


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
    grad_, out_ = _compute(grad), _compute(out)
    weights = (_scores(q, k, scale, causal, bias) - lse.unsqueeze(-1)).exp()
    delta = (grad_ * out_).sum(-1, keepdim=True)
    d_weights = _rows(_grouped(grad_, k) @ _compute(v).transpose(-1, -2), q)
    d_scores = weights * (d_weights - delta) * scale
    dq = _rows(_grouped(d_scores, k) @ _compute(k), q)
    dk = _grouped(d_scores, k).transpose(-1, -2) @ _grouped(_compute(q), k)
    dv = _grouped(weights, k).transpose(-1, -2) @ _grouped(grad_, k)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[B,H,T,X] -> [B,G,(H/G)T,X]``: the query heads of a KV head become rows of one matrix."""
    b, h, t, x_dim = x.shape
    return x.reshape(b, k.shape[1], (h // k.shape[1]) * t, x_dim)


def _rows(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of ``_grouped``."""
    return x.reshape(q.shape[0], q.shape[1], q.shape[2], x.shape[-1])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, bias: Tensor | None) -> Tensor:
    scores = _rows(_grouped(_compute(q), k) @ _compute(k).transpose(-1, -2), q) * scale
    if causal:
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores if bias is None else scores + bias
