"""The memory's attention without an ``L x L`` mask: exact, in parts, merged by log-sum-exp.

Every row's keys are split into disjoint sets that a fused kernel handles well; the parts' outputs are merged by their
LSE weights, which gives the joint softmax exactly (``docs/design.md``, "Structured attention"):

* **head**: the first ``S + W`` raw rows see every earlier raw row: plain causal attention.
* **sinks**: all later rows see the ``S`` sinks: attention without a mask.
* **band**: later rows in blocks of ``c`` positions, each against the ``W + c`` keys that reach its window, under one
  mask shared by all blocks.
* **far**: raw rows that see exactly slots ``0..k`` come in runs of ``r``; folding a run into the head axis leaves plain
  causal attention over slot positions. Slot rows are one more such run.
* **self**: under ``"evicted"`` visibility a slot row also sees itself.

Cost ``O(n (S + W + c) + n^2 / 2r)``. Knows no adapter, model or cache.
Shapes: B batch, n raw rows, M slots, H query heads, G KV heads, D head dim. Rows: raw ``0..n-1``, then slots.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from masw_lightning.attention.kernels import attend, attend_backward
from masw_lightning.layout import MemoryLayout, Writer


@dataclass(frozen=True)
class Part:
    """Attention of a range of rows over a range of keys.

    ``blocks``: 1 = the rows as they are; else the rows are padded and cut into that many blocks of ``rows_per_block``.
    ``fold``: runs of that many consecutive rows go to the head axis. At most one of the two is used.
    Keys are ``[key_start, key_stop)`` of the raw or slot keys; with blocks, block ``i`` sees ``span`` keys from
    ``key_start + i * key_step``. ``first``: no earlier part has these rows.
    """

    start: int
    stop: int
    slot_keys: bool
    key_start: int
    key_stop: int
    causal: bool = False
    bias: Tensor | None = None
    blocks: int = 1
    rows_per_block: int = 0
    span: int = 0
    key_step: int = 0
    fold: int = 1
    first: bool = False

    def rows(self, x: Tensor) -> Tensor:
        """``[B,H,T,X] ->`` this part's rows in the kernel's shape (``[B*blocks,H,c,X]`` or ``[B,H*fold,runs,X]``)."""
        x = x[:, :, self.start : self.stop]
        b, h, t, d = x.shape
        if self.blocks > 1 or self.rows_per_block:
            x = F.pad(x, (0, 0, 0, self.blocks * self.rows_per_block - t))
            x = x.reshape(b, h, self.blocks, self.rows_per_block, d).transpose(1, 2)
            return x.reshape(b * self.blocks, h, self.rows_per_block, d)
        if self.fold > 1:
            runs = self.key_stop - self.key_start
            x = F.pad(x, (0, 0, 0, runs * self.fold - t))
            return x.reshape(b, h, runs, self.fold, d).transpose(2, 3).reshape(b, h * self.fold, runs, d)
        return x

    def unrows(self, x: Tensor, b: int, h: int) -> Tensor:
        """The inverse of ``rows`` on one range: back to ``[B,H,stop-start,X]``."""
        t, d = self.stop - self.start, x.shape[-1]
        if self.blocks > 1 or self.rows_per_block:
            x = x.reshape(b, self.blocks, h, self.rows_per_block, d).transpose(1, 2)
            return x.reshape(b, h, self.blocks * self.rows_per_block, d)[:, :, :t]
        if self.fold > 1:
            return x.reshape(b, h, self.fold, -1, d).transpose(2, 3).reshape(b, h, -1, d)[:, :, :t]
        return x

    def keys(self, raw: Tensor, slots: Tensor) -> Tensor:
        """``[B,G,n,D], [B,G,M,D] ->`` this part's keys (or values) in the kernel's shape."""
        x = (slots if self.slot_keys else raw)[:, :, self.key_start : self.key_stop]
        if not self.span:
            return x
        x = F.pad(x, (0, 0, 0, (self.blocks - 1) * self.key_step + self.span - x.shape[2]))
        x = x.unfold(2, self.span, self.key_step).permute(0, 2, 1, 4, 3)  # a view: windows overlap in memory
        return x.reshape(-1, *x.shape[2:])


@dataclass(frozen=True)
class Plan:
    """All parts of one forward: made once, used by every layer."""

    n: int
    m: int
    slot_rows: int
    parts: tuple[Part, ...]


def make_plan(
    layout: MemoryLayout, writer: Writer, n: int, dtype: torch.dtype, device: torch.device, block: int | None = None
) -> Plan:
    """Cut a forward over ``n >= 1`` raw rows into parts.

    Args:
        block: raw positions per band block; rounded up to a multiple of ``r``. Default: about ``W``, 32 to 256.
    """
    layout = layout.resolve(writer)
    s, w, r, m = layout.sink, layout.window, layout.ratio, layout.num_slots(n)
    slot_rows = m if writer == "slot" else 0
    head = min(n, s + w)
    parts = [Part(0, head, False, 0, head, causal=True)]

    def masked(keep: Tensor) -> Tensor:
        return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill_(~keep.to(device), float("-inf"))

    head_slots = 0  # slot rows whose boundary lies in the head
    if slot_rows:
        assert r is not None
        head_slots = max(0, head - s) // r
        if head_slots:
            last = torch.arange(1, head_slots + 1)[:, None] * r + s - 1
            parts.append(Part(n, n + head_slots, False, 0, head, bias=masked(torch.arange(head)[None] <= last)))
    if n > head:
        if s:
            parts.append(Part(head, n, False, 0, s))
            if slot_rows > head_slots:
                parts.append(Part(n + head_slots, n + slot_rows, False, 0, s))
        step = r or 1
        c = -(-(block or min(max(w, 32), 256)) // step) * step
        x = torch.arange(w + c)[None]
        a = torch.arange(c)[:, None]  # row at position S + W + i c + a sees key S + i c + x iff a < x <= a + W
        blocks = -(-(n - head) // c)

        def band(start: int, stop: int, rows: Tensor, blocks: int) -> Part:
            bias = masked((x > rows) & (x <= rows + w))
            return Part(
                start, stop, False, s, n, bias=bias, blocks=blocks, rows_per_block=len(rows), span=w + c, key_step=c
            )

        parts.append(band(head, n, a, blocks))
        if slot_rows > head_slots:
            assert r is not None
            a = torch.arange(c // r)[:, None] * r + (head_slots + 1) * r - 1 - w
            blocks = -(-(slot_rows - head_slots) // (c // r))
            parts.append(band(n + head_slots, n + slot_rows, a, blocks))
    if r is not None and m:
        first = layout.first_reader(0)
        if first < n:
            parts.append(Part(first, n, True, 0, -(-(n - first) // r), causal=True, fold=r))
        if slot_rows and layout.visibility == "written":
            parts.append(Part(n, n + m, True, 0, m, causal=True))
        elif slot_rows:
            parts.append(Part(n, n + m, True, 0, m, blocks=m, rows_per_block=1, span=1, key_step=1))
            behind = layout.eviction_slots
            if m > behind:
                parts.append(Part(n + behind, n + m, True, 0, m - behind, causal=True))
    return Plan(n, m, slot_rows, tuple(mark_first(parts)))


def mark_first(parts: list[Part]) -> list[Part]:
    """Mark the parts whose rows no earlier part has. Such parts cover all rows, one each."""
    marked: list[Part] = []
    for part in parts:
        seen = any(p.start < part.stop and part.start < p.stop for p in marked)
        marked.append(replace(part, first=not seen))
    return marked


class _Merged(torch.autograd.Function):
    """Joint softmax over the parts. Inputs are the parts' gathered ``q, k, v``; autograd scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, shape: tuple[int, ...], scale: float, *tensors: Tensor) -> Tensor:
        b, h, t, d = shape
        q0 = tensors[0]
        dtype = torch.promote_types(q0.dtype, torch.float32)
        out = q0.new_empty((b, t, h, d), dtype=dtype).transpose(1, 2)  # the layout of the kernels' outputs
        lse = q0.new_empty((b, h, t), dtype=dtype)
        for part, q, k, v in zip(plan.parts, tensors[::3], tensors[1::3], tensors[2::3], strict=True):
            o, part_lse = attend(q, k, v, scale=scale, causal=part.causal, bias=part.bias)
            o = part.unrows(o, b, h).to(dtype)
            part_lse = part.unrows(part_lse.unsqueeze(-1), b, h).squeeze(-1)
            rows = slice(part.start, part.stop)
            if part.first:
                out[:, :, rows], lse[:, :, rows] = o, part_lse
                continue
            weight = torch.sigmoid(part_lse - lse[:, :, rows])  # of this part in the joint softmax
            out[:, :, rows].lerp_(o, weight.unsqueeze(-1))
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        result = out.to(q0.dtype)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(result, lse, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        results: list[Any] = [None, None, None]
        for part, q, k, v in zip(ctx.plan.parts, tensors[::3], tensors[1::3], tensors[2::3], strict=True):
            results += attend_backward(
                part.rows(grads[0]),
                q,
                k,
                v,
                part.rows(out),
                part.rows(lse.unsqueeze(-1)).squeeze(-1),
                scale=ctx.scale,
                causal=part.causal,
                bias=part.bias,
            )
        return tuple(results)


def structured_attention(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, slot_k: Tensor, slot_v: Tensor, scale: float
) -> Tensor:
    """Attention of all rows of a forward through the memory.

    Args:
        q: ``[B,H,n + slot_rows,D]``, raw rows first.  k, v: raw ``[B,G,n,D]``.  slot_k, slot_v: ``[B,G,M,D]``.

    Returns:
        ``[B,H,n + slot_rows,D]``, equal to ``dense_attention`` under ``MemoryLayout.dense_mask``; differentiable.
    """
    tensors: list[Tensor] = []
    for part in plan.parts:
        tensors += (part.rows(q), part.keys(k, slot_k), part.keys(v, slot_v))
    return _Merged.apply(plan, tuple(q.shape), scale, *tensors)
