"""Trains a memory adapter on a frozen backbone and measures whether its slots help. The shared half of both modules.

Knows batches (``input_ids``, ``labels``, ``source``), a ``MemoryDraft`` and Lightning's hooks. Knows no data files, no
draft policies and no decoding; ``checkpointed.py`` says what a checkpoint is.

Shapes: B batch, n tokens, h hidden size, V vocabulary.
"""

# ruff: noqa: B008 (the defaults are frozen dataclasses)

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from masw_lightning.adapter.backbone import (
    Backbone,
    check_same_tokenizer,
    exact_rotary,
    load_backbone,
    load_tokenizer,
)
from masw_lightning.adapter.inject import attach_memory
from masw_lightning.attention.interface import output_logits
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout
from masw_lightning.modules.checkpointed import CheckpointedAdapter
from masw_lightning.modules.losses import distillation_loss, next_token_loss
from masw_lightning.modules.modes import checkpoint_activations
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import AdapterConfig, ValidationConfig, primitives
from masw_lightning.modules.validation import Validation

Batch = Mapping[str, Any]  # input_ids int64 [B,n], labels int64 [B,n] (-100 = not supervised, not shifted), source [B]


class MemoryModule(CheckpointedAdapter):
    """Base of ``AdapterPretraining`` and ``SupervisedFinetuning``.

    Args:
        backbone: the frozen model; it is the draft's body and, by default, the teacher.
        memory: the memory's layout.
        adapter: what is trained.
        objective: ``"next_token"`` (equation 5) or ``"distill"`` (KL from full attention to the memory).
        teacher: another model of the same vocabulary to distill from; ``None`` is the backbone with full attention.
        optimizer: AdamW's numbers.
        schedule: warm-up and cosine.
        validation: how tokens per iteration are measured.
        init_from: adapter weights to start from, a ``.ckpt`` or a folder written by ``save_pretrained``.
        gradient_checkpointing: keep only each layer's input for the backward pass; on a CPU, also give freed
            memory back to the system between layers.
        loss_chunk: tokens whose logits exist at a time.
    """

    def __init__(
        self,
        backbone: Backbone,
        memory: MemoryLayout = MemoryLayout(),
        adapter: AdapterConfig = AdapterConfig(),
        objective: Literal["next_token", "distill"] = "next_token",
        teacher: Backbone | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        validation: ValidationConfig = ValidationConfig(),
        init_from: str | None = None,
        gradient_checkpointing: bool = False,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__()
        if objective not in ("next_token", "distill"):
            raise UserError(f"objective={objective!r} is unknown: use 'next_token' or 'distill'.")
        if teacher is not None and objective != "distill":
            raise UserError(f"a teacher ({teacher.path!r}) is only used by objective='distill', not by {objective!r}.")
        if loss_chunk < 1:
            raise UserError(f"loss_chunk={loss_chunk} is not positive: give tokens whose logits may exist at a time.")
        self.backbone_config, self.memory, self.adapter = backbone, memory, adapter
        self.objective, self.teacher_config = objective, teacher
        self.optimizer, self.schedule, self.init_from = optimizer, schedule, init_from
        self.gradient_checkpointing, self.loss_chunk = gradient_checkpointing, loss_chunk
        self.validation = Validation(validation, loss_chunk)
        self._clock: float | None = None
        # Primitives only, so that a checkpoint loads with weights_only=True; the same dictionary rebuilds the module.
        settings = {
            "backbone": backbone,
            "memory": memory,
            "adapter": adapter,
            "objective": objective,
            "teacher": teacher,
            "optimizer": optimizer,
            "schedule": schedule,
            "validation": validation,
            "init_from": None,  # it is in the weights by then
            "gradient_checkpointing": gradient_checkpointing,
            "loss_chunk": loss_chunk,
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
        }
        self.save_hyperparameters(primitives(settings), logger=False)

    # ---- building ------------------------------------------------------------------------------------------------
    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer; also what the data module uses unless it is told another."""
        config = self.backbone_config
        return load_tokenizer(config.path, config.gguf_file, config.revision)

    def setup(self, stage: str) -> None:
        """Refuses autocast.

        Raises:
            UserError: the trainer's precision is a mixed one.
        """
        if isinstance(self.trainer.precision_plugin, MixedPrecision):
            raise UserError(
                f"trainer precision={self.trainer.precision} casts operation by operation, which has no use here: set "
                "precision 32-true and the backbone's dtype to bfloat16 (its mirrors are trained in float32)."
            )

    def configure_model(self) -> None:
        """Loads the backbone and attaches the memory, once; then ``init_from``, unless a checkpoint follows."""
        if "draft" in self._modules:
            return
        fitting = self._trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        self.draft = attach_memory(
            load_backbone(self.backbone_config),
            self.memory,
            writer=self.adapter.writer,
            mirror=self.adapter.mirror,
            init=self.adapter.init,
            train_slot_embedding=self.adapter.train_slot_embedding,
            slot_input=self.adapter.slot_input,
            seed=self.adapter.seed,
            dtype=torch.float32 if fitting else None,  # AdamW's small steps would be lost in bfloat16 mirrors
        )
        self.memory = self.draft.layout
        if self.init_from is not None:
            self._start_from(self.init_from)
        if self.teacher_config is not None and fitting:
            config = self.teacher_config
            names = (f"teacher {config.path!r}", f"backbone {self.backbone_config.path!r}")
            check_same_tokenizer(load_tokenizer(config.path, config.gguf_file, config.revision), self.tokenizer, names)
            self.teacher: PreTrainedModel = load_backbone(config)

    def _apply(self, fn: Any, recurse: bool = True) -> "MemoryModule":
        # Precision plugins cast the whole module through here; rotary frequencies have to stay exact.
        with exact_rotary(self):
            super()._apply(fn, recurse)
        return self

    def configure_optimizers(self) -> Any:
        """AdamW over the adapter's trainable parameters, and the schedule stepped after every optimizer step."""
        optimizer = self.optimizer.build(self.draft.adapter_parameters())
        steps = self.schedule.total_steps or self.trainer.estimated_stepping_batches
        scheduler = self.schedule.build(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # ---- training ------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Tensor:
        """The objective's mean over the batch's supervised tokens, in nats, through the memory.

        Raises:
            UserError: no token is supervised.
        """
        ids, labels = batch["input_ids"], batch["labels"]
        hidden = self.draft.hidden_states(ids)
        if self.objective == "next_token":
            return next_token_loss(self.draft.logits, hidden, labels, self.loss_chunk)
        if self.teacher_config is None:
            teacher_hidden, teacher_head = self.draft.full_hidden_states(ids), self.draft.logits
        else:
            with torch.no_grad():
                teacher_hidden = self.teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
            teacher_head = self._teacher_logits
        return distillation_loss(self.draft.logits, hidden, teacher_head, teacher_hidden, labels, self.loss_chunk)

    def _teacher_logits(self, hidden: Tensor) -> Tensor:
        return output_logits(self.teacher, hidden)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step; stops the run if the loss is not a number.

        Raises:
            UserError: the loss is NaN or infinite (names step and source), or no token is supervised (names source).
        """
        where = ", ".join(dict.fromkeys(batch["source"]))
        try:
            loss = self.loss(batch)
        except UserError as error:
            raise UserError(f"step {self.global_step}, {where}: {error}") from error
        if not torch.isfinite(loss):
            raise UserError(
                f"the training loss is {loss.item()} at step {self.global_step} on {where}: lower the learning rate, "
                "clip gradients, or look at that source; checkpoints written so far are kept."
            )
        if not loss.requires_grad:  # rows so short that no slot was written: nothing to learn from, and no error
            loss = loss + sum(p.sum() * 0.0 for p in self.draft.adapter_parameters())
        # Counted here, since a checkpoint may be written before this module's own end-of-batch hook.
        self.tokens_seen += batch["input_ids"].numel() * self.trainer.world_size
        self._set_trained_length(batch["input_ids"].shape[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_fit_start(self) -> None:
        """Sets the modes on purpose: Lightning leaves a loaded backbone in eval mode, which turns checkpointing off."""
        self._check_start()
        self.draft.eval()
        if self.gradient_checkpointing:
            checkpoint_activations(self.draft.model, True)
        ours = sum(p.numel() for p in self.draft.adapter_parameters())
        frozen = sum(p.numel() for p in self.draft.model.parameters())
        rank_zero_info(
            f"Training {ours:,} adapter parameters ({self.adapter.writer} writer, {self.objective}) on a frozen "
            f"backbone of {frozen:,}: S={self.memory.sink}, W={self.memory.window}, r={self.memory.ratio}."
        )

    def on_fit_end(self) -> None:
        """Gives the backbone its ordinary forward back."""
        if self.gradient_checkpointing:
            checkpoint_activations(self.draft.model, False)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """The step's random numbers continue those of the step before it."""
        self._stream.step_starts()
        if self._clock is None:
            self._clock = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Times tokens, over all ranks. Loading counts as time, validation does not."""
        self._stream.step_ends()
        tokens = batch["input_ids"].numel() * self.trainer.world_size
        now = time.perf_counter()
        seconds, self._clock = now - (self._clock or now), now
        self.log("train/tokens_per_s", tokens / max(seconds, 1e-9), prog_bar=True)
        self.log("train/tokens_seen", float(self.tokens_seen))
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the gradient's norm as it is before clipping."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.log("train/grad_norm", get_total_norm(gradients))

    # ---- validation ----------------------------------------------------------------------------------------------
    def on_validation_start(self) -> None:
        """Validation is no training time."""
        self._check_start()
        self._clock = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Losses of memory, full attention and bare window, and agreement, over the supervised tokens."""
        self.validation.step(self.draft, batch["input_ids"], batch["labels"], self.trainer.world_size)

    def on_validation_epoch_end(self) -> None:
        """Teacher-forces the backbone's own greedy texts and logs everything."""
        self.validation.finish_epoch(self.draft)
        for name, metric in self.validation.named_metrics():
            self.log(f"val/{name}", metric.compute(), prog_bar=name in ("loss", "agreement"))
            metric.reset()

    def on_predict_start(self) -> None:
        """Refuses to go on without the weights it was to start from."""
        self._check_start()

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        """Nothing: the prediction callback decodes."""
