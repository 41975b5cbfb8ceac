"""Who sees whom: the integers and booleans of a compressed draft memory.

A prefix of ``n`` raw tokens (positions ``0..n-1``) is remembered as ``sink`` first tokens, a local ``window`` of exact
tokens and one *slot* per ``ratio`` tokens beyond the sinks (arXiv 2608.30252, section 3). This file holds that
arithmetic and the dense mask that defines it; it knows no tensors of a model, no cache and no kernel.

Rows of a dense mask: the ``n`` raw rows first, then the ``M`` slot rows (``writer="slot"`` only). Columns: ``n`` raw
keys, then ``M`` slot keys. ``docs/memory.md`` draws them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from masw_lightning.errors import UserError

Writer = Literal["slot", "token"]
Visibility = Literal["written", "evicted"]

WRITERS: tuple[str, ...] = ("slot", "token")
DEFAULT_VISIBILITY: dict[str, Visibility] = {"slot": "written", "token": "evicted"}


def check_writer(writer: str) -> None:
    """Raise ``UserError`` unless ``writer`` is one of the two writers."""
    if writer not in WRITERS:
        raise UserError(f"writer={writer!r} is unknown: use 'slot' (the paper's) or 'token'.")


@dataclass(frozen=True)
class MemoryLayout:
    """Shape of a draft memory.

    Args:
        sink: ``S``, first tokens kept exactly. Zero only without slots (a plain sliding window).
        window: ``W``, newest tokens kept exactly, the current one included.
        ratio: ``r``, raw tokens per slot; ``None`` means no slots.
        rollback: ``R``, how many tokens a cache of this layout can take back; at least ``K + 1`` when drafting ``K``.
        visibility: when a raw token may look at a slot. ``"written"`` (the paper's): as soon as the slot's boundary is
            reached. ``"evicted"``: once the slot's last token has left the window. ``None``: the writer's default.

    Raises:
        UserError: a number is not a positive integer, or the visibility is unknown.
    """

    sink: int = 128
    window: int = 128
    ratio: int | None = 4
    rollback: int = 16
    visibility: Visibility | None = None

    def __post_init__(self) -> None:
        for name in ("sink", "window", "ratio", "rollback"):
            value = getattr(self, name)
            if name == "ratio" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"MemoryLayout {name}={value!r} is not an integer: give a whole number of tokens.")
            if value < (0 if name == "sink" and self.ratio is None else 1):
                raise UserError(
                    f"MemoryLayout {name}={value} is out of range: give a positive number of tokens"
                    + (" (zero sinks are allowed only without slots, ratio=null)." if name == "sink" else ".")
                )
        if self.visibility not in (None, "written", "evicted"):
            raise UserError(
                f"MemoryLayout visibility={self.visibility!r} is unknown: use 'written', 'evicted' or null for the "
                "writer's default."
            )

    def resolve(self, writer: Writer) -> "MemoryLayout":
        """The same layout with ``visibility`` filled in by the writer's default."""
        check_writer(writer)
        return self if self.visibility else replace(self, visibility=DEFAULT_VISIBILITY[writer])

    def without_slots(self) -> "MemoryLayout":
        """The no-slot window of equal sinks and window: the line a learned memory has to beat."""
        return replace(self, ratio=None)

    # ---- counting -----------------------------------------------------------------------------------------------
    def num_slots(self, n: int) -> int:
        """Slots written after ``n`` raw tokens: ``max(0, n - S) // r``."""
        return 0 if self.ratio is None else max(0, n - self.sink) // self.ratio

    def num_entries(self, n: int) -> int:
        """Entries a reader of a prefix of ``n`` tokens keeps per layer and KV head: sinks + window + slots."""
        return min(n, self.sink + self.window) + self.num_slots(n)

    def boundary(self, k: Any) -> Any:
        """``b_k = S + (k + 1) r``: raw tokens read when slot ``k`` is written, and its RoPE position (slot writer)."""
        if self.ratio is None:
            raise UserError("this layout has no slots (ratio=null): it has no slot boundaries.")
        return self.sink + (k + 1) * self.ratio

    def boundaries(self, n: int) -> list[int]:
        """Boundaries ``b_0 .. b_{M-1}`` of the slots written after ``n`` raw tokens."""
        return [self.boundary(k) for k in range(self.num_slots(n))]

    def slot_positions(self, n: int, writer: Writer = "slot") -> list[int]:
        """RoPE positions of those slots: ``b_k`` for a slot row, ``b_k - 1`` (its last token) for the token writer."""
        check_writer(writer)
        return [b if writer == "slot" else b - 1 for b in self.boundaries(n)]

    @property
    def eviction_slots(self) -> int:
        """``ceil(W / r)``: how many slots behind itself a slot row looks under ``"evicted"`` visibility."""
        if self.ratio is None:
            raise UserError("this layout has no slots (ratio=null).")
        return -(-self.window // self.ratio)

    def first_reader(self, k: Any) -> Any:
        """Position of the first raw token that sees slot ``k``."""
        return self.boundary(k) + (self.window - 1 if self.visibility == "evicted" else 0)

    # ---- visibility, the definition (each works on ints and, elementwise, on integer tensors) --------------------
    def raw_sees_raw(self, i: Any, j: Any) -> Any:
        """Raw row ``i`` sees raw key ``j``: a sink, or one of the ``W`` newest, itself included."""
        return (j <= i) & ((j < self.sink) | (i - j < self.window))

    def raw_sees_slot(self, i: Any, k: Any) -> Any:
        """Raw row ``i`` sees slot ``k``."""
        return self.first_reader(k) <= i

    def slot_sees_raw(self, k: Any, j: Any) -> Any:
        """A slot row sees raw keys exactly as the last token before its boundary does."""
        return self.raw_sees_raw(self.boundary(k) - 1, j)

    def slot_sees_slot(self, q: Any, k: Any) -> Any:
        """Slot row ``q`` sees slot ``k``; itself always."""
        if self.visibility == "evicted":
            return (k == q) | (self.boundary(k) <= self.boundary(q) - self.window)
        return k <= q

    def visible(self, query: int, key: int, query_is_slot: bool = False, key_is_slot: bool = False) -> bool:
        """Whether row ``query`` may look at ``key``; each is a raw position, or a slot number if its flag is set."""
        if query_is_slot:
            return bool(self.slot_sees_slot(query, key) if key_is_slot else self.slot_sees_raw(query, key))
        return bool(self.raw_sees_slot(query, key) if key_is_slot else self.raw_sees_raw(query, key))

    def dense_mask(self, n: int, writer: Writer = "slot") -> Tensor:
        """The definition as a matrix, for small sizes and tests.

        Returns:
            bool ``[n + M, n + M]`` for the slot writer, ``[n, n + M]`` for the token writer; True = may look.
        """
        layout, m = self.resolve(writer), self.num_slots(n)
        rows = [(i, False) for i in range(n)] + [(k, True) for k in range(m if writer == "slot" else 0)]
        columns = [(j, False) for j in range(n)] + [(k, True) for k in range(m)]
        cells = [[layout.visible(q, k, qs, ks) for k, ks in columns] for q, qs in rows]
        return torch.tensor(cells, dtype=torch.bool).view(len(rows), len(columns))
