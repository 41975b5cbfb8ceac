"""The attention of a forward over a whole text through a memory. Knows plans and caches, makes neither.

Shapes: B batch, n raw tokens, M slots, P slots written by raw rows, H heads, G KV heads, D head dim.
"""

from typing import cast

from torch import Tensor, nn

from masw_lightning.adapter.mirror import SlotRows
from masw_lightning.attention.structured import Plan, structured_attention
from masw_lightning.cache.compact import CompactCache


class TeacherForcedMemory:
    """The attention of one forward over a whole text; optionally leaves its memory in a cache (prefill)."""

    def __init__(self, plan: Plan, rows: SlotRows, owner: object, cache: CompactCache | None = None) -> None:
        self.plan, self.rows, self.owner, self.cache = plan, rows, owner, cache

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionMemory``. The layout replaces a backbone's own sliding window in every layer."""
        n = self.plan.n
        slot_k, slot_v = k[:, :, n:], v[:, :, n:]
        if self.rows.slots and self.rows.written is not None:
            slot_k, slot_v = written_slots(self.rows, k, v)
        k, v = k[:, :, :n], v[:, :, :n]
        if self.cache is not None:
            self.cache.fill(int(module.layer_idx), k, v, slot_k, slot_v)  # type: ignore[arg-type]
        return structured_attention(self.plan, q, k, v, slot_k, slot_v, scale)


def written_slots(rows: SlotRows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B,G,P,D]`` of the slots that raw rows write: by mirrors, or else those rows' own ``k, v``."""
    if rows.slot_k is not None:
        return rows.slot_k, cast(Tensor, rows.slot_v)
    index = cast(Tensor, rows.written).expand(k.shape[0], -1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    return k.gather(2, index), v.gather(2, index)
