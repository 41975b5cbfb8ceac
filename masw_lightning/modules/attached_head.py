"""A draft head beside its frozen target, as training sees it, and where a head's weights are read from.

Offers what ``MemoryModule`` asks of the thing it trains: trainable parameters, a state dict of its own, saving. Knows
heads, a backbone and files; no Lightning and no objective.
Shapes: B batch, n tokens, h hidden size, V vocabulary. Entry ``t`` of ``n - 1`` pairs state ``t`` with token ``t + 1``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from masw_lightning.adapter.eagle_head import DraftHead, Eagle3Head, EagleHead
from masw_lightning.adapter.features import target_states
from masw_lightning.adapter.head_storage import (
    EMBEDDINGS,
    RECORD,
    build_head,
    check_sizes,
    check_state,
    fit_head,
    read_config,
    read_state,
    save_head,
)
from masw_lightning.adapter.storage import check_base
from masw_lightning.attention.interface import output_logits, text_config
from masw_lightning.errors import UserError
from masw_lightning.modules.identity import read_adapter


@dataclass
class Entries:
    """What a head reads of a text: ``embeds, hidden [B,n-1,h]``; ``final [B,n,h]``, the target's last hidden state."""

    embeds: Tensor
    hidden: Tensor
    final: Tensor


class AttachedHead(nn.Module):
    """``head`` on the frozen ``model``."""

    def __init__(self, model: PreTrainedModel, head: EagleHead | Eagle3Head) -> None:
        super().__init__()
        self.model, self.head = model.requires_grad_(False), head
        self.trained_length: int | None = None

    def read(self, input_ids: Tensor) -> Entries:
        """The target's forward over ``[B,n]`` without gradients, and the entries made of it."""
        count = int(text_config(self.model).num_hidden_layers)
        *states, final = target_states(self.model, input_ids, (*self.head.target_layers(count), count))
        embeds = cast(Tensor, self.model.get_input_embeddings()(input_ids[:, 1:]))
        fused = self.head.fuse([state[:, :-1] for state in states])
        return Entries(embeds.to(self.head.dtype), fused, final)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's outputs ``[...,h] -> [...,V]``, in the target's ids."""
        if isinstance(self.head, Eagle3Head):
            return self.head.logits(hidden)
        return self.target_logits(hidden)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's hidden states, or predicted ones, ``[...,h] -> [...,V]`` by the target's own head."""
        return output_logits(self.model, hidden.to(self.model.dtype))

    # ---- what is ours --------------------------------------------------------------------------------------------
    def adapter_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for p in self.head.parameters() if p.requires_grad]

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """The head's tensors under their published names; the target's embeddings are not among them."""
        return {name: tensor for name, tensor in self.head.state_dict().items() if name != EMBEDDINGS}

    def load_adapter_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load ``adapter_state_dict``; missing, surplus or misshapen tensors raise ``UserError`` and change nothing."""
        check_state(self.head, state, "the head")
        with torch.no_grad():
            for name, tensor in self.adapter_state_dict().items():
                tensor.copy_(state[name])

    def save_pretrained(
        self,
        directory: str | Path,
        trained_length: int | None = None,
        base: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the head in the public layout (see ``adapter.head_storage``)."""
        save_head(self.head, self.model, directory, trained_length, base, dtype)


def read_head(path: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """``(tensors, sizes as in config.json, record)`` of a folder in the public layout or of a training checkpoint.

    Raises:
        UserError: nothing usable there, or a checkpoint of something else.
    """
    if Path(path).is_dir():
        config = read_config(path)
        record = config.pop(RECORD, {})
        return read_state(path), config, record
    state, record = read_adapter(path)
    if "head" not in record:
        raise UserError(f"{path} holds no draft head: give a checkpoint of EagleTraining or Eagle3Training.")
    return state, record["config"], record


def open_head(path: str, target: PreTrainedModel) -> EagleHead | Eagle3Head:
    """The head at ``path`` (as in ``read_head``), ready to draft for ``target``.

    Raises:
        UserError: nothing usable there, or a head of another target.
    """
    state, config, record = read_head(path)
    head = build_head(config, state, path)
    head.trained_length = record.get("trained_length")
    fit_head(head, target, record, path)
    return head


def check_same_head(
    head: DraftHead, model: PreTrainedModel, config: dict[str, Any], record: dict[str, Any], where: str
) -> None:
    """Raise ``UserError`` unless stored sizes and record belong to this kind of head on this model.

    A public head has an empty record.
    """
    check_sizes(config, model, where)
    if record.get("head", head.kind) != head.kind:
        raise UserError(
            f"{where} holds a head of kind '{record['head']}', and this run trains '{head.kind}': use the training "
            "class of that kind."
        )
    if "base" in record:
        check_base(model, record["base"], where)
