"""A Hugging Face model with one of our caches: prefill a prompt, read a few tokens, take some back.

``FullRunner`` keeps every token (targets, full-KV drafts); ``MemoryRunner`` keeps a compact memory (windows, strided
raw entries, MASW).
Logits are computed for the positions asked for only. Knows no policy, no loop and no tokenizer.
Shapes: B batch, n prompt tokens, T new tokens, P slots written in a forward, h hidden size, V vocab.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from masw_lightning.adapter.features import HiddenStates
from masw_lightning.adapter.inject import MemoryDraft, window_hidden_states
from masw_lightning.adapter.mirror import SlotRows
from masw_lightning.adapter.shallow import first_layers
from masw_lightning.adapter.teacher_forced import written_slots
from masw_lightning.attention.interface import output_logits, run_backbone
from masw_lightning.cache.base import KVCache, KVShape
from masw_lightning.cache.compact import CompactCache
from masw_lightning.cache.full import FullCache
from masw_lightning.layout import MemoryLayout

Cache = TypeVar("Cache", bound=KVCache)


class CachedModel(Generic[Cache]):
    """A model with a cache that every layer's attention goes through; see ``drafts.base.Runner``."""

    model: PreTrainedModel
    cache: Cache

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for keys and values."""
        return self.cache.nbytes

    def hidden(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; hidden states ``[B,T,h]`` after the final norm."""
        raise NotImplementedError

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Read a prompt ``[B,n]``; the last position's hidden state ``[B,h]``."""
        return self.hidden(input_ids)[:, -1]

    def logits(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; logits ``[B,T,V]``."""
        return output_logits(self.model, self.hidden(tokens))

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; logits ``[B,V]`` after the last."""
        return output_logits(self.model, self.hidden(tokens)[:, -1])

    def rollback(self, tokens: int | Tensor) -> None:
        """Forget the newest tokens, one number or one per row."""
        self.cache.rollback(tokens)


class FullRunner(CachedModel[FullCache]):
    """A model on a full cache of ``capacity`` tokens per row. As a target it keeps its own sliding-window layers."""

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int) -> None:
        self.model = model
        self.cache = FullCache(KVShape.of(model), batch, capacity)
        self._states: HiddenStates | None = None
        self.states: tuple[Tensor, ...] = ()

    def keep_states(self, layers: tuple[int, ...]) -> None:
        """From now on ``states`` holds the newest forward's hidden states ``[B,T,h]`` at ``layers``; ``()``: none."""
        if layers != (self._states.wanted if self._states else ()):
            self._states = HiddenStates(self.model, layers) if layers else None
        self.states = ()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``; hidden states ``[B,T,h]`` after the final norm."""
        positions = self.cache.begin(tokens.shape[1]).to(tokens.device)
        embeds = self.model.get_input_embeddings()(tokens)
        with self._states.reading() if self._states else nullcontext():
            hidden = run_backbone(self.model, embeds, positions, self.cache)
        self.cache.end()
        if self._states:
            self.states = self._states.collect(hidden)
            self._states.clear()
        return hidden


class _Step:
    """The attention of one decoding forward through a compact cache."""

    def __init__(self, cache: CompactCache, rows: SlotRows, owner: object) -> None:
        self.cache, self.rows, self.owner = cache, rows, owner

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionMemory``. The layout replaces a backbone's own sliding window."""
        if self.rows.written is not None:
            slot_k, slot_v = written_slots(self.rows, k, v)
            k, v = torch.cat((k, slot_k), 2), torch.cat((v, slot_v), 2)
        return self.cache.attend(int(module.layer_idx), q, k, v, scale)  # type: ignore[arg-type]


class MemoryRunner(CachedModel[CompactCache]):
    """A model on a compact memory.

    Args:
        source: a ``MemoryDraft``, or any model: its slots, if the layout has any, are raw entries.
        layout: of that memory; taken from a ``MemoryDraft`` when ``None``.
        max_tokens: longest text of a row.
        layers: run the first so many layers only; ``None``: all.
    """

    def __init__(
        self,
        source: MemoryDraft | PreTrainedModel,
        layout: MemoryLayout | None,
        batch: int,
        max_tokens: int,
        layers: int | None = None,
    ) -> None:
        self.memory = source if isinstance(source, MemoryDraft) else None
        self.model = source.model if isinstance(source, MemoryDraft) else source
        writer = source.writer if isinstance(source, MemoryDraft) else "token"
        chosen = source.layout if isinstance(source, MemoryDraft) else layout
        assert chosen is not None
        shape = KVShape.of(self.model)
        if layers is not None:
            self.model = first_layers(self.model, layers)
            shape = replace(shape, devices=shape.devices[:layers])
        self.cache = CompactCache(chosen, writer, shape, batch, max_tokens)

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Read a prompt ``[B,n]``; the last position's hidden state ``[B,h]``."""
        if self.memory is None:
            return window_hidden_states(self.model, input_ids, self.cache.layout, self.cache)[:, -1]
        return self.memory.hidden_states(input_ids, self.cache, self.model)[:, -1]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Read ``tokens [B,T]``, writing the slots they complete; hidden states ``[B,T,h]``."""
        t = tokens.shape[1]
        positions, slots, completing = (x.to(tokens.device) for x in self.cache.begin(t))
        embeds = self.model.get_input_embeddings()(tokens)
        rows = SlotRows(t)
        if slots.shape[1]:
            rows.slots = slots.shape[1]
            if self.memory is not None and self.memory.writer == "slot":
                slot_rows, at = self.memory.slot_rows(embeds, completing, self.cache.layout.boundary(slots))
                embeds, positions = torch.cat((embeds, slot_rows), 1), torch.cat((positions, at), 1)
            else:
                rows.written = completing
        hidden = run_backbone(self.model, embeds, positions, _Step(self.cache, rows, self.memory))
        self.cache.end()
        return hidden[:, :t]
