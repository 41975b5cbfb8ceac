"""Draft with a model's whole history: the classic speculative-decoding draft, whose cache grows with the prefix."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.base import ChainSession
from masw_lightning.drafts.runner import FullRunner


@dataclass
class FullKVDraft:
    """``model`` on its full, uncompressed cache. It may be the target's own object."""

    model: PreTrainedModel
    target_layers: tuple[int, ...] = ()

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``."""
        return ChainSession(FullRunner(self.model, batch, max_tokens + k), text_config(self.model).vocab_size)
