"""EAGLE-3: a one-layer head on three fused layers of the target, with its own output head over a draft vocabulary.

It drafts a chain (no tree). The target lends its embeddings; its hidden states come from the loop. Draft tokens and
their distributions are in the target's ids, with probability zero for what the draft vocabulary lacks.
"""

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from masw_lightning.adapter.eagle_head import Eagle3Head
from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.eagle import check_head, embedding
from masw_lightning.drafts.head_session import HeadSession


@dataclass
class Eagle3Draft:
    """Drafts for ``target`` with ``head`` (of ``load_head`` or training), on the target's device.

    Raises:
        UserError: the head was made for another hidden size or vocabulary, or is no EAGLE-3 head.
    """

    target: PreTrainedModel
    head: Eagle3Head
    target_layers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_head(self.head, Eagle3Head, self.target)
        self.target_layers = self.head.target_layers(text_config(self.target).num_hidden_layers)

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> HeadSession:
        """See ``DraftPolicy``."""
        embed = embedding(self.head, self.target)
        return HeadSession(self.head, embed, self.head.logits, batch, max_tokens + k)
