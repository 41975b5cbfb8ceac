"""The compact memory while decoding: ``[S sinks | ring of C raw entries | slots | spare]`` per layer, allocated once.

A raw token at position ``i >= S`` lives in ring cell ``(i - S) mod C`` with ``C = W + R``; keys are stored after RoPE,
so the order of cells is free and counters alone decide who sees what. Rolling back lowers a counter: the ring still
holds the ``R`` tokens before the window. A token that completes a group writes its slot in the same forward. The spare
cell swallows the slot rows of batch rows that cross no boundary in a step. Knows no model and no adapter.
Shapes: B batch, T new raw tokens, P slots written in a forward, C ring cells, G KV heads, D head dim.
"""

import torch
from torch import Tensor

from masw_lightning.attention.cached import Reading, attend_cached, plan_reading
from masw_lightning.cache.base import KVCache, KVShape, rows_to_take_back
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout, Writer


class CompactCache(KVCache):
    """Sinks, window and slots of ``batch`` rows. How many slots a row has follows from its count: ``layout.num_slots``.

    Args:
        layout: shape of the memory (``ratio=None``: a sliding window with sinks).
        writer: ``"slot"``: slots are rows of their own and look at the memory; ``"token"``: they are written only.
        max_tokens: most raw tokens a row may ever have read; fixes the number of slot cells.
    """

    def __init__(self, layout: MemoryLayout, writer: Writer, shape: KVShape, batch: int, max_tokens: int) -> None:
        self.layout, self.writer = layout.resolve(writer), writer
        self.max_tokens = max_tokens
        self.ring = min(layout.window + layout.rollback, max(0, max_tokens - layout.sink))
        self.first_slot = min(layout.sink, max_tokens) + self.ring
        self.spare = self.first_slot + layout.num_slots(max_tokens)
        super().__init__(shape.buffers(batch, self.spare + 1), batch)
        self._highest = self.lengths.clone()  # most tokens ever read per row: bounds what the ring still holds
        self._used = 0
        self._cells = torch.empty(0)
        self._keep = torch.empty(0)
        self._readings: dict[torch.device, Reading] = {}

    def rollback(self, tokens: int | list[int] | Tensor) -> None:
        """Forget the newest ``tokens`` (one number, or one per row) in O(1).

        Raises:
            UserError: deeper than the layout's rollback window: the ring no longer holds the window before it.
        """
        lengths = self.lengths - rows_to_take_back(tokens, self.lengths)
        depth = int((self._highest - lengths).max())
        if depth > self.layout.rollback:
            raise UserError(
                f"rolling back to {lengths.tolist()} tokens is {depth} behind the newest token read, more than "
                f"rollback={self.layout.rollback}: draft fewer tokens or use a layout with a larger rollback."
            )
        self.lengths = lengths

    # ---- prefill ------------------------------------------------------------------------------------------------
    def fill(self, layer: int, k: Tensor, v: Tensor, slot_k: Tensor, slot_v: Tensor) -> None:
        """Keep what a prompt's forward leaves behind: raw ``k, v [B,G,n,D]``, slots ``[B,G,M,D]``. Copies, no views."""
        n, m, s = k.shape[2], slot_k.shape[2], self.layout.sink
        if n > self.max_tokens:
            raise UserError(f"the memory was allocated for {self.max_tokens} tokens and is asked to read {n}.")
        kept = torch.arange(max(s, n - self.ring), n) if n > s else torch.empty(0, dtype=torch.long)
        cells = (self._ring_cell(kept)).to(k.device)
        for buffer, raw, slots in zip(self.buffers[layer], (k, v), (slot_k, slot_v), strict=True):
            buffer[:, :, : min(s, n)] = raw[:, :, :s]
            buffer[:, :, cells] = raw[:, :, n - len(kept) :]
            buffer[:, :, self.first_slot : self.first_slot + m] = slots

    def filled(self, n: int) -> None:
        """Count a prompt of ``n`` tokens, once every layer has been filled."""
        self.lengths = torch.full_like(self.lengths, n)
        self._highest = self.lengths.clone()

    # ---- decoding -----------------------------------------------------------------------------------------------
    def begin(self, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """Announce ``new`` tokens per row and lay out their forward.

        Returns:
            positions ``[B,T]`` of the raw rows; numbers ``[B,P]`` of the slots written, ``-1`` where a row writes fewer
            than ``P``; and ``[B,P]``, which of the ``T`` raw rows completes each.
        """
        if new > self.layout.rollback:
            raise UserError(
                f"a forward of {new} tokens overruns the memory's rollback={self.layout.rollback}: "
                "feed fewer at a time or use a layout with a larger rollback."
            )
        if int(self.lengths.max()) + new > self.max_tokens:
            raise UserError(
                f"the memory was allocated for {self.max_tokens} tokens and is asked to read "
                f"{int(self.lengths.max()) + new}."
            )
        before = [self.layout.num_slots(n) for n in self.lengths.tolist()]
        after = [self.layout.num_slots(n + new) for n in self.lengths.tolist()]
        p = max(a - b for a, b in zip(after, before, strict=True))
        slots = torch.tensor(before)[:, None] + torch.arange(p)
        slots = torch.where(slots < torch.tensor(after)[:, None], slots, -1)
        positions = self.lengths[:, None] + torch.arange(new)
        completing = slots
        if p:
            completing = (self.layout.boundary(slots) - 1 - self.lengths[:, None]).clamp(0, new - 1)
        self._new, self._used = new, self.first_slot + max(after)
        slot_cells = torch.where(slots >= 0, self.first_slot + slots, self.spare)
        self._cells = torch.cat((self._raw_cell(positions), slot_cells), 1)
        self._keep, self._readings = self._visible(positions, slots), {}
        return positions, slots, completing

    def end(self) -> None:
        """Count the announced tokens, once every layer has stored them."""
        super().end()
        self._highest = torch.maximum(self._highest, self.lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store ``k, v [B,G,T+P,D]`` (raw rows, then slots) and attend with ``q [B,H,rows,D]``; ``-> [B,H,rows,D]``."""
        keys, values = self.buffers[layer]
        if self._cells.device != q.device:
            self._cells = self._cells.to(q.device)
        if q.device not in self._readings:
            self._readings[q.device] = plan_reading(self._keep, self._used, q, k.shape[1])
        if len(self.lengths) == 1:
            keys.index_copy_(2, self._cells[0], k)
            values.index_copy_(2, self._cells[0], v)
        else:
            cells = self._cells[:, None, :, None].expand_as(k)
            keys.scatter_(2, cells, k)
            values.scatter_(2, cells, v)
        used = keys[:, :, : self._used], values[:, :, : self._used]
        return attend_cached(q, *used, self._readings[q.device], scale)

    def _ring_cell(self, position: Tensor) -> Tensor:
        return self.layout.sink + (position - self.layout.sink) % max(1, self.ring)

    def _raw_cell(self, position: Tensor) -> Tensor:
        return torch.where(position < self.layout.sink, position, self._ring_cell(position))

    def _visible(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Which cells each row sees, bool ``[B,rows,cells]``, from the counters alone."""
        layout, last = self.layout, self.lengths[:, None] + self._new - 1
        cell = torch.arange(self.first_slot)
        # position held by a ring cell: the newest one that maps to it
        offset = cell - layout.sink
        held = last - (last - layout.sink - offset) % max(1, self.ring)
        held = torch.where(cell < layout.sink, cell, held)  # [B, first_slot]
        valid = torch.where(cell < layout.sink, cell <= last, held >= layout.sink)[:, None]
        raw = valid & layout.raw_sees_raw(positions[:, :, None], held[:, None])
        columns = [raw]
        number = torch.arange(self._used - self.first_slot)
        if len(number):
            columns.append(layout.raw_sees_slot(positions[:, :, None], number))
        keep = torch.cat(columns, -1)
        if self.writer == "slot" and slots.shape[1]:
            q = slots[:, :, None]
            rows = torch.cat((valid & layout.slot_sees_raw(q, held[:, None]), layout.slot_sees_slot(q, number)), -1)
            keep = torch.cat((keep, rows), 1)
        return keep
