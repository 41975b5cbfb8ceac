"""Teaches the mirrors on plain text (the paper's pretraining stage). Knows nothing beyond its base."""

from masw_lightning.modules.base import MemoryModule


class AdapterPretraining(MemoryModule):
    """Adapter training on packed documents: every raw token is supervised, conditioned through the memory.

    Settings and errors are those of ``MemoryModule``.
    """
