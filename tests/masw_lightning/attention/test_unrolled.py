"""Self-fed attention in parts equals one softmax under the drawn mask: values and gradients."""

import pytest
import torch

from masw_lightning.attention.unrolled import UnrolledMemory

L, STEPS = 3, 3
MASK = torch.tensor(  # the last step's rows; columns: step 0 | step 1 | step 2
    [
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ],
    dtype=torch.bool,
)


def dense(q, keys, values, scale, length):
    """The definition: every step's keys side by side, one mask."""
    steps, group = len(keys), q.shape[1] // keys[0].shape[1]
    eye = torch.eye(length, dtype=torch.bool)
    mask = torch.cat([torch.ones(length, length, dtype=torch.bool).tril(), *[eye] * (steps - 1)], 1)
    if length == L:
        assert torch.equal(mask, MASK[:, : steps * L])
    k = torch.cat(keys, 2).repeat_interleave(group, 1)
    v = torch.cat(values, 2).repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("length", [1, L, 70])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values_and_gradients(length, kv_heads):
    torch.manual_seed(length)
    draw = lambda heads: torch.randn(2, heads, length, 8, dtype=torch.float64, requires_grad=True)  # noqa: E731
    leaves = [(draw(4), draw(kv_heads), draw(kv_heads)) for _ in range(STEPS)]
    memory, ours, expected = UnrolledMemory(), [], []
    for i, (q, k, v) in enumerate(leaves):
        ours.append(memory.attend(torch.nn.Identity(), q, k, v, 0.3, None))
        keys, values = [x[1] for x in leaves[: i + 1]], [x[2] for x in leaves[: i + 1]]
        expected.append(dense(q, keys, values, 0.3, length))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    weights = torch.randn(STEPS, *ours[0].shape, dtype=torch.float64)
    flat = [x for step in leaves for x in step]
    grads = [torch.autograd.grad((torch.stack(outs) * weights).sum(), flat) for outs in (ours, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_chain_that_feeds_on_itself_is_differentiated_through_all_steps():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def chain(x):
        memory, out = UnrolledMemory(), x
        for _ in range(3):
            out = memory.attend(torch.nn.Identity(), out, out, out, 0.5, None)
        return out

    assert torch.autograd.gradcheck(chain, (x,))


def test_half_precision_stays_half():
    q = torch.randn(1, 4, 6, 8).bfloat16()
    memory = UnrolledMemory()
    for _ in range(2):
        out = memory.attend(torch.nn.Identity(), q, q[:, :2], q[:, :2], 0.3, None)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())
