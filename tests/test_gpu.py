"""What must hold on a CUDA device, with the CPU tests' models. Skipped where there is none; not run on a GPU yet."""

import pytest
import torch

from masw_lightning import FullKVDraft, MemoryLayout, MemorySlotDraft, SlidingWindowDraft, attach_memory, generate
from masw_lightning.attention.cached import attend_cached, plan_reading
from masw_lightning.attention.dense import dense_attention
from masw_lightning.attention.flash_cuda import takes, trusted
from masw_lightning.attention.kernels import attend, attend_backward
from masw_lightning.attention.plain import plain_attend, plain_attend_backward
from masw_lightning.attention.structured import make_plan, structured_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_used_and_right(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    assert trusted(device, dtype)
    q, k, v, grad = (torch.randn(1, h, 200, 128, device=device, dtype=dtype) for h in (8, 2, 2, 8))
    for causal in (True, False):
        assert takes(q, k, None)
        settings = {"scale": 0.1, "causal": causal}
        found, expected = attend(q, k, v, **settings), plain_attend(q, k, v, **settings)
        joint = grad, q, k, v, expected[0], expected[1] + 0.5  # a part of a joint softmax
        found += attend_backward(*joint, **settings)
        expected += plain_attend_backward(*joint, **settings)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("new", [1, 6])
def test_a_cache_read_apart_equals_the_definition(new):
    q = torch.randn(1, 8, new, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 3000, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    keep = torch.arange(3000) <= torch.arange(3000 - new, 3000)[None, :, None]
    reading = plan_reading(keep if new > 1 else None, 3000, q, 2)
    assert (reading.free > 0) == (new > 1)
    expected, _ = dense_attention(q, k, v, keep[0].cuda(), 0.1)
    torch.testing.assert_close(attend_cached(q, k, v, reading, 0.1), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("writer", ["slot", "token"])
def test_structured_attention_equals_the_definition(writer):
    layout, n = MemoryLayout(5, 16, 4), 133
    m = layout.num_slots(n)
    shapes = [(6, n + (m if writer == "slot" else 0)), (2, n), (2, n), (2, m), (2, m)]
    inputs = [torch.randn(2, h, t, 8, device="cuda", dtype=torch.float64, requires_grad=True) for h, t in shapes]
    q, k, v, sk, sv = inputs
    mask = layout.dense_mask(n, writer).cuda()
    dense, _ = dense_attention(q, torch.cat((k, sk), 2), torch.cat((v, sv), 2), mask, 0.3)
    fast = structured_attention(make_plan(layout, writer, n, q.dtype, q.device), q, k, v, sk, sv, 0.3)
    torch.testing.assert_close(fast, dense, atol=1e-10, rtol=0)
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (fast, dense)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_every_draft_is_lossless(build_model, family):
    target = build_model(family).cuda()
    ids = torch.randint(0, 61, (1, 40), device="cuda")
    expected = target.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 40:].tolist()
    memories = [attach_memory(target, MemoryLayout(3, 6, 3), writer=w) for w in ("slot", "token")]
    for policy in (None, FullKVDraft(target), SlidingWindowDraft(target, 9), *map(MemorySlotDraft, memories)):
        assert generate(target, ids, policy, 5, 24).tokens == [expected]
    for memory in memories:
        memory.detach()
