"""Trains a draft head on a frozen target: what EAGLE and EAGLE-3 share beyond what all training here shares.

Optimizer, schedule, logging, random streams and checkpoints are ``MemoryModule``'s, whose ``draft`` is here an
``AttachedHead`` and no memory. A checkpoint holds the head alone, under its published names.
Shapes: B batch, n tokens, h hidden size, V vocabulary.
"""

from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.adapter.backbone import Backbone, load_backbone
from masw_lightning.adapter.eagle_head import Eagle3Head, EagleHead
from masw_lightning.adapter.head_storage import EMBEDDINGS, describe_head, published_config
from masw_lightning.errors import UserError
from masw_lightning.modules.attached_head import AttachedHead, Entries, check_same_head, read_head
from masw_lightning.modules.base import Batch, MemoryModule
from masw_lightning.modules.head_validation import HeadValidation
from masw_lightning.modules.randomness import TrainingStream
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import ValidationConfig, primitives


class HeadModule(MemoryModule):
    """Base of ``EagleTraining`` and ``Eagle3Training``."""

    draft: AttachedHead  # type: ignore[assignment]
    validation: HeadValidation

    def _set_up(
        self,
        backbone: Backbone,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        validation: ValidationConfig,
        init_from: str | None,
        loss_chunk: int,
        seed: int,
        **own: Any,
    ) -> None:
        """In place of ``MemoryModule.__init__``, which builds a memory's settings. ``own``: the subclass's."""
        super(MemoryModule, self).__init__()
        if loss_chunk < 1:
            raise UserError(f"loss_chunk={loss_chunk} is not positive: give tokens whose logits may exist at a time.")
        self.backbone_config, self.optimizer, self.schedule = backbone, optimizer, schedule
        self.init_from, self.loss_chunk, self.seed = init_from, loss_chunk, seed
        self.gradient_checkpointing = False  # the frozen target runs without gradients; the head is one layer
        self.validation = HeadValidation(validation, loss_chunk)
        self.trained_length, self.tokens_seen = None, 0
        self._stream, self._clock, self._start_error = TrainingStream(), None, None
        settings = {
            "backbone": backbone,
            "optimizer": optimizer,
            "schedule": schedule,
            "validation": validation,
            "init_from": None,  # it is in the weights by then
            "loss_chunk": loss_chunk,
            "seed": seed,
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
        }
        self.save_hyperparameters(primitives(settings | own), logger=False)
        self.strict_loading = False

    # ---- for subclasses ------------------------------------------------------------------------------------------
    def make_head(self, model: PreTrainedModel, like: dict[str, Any] | None) -> EagleHead | Eagle3Head:
        """A new head for ``model``; ``like``: the sizes of the one whose weights it will take."""
        raise NotImplementedError

    def objective_sum(self, entries: Entries, labels: Tensor) -> tuple[Tensor, int]:
        """The loss, summed over supervised tokens, and their number."""
        raise NotImplementedError

    def perturb(self, entries: Entries) -> Entries:
        """What training does to its input and validation does not."""
        return entries

    # ---- building ------------------------------------------------------------------------------------------------
    def configure_model(self) -> None:
        """Loads the target and makes the head, once; then ``init_from``, unless a checkpoint follows."""
        if "draft" in self._modules:
            return
        model = load_backbone(self.backbone_config)
        try:
            self._make_draft(model, self.init_from)
        except UserError as error:
            if self._trainer is None or self.init_from is None:
                raise
            self._start_error = error  # a checkpoint may follow, and then nothing is missing
            self._make_draft(model, None)

    def _make_draft(self, model: PreTrainedModel, start: str | None) -> None:
        state, config, record = read_head(start) if start is not None else ({}, None, {})
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # one seed, one head, whatever ran before
            torch.manual_seed(self.seed)
            head = self.make_head(model, config)
        draft = AttachedHead(model, head.float())  # AdamW's small steps would be lost in bfloat16
        if start is not None:
            check_same_head(head, model, config or {}, record, start)
            state.pop(EMBEDDINGS, None)  # a frozen copy of the target's
            draft.load_adapter_state_dict(state)
        self.draft = draft
        self._set_trained_length(record.get("trained_length"))

    # ---- training ------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Tensor:
        """The objective's mean over the batch's supervised tokens.

        Raises:
            UserError: no token is supervised.
        """
        entries = self.draft.read(batch["input_ids"])
        total, count = self.objective_sum(self.perturb(entries), batch["labels"])
        if count == 0:
            raise UserError(
                "a batch has no supervised token behind its second (all labels are -100): check the answer field, or "
                "raise the length at which samples are cut."
            )
        return total / count

    def on_fit_start(self) -> None:
        """Says what is trained."""
        self._check_start()
        self.draft.eval()
        ours = sum(p.numel() for p in self.draft.adapter_parameters())
        frozen = sum(p.numel() for p in self.draft.model.parameters())
        rank_zero_info(f"Training an {self.draft.head.kind} head of {ours:,} parameters on a target of {frozen:,}.")

    # ---- validation ----------------------------------------------------------------------------------------------
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The objective and the agreement of the first drafted token, over the supervised tokens."""
        ids, labels = batch["input_ids"], batch["labels"]
        entries = self.draft.read(ids)
        total, count = self.objective_sum(entries, labels)
        if count:
            dict(self.validation.named_metrics())["loss"].update(total.detach(), count)
        self.validation.count(self.draft, entries, ids, labels, self.trainer.world_size)

    def on_validation_epoch_end(self) -> None:
        """Teacher-forces chains along the target's own greedy texts and logs everything."""
        self.validation.finish(self.draft)
        for name, metric in self.validation.named_metrics():
            self.log(f"val/{name}", metric.compute(), prog_bar=name in ("loss", "agreement"))
            metric.reset()

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def _describe(self) -> dict[str, Any]:
        head = self.draft.head
        record = describe_head(head, self.draft.model, self.trained_length, self.backbone_config.path)
        return record | {"config": published_config(head)}

    def _check_record(self, record: dict[str, Any], where: str) -> None:
        if "head" not in record:
            raise UserError(f"{where} holds a memory and no draft head: resume it with the class that trained it.")
        fitting = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if not fitting or record["trained_by"] == type(self).__name__:  # else the base names both classes
            check_same_head(self.draft.head, self.draft.model, record["config"], record, where)
