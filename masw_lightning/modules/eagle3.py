"""Trains an EAGLE-3 head by training-time test: from every position it drafts several steps on its own outputs.

Knows nothing beyond its base. Shapes: B batch, n tokens, h hidden size, J steps, N supervised tokens, Vd draft vocab.
"""

# ruff: noqa: B008 (the defaults are frozen dataclasses)

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.adapter.backbone import Backbone
from masw_lightning.adapter.eagle_head import Eagle3Head
from masw_lightning.adapter.head_storage import head_config
from masw_lightning.attention.unrolled import UnrolledMemory
from masw_lightning.errors import UserError
from masw_lightning.modules.attached_head import Entries
from masw_lightning.modules.base import Batch
from masw_lightning.modules.chunked_sum import chunked_sum
from masw_lightning.modules.draft_vocabulary import frequent_tokens, listed_tokens
from masw_lightning.modules.head_base import HeadModule
from masw_lightning.modules.losses import supervised
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import ValidationConfig


class Eagle3Training(HeadModule):
    """Cross entropy with the target's distribution over the draft vocabulary, at every self-fed step; no feature loss.

    Positions whose likeliest token is outside the draft vocabulary count as zero loss, as in the public code.

    Args:
        backbone: the frozen target.
        draft_vocabulary: tokens the head may draft; at most the target's vocabulary.
        vocabulary_file: a JSON list of that many token ids; ``None`` takes the most frequent of the training data.
        vocabulary_rows: training samples counted for that.
        output_head: the new head's output rows start as the target's, or at random (as in the public code).
        steps: self-fed steps per position, the first included.
        step_decay: weight of a step's loss relative to that of the step before.
        optimizer: AdamW's numbers.
        schedule: warm-up and cosine.
        validation: how tokens per iteration are measured.
        init_from: a head to start from: a ``.ckpt`` of such a run, or a folder in the public layout (weights only). It
            brings its draft vocabulary.
        loss_chunk: tokens whose logits exist at a time, once per step.
        seed: of the new head's weights.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft_vocabulary: int = 32000,
        vocabulary_file: str | None = None,
        vocabulary_rows: int = 2000,
        output_head: Literal["target", "random"] = "target",
        steps: int = 7,
        step_decay: float = 0.8,
        optimizer: OptimizerConfig = OptimizerConfig(lr=5e-5),
        schedule: ScheduleConfig = ScheduleConfig(),
        validation: ValidationConfig = ValidationConfig(),
        init_from: str | None = None,
        loss_chunk: int = 256,
        seed: int = 0,
    ) -> None:
        positive = {"draft_vocabulary": draft_vocabulary, "vocabulary_rows": vocabulary_rows, "steps": steps}
        for name, value in positive.items():
            if value < 1:
                raise UserError(f"{name}={value} is too small: give at least 1.")
        if not 0 < step_decay <= 1:
            raise UserError(f"step_decay={step_decay} is out of range: give a number in (0, 1].")
        own = {
            "draft_vocabulary": draft_vocabulary,
            "vocabulary_file": vocabulary_file,
            "vocabulary_rows": vocabulary_rows,
            "output_head": output_head,
            "steps": steps,
            "step_decay": step_decay,
        }
        self._set_up(backbone, optimizer, schedule, validation, init_from, loss_chunk, seed, **own)
        self.draft_vocabulary, self.vocabulary_file = draft_vocabulary, vocabulary_file
        self.vocabulary_rows, self.output_head = vocabulary_rows, output_head
        self.steps, self.step_decay = steps, step_decay

    def make_head(self, model: PreTrainedModel, like: dict[str, Any] | None) -> Eagle3Head:
        """One layer of the target's sizes. Its draft vocabulary is chosen when training starts."""
        like = like or {}
        config = head_config(model, int(like.get("draft_vocab_size", self.draft_vocabulary)))
        if config.draft_vocab_size > config.vocab_size:
            raise UserError(
                f"draft_vocabulary={config.draft_vocab_size} exceeds the target's {config.vocab_size} tokens: lower it."
            )
        return Eagle3Head(config, qkv_bias=bool(like.get("qkv_bias")))

    # ---- draft vocabulary ----------------------------------------------------------------------------------------
    def on_train_start(self) -> None:
        """Chooses the draft vocabulary of a new head; a loaded one brings its own."""
        head = self._head
        if bool(head.t2d.any()):
            return
        size, vocabulary = len(head.d2t), len(head.t2d)
        if self.vocabulary_file is not None:
            ids = listed_tokens(self.vocabulary_file, size, vocabulary)
        else:
            loader: Any = self.trainer.train_dataloader
            data = loader.dataset if hasattr(loader, "dataset") else loader.data
            ids = frequent_tokens(data, self.vocabulary_rows, size, vocabulary)
        head.choose_vocabulary(ids)
        if self.output_head == "target":
            weight = self.draft.model.get_output_embeddings().weight
            with torch.no_grad():
                head.lm_head.weight.copy_(weight[head.draft_ids.to(weight.device)])

    @property
    def _head(self) -> Eagle3Head:
        assert isinstance(self.draft.head, Eagle3Head)
        return self.draft.head

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """As in ``HeadModule``; a new head has no vocabulary before training starts, so the sanity check passes it by.

        Raises:
            UserError: there is no vocabulary and no training either.
        """
        if bool(self._head.t2d.any()):
            super().validation_step(batch, batch_idx)
        elif not self.trainer.sanity_checking:
            raise UserError("the head has no draft vocabulary yet: give a trained one by --ckpt_path or init_from.")

    def on_validation_epoch_end(self) -> None:
        """As in ``HeadModule``, where there was something to measure."""
        if bool(self._head.t2d.any()):
            super().on_validation_epoch_end()

    # ---- objective -----------------------------------------------------------------------------------------------
    def objective_sum(self, entries: Entries, labels: Tensor) -> tuple[Tensor, int]:
        """See ``HeadModule``. Step ``i``'s row ``t`` is compared with the target's distribution at ``t + 1 + i``.

        So row ``p`` of a step's outputs, moved right by ``1 + i``, belongs to the target's position ``p``; positions
        that a step cannot reach count zero, and each step's mean is over the positions it reaches.
        """
        head, n = self._head, labels.shape[1]
        keep = supervised(labels)
        outputs = head.unroll(entries.embeds, entries.hidden, self.steps, UnrolledMemory())
        moved = [F.pad(out, (0, 0, 1 + i, 0))[:, :n] for i, out in enumerate(outputs)]
        reached = [keep & (torch.arange(n, device=keep.device) > i) for i in range(self.steps)]
        counts = [int(r.sum()) for r in reached]
        weights = torch.stack(
            [r[keep] * (self.step_decay**i * counts[0] / max(c, 1)) for i, (r, c) in enumerate(zip(reached, counts))], 1
        )
        rows = torch.stack([m[keep] for m in moved], 1)  # [N,J,h]
        trained = [head.norm.weight, head.lm_head.weight]
        return chunked_sum(self._part, self.loss_chunk, trained, rows, entries.final[keep], weights), counts[0]

    def _part(self, rows: Tensor, true: Tensor, weights: Tensor) -> Tensor:
        head = self._head
        with torch.no_grad():
            logits = self.draft.target_logits(true).float()
            inside = head.t2d[logits.argmax(-1)]
            wanted = logits[:, head.draft_ids].softmax(-1)
        guessed = head.draft_logits(rows).float()  # [c,J,Vd]
        # -sum(p log q) without a second tensor of that size: log q = logit - logsumexp, and p sums to one
        loss = guessed.logsumexp(-1) - (guessed @ wanted[..., None])[..., 0]
        return (loss * weights * inside[:, None]).sum()
