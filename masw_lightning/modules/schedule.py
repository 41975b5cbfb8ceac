"""Optimizer and learning rate, as plain numbers a YAML can hold. Knows parameters and step counts, no model.

The rate rises linearly over ``warmup_steps`` and then falls along a cosine to ``min_ratio`` of its peak at the last
step. Steps are optimizer steps, and the schedule advances after every one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from masw_lightning.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW over the trainable adapter parameters.

    Args:
        lr: peak learning rate.
        betas: AdamW's two decay rates.
        weight_decay: pulls mirrors towards zero, that is, away from the copies they start as; hence 0 by default.
        eps: AdamW's epsilon.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError(f"optimizer lr={self.lr} is not positive: give the peak learning rate, for example 1.0e-3.")
        if self.weight_decay < 0:
            raise UserError(f"optimizer weight_decay={self.weight_decay} is negative: give 0 or more.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer betas={tuple(self.betas)} are out of range: both must be in [0, 1).")

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        """The optimizer over ``parameters``."""
        first, second = self.betas
        return AdamW(list(parameters), lr=self.lr, betas=(first, second), weight_decay=self.weight_decay, eps=self.eps)


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then cosine.

    Args:
        warmup_steps: optimizer steps from 0 to the peak rate.
        total_steps: step at which the cosine ends; ``None`` takes the trainer's own number of steps.
        min_ratio: rate at the end, as a share of the peak.
    """

    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"schedule warmup_steps={self.warmup_steps} is negative: give 0 or more optimizer steps.")
        if self.total_steps is not None and self.total_steps <= 0:
            raise UserError(f"schedule total_steps={self.total_steps} is not positive: give steps, or null.")
        if not 0 <= self.min_ratio <= 1:
            raise UserError(f"schedule min_ratio={self.min_ratio} is out of range: give a share of the peak in [0, 1].")

    def build(self, optimizer: Optimizer, trainer_steps: float) -> LRScheduler:
        """The schedule for ``optimizer``.

        Raises:
            UserError: the number of steps is unknown (``max_steps`` not set with endless data, and no
                ``total_steps``), or the warm-up is as long as the whole run.
        """
        total = self.total_steps if self.total_steps is not None else trainer_steps
        if total == float("inf"):
            raise UserError(
                "the learning rate schedule does not know where to end: set trainer max_steps, or schedule total_steps."
            )
        if self.warmup_steps >= total > 0:
            raise UserError(
                f"schedule warmup_steps={self.warmup_steps} leaves nothing of the run's {int(total)} steps: lower it, "
                "or train longer."
            )
        return LambdaLR(optimizer, lambda step: self.share(step, max(1, int(total))))

    def share(self, step: int, total: int) -> float:
        """The rate after ``step`` optimizer steps, as a share of the peak; ``min_ratio`` after ``total``."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, total - self.warmup_steps))
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
