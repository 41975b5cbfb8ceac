"""What every cache offers, and what it needs to know of a model: the shapes of its keys and values.

Contract: ``begin(T)`` describes a forward of ``T`` new tokens per row, ``attend`` (once per layer) stores their keys
and values and attends, ``end()`` counts them; ``rollback(tokens)`` takes tokens back; ``mark()`` is the count per row;
``nbytes`` the bytes really allocated. A forward that fails between ``begin`` and ``end`` changes no counter.
Shapes: B batch, T new tokens, G KV heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.attention.interface import attention_modules, text_config
from masw_lightning.errors import UserError


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one model: layers, KV heads, head dim, dtype, device per layer."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "KVShape":
        """Read the shapes off ``model``; each layer's cache lives where its attention lives."""
        config = text_config(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        devices = tuple(next(m.parameters()).device for m in attention_modules(model))
        return cls(config.num_key_value_heads, head_dim, model.dtype, devices)

    def buffers(self, batch: int, cells: int) -> list[tuple[Tensor, Tensor]]:
        """Zeroed key and value buffers ``[B,G,cells,D]``, one pair per layer. Zeros: a masked cell must stay finite."""
        shape = (batch, self.kv_heads, cells, self.head_dim)
        return [
            (torch.zeros(shape, dtype=self.dtype, device=d), torch.zeros(shape, dtype=self.dtype, device=d))
            for d in self.devices
        ]


class KVCache:
    """What all caches are: buffers, a count of tokens per row, and a forward that is announced before it is counted.

    Args:
        buffers: key and value buffers, one pair per layer.  batch: rows.
    """

    def __init__(self, buffers: list[tuple[Tensor, Tensor]], batch: int) -> None:
        self.buffers = buffers
        self.lengths = torch.zeros(batch, dtype=torch.long)  # tokens of text read per row, kept or not
        self._new = 0  # tokens per row of the announced forward

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for keys and values."""
        return storage_bytes(self.buffers)

    def mark(self) -> Tensor:
        """Tokens of text read per row ``[B]``."""
        return self.lengths.clone()

    def rollback(self, tokens: int | list[int] | Tensor) -> None:
        """Forget the newest ``tokens``, one number or one per row, in O(1)."""
        raise NotImplementedError

    def end(self) -> None:
        """Count the announced tokens, once every layer has stored them."""
        self.lengths = self.lengths + self._new
        self._new = 0


def storage_bytes(buffers: list[tuple[Tensor, Tensor]]) -> int:
    """Bytes of the storages behind the buffers, each counted once (a slice keeps its whole parent alive)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for pair in buffers for t in pair}
    return sum(storages.values())


def rows_to_take_back(tokens: "int | list[int] | Tensor", lengths: Tensor) -> Tensor:
    """``tokens`` as a count per row ``[B]``, checked against what the rows hold."""
    take = torch.as_tensor(tokens, dtype=lengths.dtype).expand_as(lengths)
    if bool((take < 0).any()) or bool((take > lengths).any()):
        raise UserError(f"cannot roll back {take.tolist()} tokens: the cache holds {lengths.tolist()} per row.")
    return take
