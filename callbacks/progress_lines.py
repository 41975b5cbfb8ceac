"""Training progress as plain lines, for logs and terminals that a redrawn bar would flood.

Knows what the module has logged; computes nothing itself. One line per ``every_n_steps`` optimizer steps, one per
validation.
"""

import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

SHOWN_TRAIN = ("train/loss", "train/tokens_per_s")
SHOWN_VAL = (
    "val/loss",
    "val/loss_window",
    "val/loss_full",
    "val/agreement",
    "val/agreement_window",
    "val/overlap",
    "val/overlap_window",
    "val/tokens_per_iteration",
    "val/tokens_per_iteration_window",
)


class ProgressLines(ProgressBar):
    """Takes the place of Lightning's progress bar.

    Args:
        every_n_steps: optimizer steps between two lines.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self._on = True
        self._begun = 0.0
        self._first_step = 0

    def disable(self) -> None:
        """Lightning's call on every rank but the first."""
        self._on = False

    def enable(self) -> None:
        """Lightning's call when it wants lines again."""
        self._on = True

    def print(self, *args: object, sep: str = " ") -> None:
        """One line, at once."""
        if self._on:
            print(*args, sep=sep, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._begun, self._first_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """A line every so many optimizer steps, and after the last."""
        step, last = trainer.global_step, trainer.estimated_stepping_batches
        accumulating = (batch_idx + 1) % trainer.accumulate_grad_batches != 0 and not trainer.is_last_batch
        if accumulating or (step % self.every_n_steps and step != last):
            return
        seconds = time.monotonic() - self._begun
        left = seconds / max(step - self._first_step, 1) * (last - step)
        remaining = f"  {_clock(left)} left" if left < float("inf") else ""
        total = f"/{int(last)}" if last < float("inf") else ""
        self.print(f"step {step}{total}  {_values(trainer, SHOWN_TRAIN)}  {_clock(seconds)}{remaining}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One line per validation."""
        if not trainer.sanity_checking:
            self.print(f"step {trainer.global_step}  {_values(trainer, SHOWN_VAL)}")


def _values(trainer: Trainer, names: tuple[str, ...]) -> str:
    logged = trainer.callback_metrics
    parts = []
    for name in names:
        value = logged.get(name)
        if isinstance(value, torch.Tensor):
            parts.append(f"{name} {value.item():.0f}" if name.endswith("_per_s") else f"{name} {value.item():.3f}")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
