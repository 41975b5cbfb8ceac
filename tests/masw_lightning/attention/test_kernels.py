"""The form that stands in on other devices equals the fused CPU kernel, forwards and backwards, in blocks."""

import pytest
import torch

from masw_lightning.attention import kernels
from masw_lightning.attention.cached import MASKED, attend_cached
from masw_lightning.attention.dense import dense_attention


@pytest.mark.parametrize("case", ["causal", "bias", "all"])
@pytest.mark.parametrize("scores", [1, 500, 1 << 27])
def test_plain_equals_fused(case, scores, monkeypatch):
    monkeypatch.setattr(kernels, "SCORES", scores)
    g = torch.Generator().manual_seed(0)
    t, s = 13, 13 if case == "causal" else 17
    q = torch.randn(2, 6, t, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 3, s, 8, generator=g, dtype=torch.float64) for _ in "kv")
    keep = torch.rand(t, s, generator=g) < 0.6
    keep[:, 3] = True
    bias = torch.zeros(t, s, dtype=torch.float64).masked_fill(~keep, float("-inf")) if case == "bias" else None
    settings = {"scale": 0.3, "causal": case == "causal", "bias": bias}
    out, lse = kernels.attend(q, k, v, **settings)
    plain_out, plain_lse = kernels.plain_attend(q, k, v, **settings)
    torch.testing.assert_close(plain_out, out, atol=1e-12, rtol=0)
    torch.testing.assert_close(plain_lse, lse, atol=1e-12, rtol=0)
    grad = torch.randn(out.shape, generator=g, dtype=torch.float64)
    # a part of a joint softmax: its share of the weight is below one
    joint = (grad, q, k, v, out * 0.7, lse + 0.5)
    fused, plain = kernels.attend_backward(*joint, **settings), kernels.plain_attend_backward(*joint, **settings)
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("free", [2048, 2500, 4096])
def test_long_free_runs_equal_one_softmax(start, free):
    g = torch.Generator().manual_seed(1)
    t, s = 4, start + free + 9
    q = torch.randn(1, 6, t, 8, generator=g)
    k, v = (torch.randn(1, 2, s, 8, generator=g) for _ in "kv")
    keep = torch.rand(t, s, generator=g) < 0.5
    keep[:, start : start + free] = True
    keep[0, :start] = keep[1, start + free :] = False  # a row may see nothing of a part
    expected, _ = dense_attention(q, k, v, keep, 0.4)
    masked = torch.cat((keep[:, :start], keep[:, start + free :]), 1)
    bias = torch.zeros(1, 1, *masked.shape).masked_fill(~masked, MASKED)
    out = attend_cached(q, k, v, bias, 0.4, (start, start + free))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
