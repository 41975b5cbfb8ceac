"""The uncompressed cache: one preallocated buffer per layer and side, written in place, rolled back by a counter.

Serves targets (which keep their own sliding-window layers) and the full-KV draft. Knows no policy and no adapter.
Shapes: B batch, T new tokens, S stored tokens, H heads, G KV heads, D head dim.
"""

import torch
from torch import Tensor, nn

from masw_lightning.attention.cached import Reading, attend_cached, plan_reading
from masw_lightning.attention.structured import Plan, make_plan, structured_attention
from masw_lightning.cache.base import KVCache, KVShape, rows_to_take_back
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout


class FullCache(KVCache):
    """Keys and values of every token.

    Args:
        shape: of the model.  batch: rows.  capacity: most tokens a row may ever hold.
    """

    def __init__(self, shape: KVShape, batch: int, capacity: int) -> None:
        super().__init__(shape.buffers(batch, capacity), batch)
        self.shape, self.capacity = shape, capacity
        self._readings: dict[tuple[int | None, torch.device], tuple[int, Reading]] = {}
        self._plans: dict[int, Plan] = {}

    def rollback(self, tokens: int | list[int] | Tensor) -> None:
        """Forget the newest ``tokens`` (one number, or one per row) in O(1)."""
        self.lengths = self.lengths - rows_to_take_back(tokens, self.lengths)

    def begin(self, new: int) -> Tensor:
        """Announce ``new`` tokens per row. Returns their positions ``[B,T]``."""
        top = int(self.lengths.max()) + new
        if top > self.capacity:
            raise UserError(f"the cache was allocated for {self.capacity} tokens and is asked to hold {top}.")
        self._new = new
        self._readings, self._plans = {}, {}
        return self.lengths[:, None] + torch.arange(new)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Store ``k, v [B,G,T,D]`` of one layer and attend with ``q [B,H,T,D]``; ``-> [B,H,T,D]``."""
        keys, values = self.buffers[int(module.layer_idx)]  # type: ignore[arg-type]
        lengths, new = self.lengths.tolist(), self._new
        for row, length in enumerate(lengths):
            keys[row, :, length : length + new] = k[row]
            values[row, :, length : length + new] = v[row]
        if max(lengths) == 0 and new > 1:
            return self._prefill(q, k, v, scale, sliding_window)
        start, reading = self._reading(sliding_window, q, k.shape[1])
        stop = max(lengths) + new
        return attend_cached(q, keys[:, :, start:stop], values[:, :, start:stop], reading, scale)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None) -> Tensor:
        """From empty: causal attention is the no-slot memory of window ``n``, or of the layer's own window."""
        n = q.shape[2]
        window = min(n, sliding_window or n)
        if window not in self._plans:
            layout = MemoryLayout(sink=0, window=window, ratio=None)
            self._plans[window] = make_plan(layout, "slot", n, q.dtype, q.device)
        nothing = k[:, :, :0]
        return structured_attention(self._plans[window], q, k, v, nothing, nothing, scale)

    def _reading(self, sliding_window: int | None, q: Tensor, kv_heads: int) -> tuple[int, Reading]:
        """First cell worth reading and how to read from there on; the same for all layers of one window and device."""
        key = (sliding_window, q.device)
        if key not in self._readings:
            low, high = int(self.lengths.min()), int(self.lengths.max())
            start = max(0, low + 1 - sliding_window) if sliding_window else 0
            rows = self.lengths[:1] if low == high else self.lengths
            i = (rows[:, None] + torch.arange(self._new))[:, :, None]
            j = torch.arange(start, high + self._new)
            keep = j <= i
            if sliding_window:
                keep &= i - j < sliding_window
            visible = None if bool(keep.all()) else keep
            self._readings[key] = start, plan_reading(visible, len(j), q, kv_heads)
        return self._readings[key]
