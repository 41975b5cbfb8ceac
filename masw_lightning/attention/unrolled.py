"""Attention of self-fed steps, all positions at once: what a drafted chain looks at, without an ``L x L`` mask.

Row ``t`` of step ``i`` is the ``i``-th entry drafted after ``t`` true ones. It sees the true entries ``0..t`` (step 0,
plain causal) and the entries that its own chain has drafted so far: row ``t`` of steps ``1..i``. Drawn for ``L = 3``,
step 2 (columns: step 0 | step 1 | step 2)::

    t=0   1 . .   1 . .   1 . .
    t=1   1 1 .   . 1 .   . 1 .
    t=2   1 1 1   . . 1   . . 1

So the first part runs on a fused causal kernel and the diagonals are one score per row and step; both are merged by
their log-sum-exp. Knows no model. Shapes: B batch, L rows, J steps, H query heads, G KV heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from masw_lightning.attention.kernels import attend, attend_backward


class UnrolledMemory:
    """An ``AttentionMemory`` for one layer, run once per self-fed step; it keeps every step's keys and values."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """``q [B,H,L,D]``, this step's ``k, v [B,G,L,D]`` ``-> [B,H,L,D]``."""
        self.keys.append(k)
        self.values.append(v)
        out: Tensor = _Unrolled.apply(q, scale, *self.keys, *self.values)
        return out


def _chain_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scores of each row's own drafted entries: ``q [B,G,R,L,D]``, ``keys [J,B,G,L,D]`` ``-> [J,B,G,R,L]``."""
    return torch.einsum("bgrtd,jbgtd->jbgrt", q, keys) * scale


class _Unrolled(torch.autograd.Function):
    """Joint softmax of a causal part and a part on the diagonals. The causal kernel's backward takes the *joint* output
    and log-sum-exp, so every part's gradient is exact (as in ``structured``)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, scale: float, *keys_values: Tensor) -> Tensor:
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        out, lse = attend(q, keys[0], values[0], scale=scale, causal=True)
        if steps > 1:
            grouped = _grouped(q, keys[0])
            scores = _chain_scores(grouped, _wide(torch.stack(keys[1:])), scale)
            first = lse.reshape(scores.shape[1:]).to(scores.dtype)
            joint = torch.logsumexp(torch.cat((first[None], scores)), 0)
            drafted = torch.einsum("jbgrt,jbgtd->bgrtd", (scores - joint).exp(), _wide(torch.stack(values[1:])))
            merged = (first - joint).exp()[..., None] * _grouped(out, keys[0]) + drafted
            out, lse = merged.reshape(q.shape).to(q.dtype), joint.reshape(lse.shape).to(lse.dtype)
        ctx.save_for_backward(q, out, lse, *keys_values)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, out, lse, *keys_values = ctx.saved_tensors
        grad, scale, steps = grads[0].contiguous(), ctx.scale, len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        dq, dk, dv = attend_backward(grad, q, keys[0], values[0], out, lse, scale=scale, causal=True)
        if steps == 1:
            return dq, None, dk, dv
        grouped, grouped_grad = _grouped(q, keys[0]), _grouped(grad, keys[0])
        later, later_values = _wide(torch.stack(keys[1:])), _wide(torch.stack(values[1:]))
        scores = _chain_scores(grouped, later, scale)
        weights = (scores - lse.reshape(scores.shape[1:]).to(scores.dtype)).exp()
        delta = (grouped_grad * _grouped(out, keys[0])).sum(-1)
        d_scores = weights * (torch.einsum("bgrtd,jbgtd->jbgrt", grouped_grad, later_values) - delta) * scale
        dq = dq + torch.einsum("jbgrt,jbgtd->bgrtd", d_scores, later).reshape(q.shape).to(q.dtype)
        d_keys = torch.einsum("jbgrt,bgrtd->jbgtd", d_scores, grouped).to(dk.dtype)
        d_values = torch.einsum("jbgrt,bgrtd->jbgtd", weights, grouped_grad).to(dv.dtype)
        return dq, None, dk, *d_keys.unbind(), dv, *d_values.unbind()


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """``[B,H,L,D] -> [B,G,H/G,L,D]``, at least float32."""
    b, h, t, d = x.shape
    return _wide(x).reshape(b, k.shape[1], h // k.shape[1], t, d)
