"""The form that stands in on other devices equals the fused CPU kernel, forwards and backwards, in blocks."""

import pytest
import torch

from masw_lightning.attention import cached, kernels, plain
from masw_lightning.attention.cached import FEWEST, MASKED, Reading, attend_cached, free_cells, plan_reading
from masw_lightning.attention.dense import dense_attention


@pytest.mark.parametrize("case", ["causal", "bias", "all"])
@pytest.mark.parametrize("scores", [1, 500, 1 << 27])
def test_plain_equals_fused(case, scores, monkeypatch):
    monkeypatch.setattr(plain, "SCORES", scores)
    g = torch.Generator().manual_seed(0)
    t, s = 13, 13 if case == "causal" else 17
    q = torch.randn(2, 6, t, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 3, s, 8, generator=g, dtype=torch.float64) for _ in "kv")
    keep = torch.rand(t, s, generator=g) < 0.6
    keep[:, 3] = True
    bias = torch.zeros(t, s, dtype=torch.float64).masked_fill(~keep, float("-inf")) if case == "bias" else None
    settings = {"scale": 0.3, "causal": case == "causal", "bias": bias}
    out, lse = kernels.attend(q, k, v, **settings)
    plain_out, plain_lse = plain.plain_attend(q, k, v, **settings)
    torch.testing.assert_close(plain_out, out, atol=1e-12, rtol=0)
    torch.testing.assert_close(plain_lse, lse, atol=1e-12, rtol=0)
    grad = torch.randn(out.shape, generator=g, dtype=torch.float64)
    # a part of a joint softmax: its share of the weight is below one
    joint = (grad, q, k, v, out * 0.7, lse + 0.5)
    fused = kernels.attend_backward(*joint, **settings)
    for a, b in zip(plain.plain_attend_backward(*joint, **settings), fused, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("cells", [60, 61, 97])
@pytest.mark.parametrize("masked", [True, False])
def test_cells_in_parts_equal_one_softmax(threads, cells, masked, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cached, "FEWEST", 8)
    g = torch.Generator().manual_seed(1)
    t = 4 if masked else 1
    q = torch.randn(1, 6, t, 8, generator=g)
    k, v = (torch.randn(1, 2, cells, 8, generator=g) for _ in "kv")
    keep = None
    if masked:
        keep = torch.rand(1, t, cells, generator=g) < 0.5
        keep[:, :2, : cells // 2] = False  # a row may see nothing of a part
        keep[:, 2, cells // 2 :] = False
    reading = plan_reading(keep, cells, q, 2)
    assert reading.parts == min({1: 1, 2: 1, 3: 3, 7: 7, 16: 8}[threads], cells // 8)
    expected, _ = dense_attention(q, k, v, keep if keep is None else keep[0], 0.4)
    torch.testing.assert_close(attend_cached(q, k, v, reading, 0.4), expected, atol=1e-6, rtol=1e-5)


def test_batches_and_short_runs_are_read_whole():
    q = torch.randn(2, 6, 3, 8)
    k, v = torch.randn(2, 2, 2, 9000, 8).unbind()
    keep = torch.rand(2, 3, 9000) < 0.5
    reading = plan_reading(keep, 9000, q, 2)
    assert reading.parts == 1
    expected = torch.cat([dense_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], keep[i], 0.4)[0] for i in (0, 1)])
    torch.testing.assert_close(attend_cached(q, k, v, reading, 0.4), expected, atol=1e-6, rtol=1e-5)
    assert plan_reading(None, FEWEST - 1, q[:1], 2).parts == 1


def test_free_cells_read_apart_equal_one_softmax(monkeypatch):
    """How other devices than the CPU read: first cells that all rows see without a mask, then the rest."""
    monkeypatch.setattr(cached, "FREE", 20)
    g = torch.Generator().manual_seed(2)
    q = torch.randn(2, 6, 3, 8, generator=g)
    k, v = (torch.randn(2, 2, 40, 8, generator=g) for _ in "kv")
    keep = torch.rand(2, 3, 40, generator=g) < 0.5
    keep[:, :, :25] = True
    keep[1, 2, 25:] = False  # a row may see nothing of the rest
    keep[0, 0, 25] = False
    assert free_cells(keep) == 25
    assert free_cells(keep[..., :25]) == free_cells(keep[..., 6:]) == 0  # all of them, or too few
    bias = torch.zeros(2, 3, 15).masked_fill(~keep[..., 25:], MASKED).repeat(1, 3, 1)[:, None]
    expected = torch.cat([dense_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], keep[i], 0.4)[0] for i in (0, 1)])
    out = attend_cached(q, k, v, Reading(1, 15, 15, bias, free=25), 0.4)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
