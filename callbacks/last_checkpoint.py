"""One checkpoint to resume from: written every so many steps and when training ends, at ``max_steps`` or ``max_time``.

Lightning's ``ModelCheckpoint`` with a step interval leaves out what comes after the last multiple of it. This one keeps
a single file, always the newest; use ``ModelCheckpoint`` beside it to keep the best.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from masw_lightning.errors import UserError


class LastCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt``.

    Args:
        every_n_steps: optimizer steps between two writes.
        folder: relative to ``trainer.default_root_dir``.

    Raises:
        UserError: ``every_n_steps`` is not positive.
    """

    def __init__(self, every_n_steps: int = 100, folder: str = "checkpoints") -> None:
        if every_n_steps < 1:
            raise UserError(f"LastCheckpoint every_n_steps={every_n_steps} is not positive: give a number of steps.")
        self.every_n_steps, self.folder = every_n_steps, folder
        self._saved: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a run was resumed from needs no second copy."""
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes at every multiple of the interval."""
        if trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes what came after."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._saved or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._saved = trainer.global_step
        trainer.save_checkpoint(Path(trainer.default_root_dir) / self.folder / "last.ckpt", weights_only=False)
