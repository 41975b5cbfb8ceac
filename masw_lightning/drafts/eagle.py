"""EAGLE, first version: a one-layer head that predicts the target's next hidden state, drafting a chain (no tree).

The target lends its embeddings and its output head; its hidden states come from the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from masw_lightning.adapter.eagle_head import DraftHead, EagleHead
from masw_lightning.adapter.head_storage import check_head_fits
from masw_lightning.attention.interface import output_logits, text_config
from masw_lightning.drafts.head_session import HeadSession
from masw_lightning.errors import UserError


@dataclass
class EagleDraft:
    """Drafts for ``target`` with ``head`` (of ``load_head`` or training), on the target's device.

    Raises:
        UserError: the head was made for another hidden size or vocabulary, or is no EAGLE head.
    """

    target: PreTrainedModel
    head: EagleHead
    target_layers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_head(self.head, EagleHead, self.target)
        self.target_layers = self.head.target_layers(text_config(self.target).num_hidden_layers)

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> HeadSession:
        """See ``DraftPolicy``."""
        return HeadSession(self.head, embedding(self.head, self.target), self._logits, batch, max_tokens + k)

    def _logits(self, hidden: Tensor) -> Tensor:
        return output_logits(self.target, hidden.to(self.target.dtype))


def embedding(head: DraftHead, target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The embeddings a head reads: its own where it brought other ones, else the target's."""
    return head.embed_tokens if head.embed_tokens is not None else target.get_input_embeddings()


def check_head(head: DraftHead, kind: type[DraftHead], target: PreTrainedModel) -> None:
    """Raise ``UserError`` unless ``head`` is of ``kind`` and fits ``target``."""
    if not isinstance(head, kind):
        raise UserError(
            f"the head is of kind '{head.kind}', and '{kind.kind}' is asked for: use the policy (or method) that is "
            "named after the head."
        )
    check_head_fits(head, target)
