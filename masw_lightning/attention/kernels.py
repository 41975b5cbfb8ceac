"""One signature over the fused attention kernels that also return the log-sum-exp (LSE), and their backward.

On the CPU this is PyTorch's flash kernel (float64, float32, bfloat16; grouped heads without repeating KV), on CUDA its
FlashAttention for 16-bit rows without a mask (``flash_cuda``). Elsewhere the ``plain`` form stands in: right on any
device, slower than a fused kernel. **Not run on a GPU yet.** Nothing here knows layouts, adapters or caches.
Shapes: B batch, T queries, S keys, H query heads, G KV heads (H is a multiple of G), D head dim.
"""

import torch
from torch import Tensor

from masw_lightning.attention.flash_cuda import flash_attend, flash_attend_backward, takes, trusted
from masw_lightning.attention.plain import plain_attend, plain_attend_backward

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
    if takes(q, k, bias) and trusted(q.device, q.dtype):
        return flash_attend(q, k, v, scale=scale, causal=causal)
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
    if takes(q, k, bias) and trusted(q.device, q.dtype):
        return flash_attend_backward(grad, q, k, v, out, lse, scale=scale, causal=causal)
    if q.device.type == "cpu":
        return _cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return plain_attend_backward(grad, q, k, v, out, lse, scale=scale, causal=causal, bias=bias)
