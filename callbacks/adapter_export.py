"""Writes the trained adapter in Hugging Face form when training ends: a folder for ``load_memory`` and ``init_from``.

Knows the module's draft and where the run writes; a checkpoint of Lightning's stays what a run is resumed from.
"""

from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from masw_lightning.modules import MemoryModule


class AdapterExport(Callback):
    """Saves ``masw.safetensors`` and its record after a fit.

    Args:
        folder: relative to ``trainer.default_root_dir``.
        dtype: of the weights in the file; ``None``: as they were trained, that is float32. bfloat16 halves the file.
    """

    def __init__(self, folder: str = "adapter", dtype: Literal["float32", "bfloat16", "float16"] | None = None) -> None:
        self.folder, self.dtype = folder, dtype

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the folder from rank 0."""
        if trainer.is_global_zero and isinstance(pl_module, MemoryModule) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            pl_module.draft.save_pretrained(
                Path(trainer.default_root_dir) / self.folder,
                trained_length=pl_module.trained_length,
                base=pl_module.backbone_config.path,
                dtype=None if self.dtype is None else getattr(torch, self.dtype),
            )
