"""Trains an EAGLE head (first version): regress the target's next hidden state, match the token distribution it gives.

Knows nothing beyond its base. Shapes: B batch, n tokens, h hidden size, N supervised tokens.
"""

# ruff: noqa: B008 (the defaults are frozen dataclasses)

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.adapter.backbone import Backbone
from masw_lightning.adapter.eagle_head import EagleHead
from masw_lightning.adapter.head_storage import head_config
from masw_lightning.attention.unrolled import UnrolledMemory
from masw_lightning.errors import UserError
from masw_lightning.modules.attached_head import Entries
from masw_lightning.modules.chunked_sum import chunked_sum
from masw_lightning.modules.head_base import HeadModule
from masw_lightning.modules.losses import supervised
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import ValidationConfig


class EagleTraining(HeadModule):
    """Smooth L1 between predicted and true hidden states, and soft cross entropy of the distributions read from them.

    Args:
        backbone: the frozen target.
        feature_weight: of the smooth L1 loss.
        token_weight: of the cross entropy.
        noise: hidden states read in training get ``(U[0,1) - 0.5) * noise * 512 / length``; 0 for none.
        optimizer: AdamW's numbers.
        schedule: warm-up and cosine.
        validation: how tokens per iteration are measured.
        init_from: a head to start from: a ``.ckpt`` of such a run, or a folder in the public layout (weights only).
        loss_chunk: tokens whose logits exist at a time.
        seed: of the new head's weights.
    """

    def __init__(
        self,
        backbone: Backbone,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.2,
        optimizer: OptimizerConfig = OptimizerConfig(lr=3e-5),
        schedule: ScheduleConfig = ScheduleConfig(),
        validation: ValidationConfig = ValidationConfig(),
        init_from: str | None = None,
        loss_chunk: int = 1024,
        seed: int = 0,
    ) -> None:
        own = {"feature_weight": feature_weight, "token_weight": token_weight, "noise": noise}
        for name, value in own.items():
            if value < 0:
                raise UserError(f"{name}={value} is negative: give 0 or more.")
        self._set_up(backbone, optimizer, schedule, validation, init_from, loss_chunk, seed, **own)
        self.feature_weight, self.token_weight, self.noise = feature_weight, token_weight, noise

    def make_head(self, model: PreTrainedModel, like: dict[str, Any] | None) -> EagleHead:
        """One layer of the target's sizes; biases as the given head has them."""
        like = like or {}
        return EagleHead(head_config(model), bias=bool(like.get("bias")), qkv_bias=bool(like.get("qkv_bias")))

    def perturb(self, entries: Entries) -> Entries:
        """Uniform noise on the hidden states, weaker in longer texts (as the public code adds it)."""
        if not self.noise:
            return entries
        scale = self.noise * 512 / entries.final.shape[1]
        return replace(entries, hidden=entries.hidden + (torch.rand_like(entries.hidden) - 0.5) * scale)

    def objective_sum(self, entries: Entries, labels: Tensor) -> tuple[Tensor, int]:
        """See ``HeadModule``: row ``t`` of the output is compared with the target's state at ``t + 1``."""
        keep = supervised(labels)[:, 1:]
        outputs = self.draft.head.unroll(entries.embeds, entries.hidden, 1, UnrolledMemory())[0]
        rows, true = outputs[keep], entries.final[:, 1:][keep]
        return chunked_sum(self._part, self.loss_chunk, [], rows, true), int(keep.sum())

    def _part(self, guessed: Tensor, true: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.draft.target_logits(true).float().softmax(-1)
        features = F.smooth_l1_loss(guessed.float(), true.float(), reduction="none").mean(-1).sum()
        tokens = -(wanted * self.draft.target_logits(guessed).float().log_softmax(-1)).sum()
        return self.feature_weight * features + self.token_weight * tokens
