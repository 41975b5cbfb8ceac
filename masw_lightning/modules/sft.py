"""Fine-tunes pretrained mirrors on instructions (the paper's second stage). Knows nothing beyond its base."""

from masw_lightning.modules.base import MemoryModule


class SupervisedFinetuning(MemoryModule):
    """Adapter training on instructions: only answer tokens are supervised (labels other than -100).

    Starts from a pretraining checkpoint by ``init_from``, which takes weights only; ``ckpt_path`` resumes a fine-tuning
    run and refuses a pretraining checkpoint. Settings and errors are those of ``MemoryModule``.
    """
