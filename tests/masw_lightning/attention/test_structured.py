"""The structured form equals the dense definition: outputs and gradients, around every edge."""

import itertools

import pytest
import torch

from masw_lightning.attention.dense import dense_attention
from masw_lightning.attention.structured import make_plan, structured_attention
from masw_lightning.layout import MemoryLayout

SHAPES = [(3, 4, 2), (4, 3, 4), (1, 1, 1), (5, 8, 3), (2, 9, 4), (8, 2, 5), (1, 6, 1), (7, 16, 8)]
CASES = list(itertools.product(["slot", "token"], ["written", "evicted"]))
HEADS, KV_HEADS, DIM, BATCH = 6, 2, 8, 3


def lengths(s: int, w: int, r: int) -> list[int]:
    edges = {1, s - 1, s, s + 1, s + r - 1, s + r, s + r + 1, s + w - 1, s + w, s + w + 1, s + w + r, s + 2 * w}
    edges |= {s + 2 * w + 40 + t for t in range(r + 1)}
    return sorted(n for n in edges if n >= 1)


def both(layout, writer, n, dtype, seed=0, block=None):
    g = torch.Generator().manual_seed(seed)
    m = layout.num_slots(n)
    rows = n + (m if writer == "slot" else 0)
    shapes = [(HEADS, rows), (KV_HEADS, n), (KV_HEADS, n), (KV_HEADS, m), (KV_HEADS, m)]
    inputs = [torch.randn(BATCH, h, t, DIM, generator=g, dtype=dtype).requires_grad_() for h, t in shapes]
    q, k, v, sk, sv = inputs
    grad = torch.randn(q.shape, generator=g, dtype=dtype)
    dense, _ = dense_attention(q, torch.cat((k, sk), 2), torch.cat((v, sv), 2), layout.dense_mask(n, writer), 0.37)
    plan = make_plan(layout, writer, n, dtype, q.device, block=block)
    fast = structured_attention(plan, q, k, v, sk, sv, 0.37)
    grads = [torch.autograd.grad(y, inputs, grad, materialize_grads=True) for y in (dense, fast)]
    return dense, fast, *grads


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("writer", "visibility"), CASES)
def test_equals_dense_forward_and_gradients(shape, writer, visibility):
    s, w, r = shape
    layout = MemoryLayout(s, w, r, visibility=visibility)
    for n in lengths(s, w, r):
        dense, fast, dense_grads, fast_grads = both(layout, writer, n, torch.float64, seed=n)
        torch.testing.assert_close(fast, dense, atol=1e-12, rtol=0)
        for a, b in zip(fast_grads, dense_grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_random_cases_in_float32():
    g = torch.Generator().manual_seed(1)
    for case in range(150):
        s, w, r, n = (int(torch.randint(1, high, (), generator=g)) for high in (12, 20, 9, 120))
        writer = ("slot", "token")[case % 2]
        visibility = ("written", "evicted")[(case // 2) % 2]
        block = (None, 1, 5, 16)[(case // 4) % 4]
        dense, fast, _, _ = both(MemoryLayout(s, w, r, visibility=visibility), writer, n, torch.float32, case, block)
        assert (dense - fast).abs().max() < 1e-5, (s, w, r, n, writer, visibility)


@pytest.mark.parametrize("sink", [0, 4])
def test_window_without_slots(sink):
    layout = MemoryLayout(sink, 6, None)
    for n in (1, 5, 6, 7, 11, 60):
        dense, fast, _, _ = both(layout, "slot", n, torch.float64, seed=n)
        torch.testing.assert_close(fast, dense, atol=1e-12, rtol=0)


def test_nothing_of_size_length_squared_is_made():
    """Peak size of any tensor stays linear in n: 4x the length may not need 16x the largest tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.numel())
            return out

    sizes = []
    for n in (1024, 4096):
        layout = MemoryLayout(16, 16, 4)
        m = layout.num_slots(n)
        q = torch.randn(1, 2, n + m, 8, requires_grad=True)
        k, sk = torch.randn(1, 1, n, 8, requires_grad=True), torch.randn(1, 1, m, 8, requires_grad=True)
        with Largest() as largest:
            plan = make_plan(layout, "slot", n, q.dtype, q.device)
            structured_attention(plan, q, k, k, sk, sk, 0.3).sum().backward()
        sizes.append(largest.size)
    assert sizes[1] <= 4.5 * sizes[0]
