"""PyTorch's own FlashAttention kernels on CUDA, behind the signature of ``kernels.attend``. **Not run on a GPU yet.**

They take 16-bit rows without a mask, and query heads that share KV heads. Before their first use on a device, output,
LSE and gradients are held against the plain form there; where they fail or differ, a warning says so and the plain form
stays. Calls and shapes are tested on the CPU with fake tensors, numbers only where there is a GPU (``tests/test_gpu``).
Shapes as in ``kernels``.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from masw_lightning.attention.plain import plain_attend, plain_attend_backward

MOST_ROWS = 65535  # of a batch: CUDA's limit for a grid's second axis

_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def takes(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether these kernels are made for such a call."""
    return (
        q.device.type == "cuda"
        and bias is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
        and q.shape[0] <= MOST_ROWS
        and k.shape[2] > 1  # a slot row that sees itself alone: a product of many tiny batches
    )


def flash_attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``kernels.attend`` where ``takes`` says yes."""
    out, lse, *_ = _forward(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``kernels.attend_backward`` where ``takes`` says yes: ``out`` and ``lse`` may be those of a joint softmax."""
    seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, ()))  # of dropout: not read
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out))
    lengths = q.shape[2], k.shape[2]
    # The kernel walks the LSE as one block of memory, whatever its strides say.
    return _backward(*rows, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, offset, scale=scale)


@cache
def trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels agree with the plain form on ``device``: tried once, on 4 query heads over 2 KV heads."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, 48, 64, generator=g).to(device, dtype) for h in (4, 2, 2, 4))
    try:
        for causal in (True, False):
            out, lse = flash_attend(q, k, v, scale=0.125, causal=causal)
            expected = plain_attend(q, k, v, scale=0.125, causal=causal)
            joint = grad, q, k, v, out, lse + 0.5  # a part of a joint softmax
            found = (out, lse, *flash_attend_backward(*joint, scale=0.125, causal=causal))
            wanted = (*expected, *plain_attend_backward(*joint, scale=0.125, causal=causal))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a.float(), b.float(), atol=5e-2, rtol=5e-2)
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0]
        warnings.warn(f"FlashAttention is not used on {device}, attention will be slow there: {why}", stacklevel=2)
        return False
    return True
