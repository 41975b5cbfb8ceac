"""The CUDA kernels' calls and shapes with fake tensors, and the check before their first use with real numbers.

What they compute on a GPU is tested in `tests/test_gpu.py`.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from masw_lightning import MemoryLayout
from masw_lightning.attention import flash_cuda, kernels
from masw_lightning.attention.structured import make_plan, structured_attention


@pytest.fixture
def twin(monkeypatch):
    """The CPU's flash kernels in place of CUDA's, with the same arguments."""
    aten = torch.ops.aten

    def forward(q, k, v, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), None

    def backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        assert (cum_q, cum_k, max_q, max_k, dropout) == (None, None, q.shape[2], k.shape[2], 0.0)
        assert lse.is_contiguous() and grad.stride(-1) == 1
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )

    monkeypatch.setattr(flash_cuda, "_forward", forward)
    monkeypatch.setattr(flash_cuda, "_backward", backward)
    flash_cuda.trusted.cache_clear()
    yield
    flash_cuda.trusted.cache_clear()


def test_kernels_that_agree_are_trusted(twin):
    assert flash_cuda.trusted(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("wrong", ["out", "lse", "gradient", "missing"])
def test_others_are_not_and_a_warning_says_why(twin, wrong, monkeypatch):
    forward, backward = flash_cuda._forward, flash_cuda._backward

    def bad_forward(*given, scale):
        if wrong == "missing":
            raise NotImplementedError("no kernel here\nand more")
        out, lse, rest = forward(*given, scale=scale)
        return (out.flip(2) if wrong == "out" else out), (lse + 1 if wrong == "lse" else lse), rest

    def bad_backward(*given, scale):
        dq, dk, dv = backward(*given, scale=scale)
        return dq, dk * (2 if wrong == "gradient" else 1), dv

    monkeypatch.setattr(flash_cuda, "_forward", bad_forward)
    monkeypatch.setattr(flash_cuda, "_backward", bad_backward)
    with pytest.warns(UserWarning, match="no kernel here$" if wrong == "missing" else "FlashAttention is not used"):
        assert not flash_cuda.trusted(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("writer", ["slot", "token"])
def test_attention_through_the_memory_is_the_same_through_them(twin, writer, monkeypatch):
    layout, n = MemoryLayout(5, 16, 4), 133
    m = layout.num_slots(n)
    g = torch.Generator().manual_seed(3)
    shapes = [(6, n + (m if writer == "slot" else 0)), (2, n), (2, n), (2, m), (2, m)]
    inputs = [torch.randn(2, h, t, 8, generator=g).requires_grad_() for h, t in shapes]
    plan = make_plan(layout, writer, n, torch.float32, torch.device("cpu"))
    found, called = [], []
    for flash in (False, True):
        if flash:
            monkeypatch.setattr(kernels, "takes", lambda q, k, bias: bias is None and not called.append(q.shape))
            monkeypatch.setattr(kernels, "trusted", lambda device, dtype: True)
        out = structured_attention(plan, *inputs, 0.3)
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    assert called
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_calls_have_the_operators_form():
    """What the twin cannot see: PyTorch's own operators accept the arguments and return these shapes."""
    with FakeTensorMode():
        q, k = (torch.empty(2, h, 40, 64, device="cuda", dtype=torch.bfloat16) for h in (6, 2))
        out, lse = flash_cuda.flash_attend(q, k, k, scale=0.1, causal=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
        grads = flash_cuda.flash_attend_backward(out, q, k, k, out, lse, scale=0.1, causal=True)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_only_calls_that_they_are_made_for():
    def q(heads=4, dtype=torch.bfloat16, width=64, batch=1, device="cuda"):
        return torch.empty(batch, heads, 7, width, dtype=dtype, device=device)

    with FakeTensorMode():
        k, one, bias = q(2), torch.empty(1, 2, 1, 64, device="cuda"), torch.empty(7, 7, device="cuda")
        assert flash_cuda.takes(q(), k, None)
        assert not flash_cuda.takes(q(), k, bias)
        assert not flash_cuda.takes(q(), one, None)
        others = [q(dtype=torch.float32), q(width=60), q(width=512), q(batch=70_000), q(device="cpu")]
        assert not any(flash_cuda.takes(x, k, None) for x in others)
