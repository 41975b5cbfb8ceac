"""The target's own weights as the draft, on a compact memory: no second model, and no weight copied.

The draft is the whole target, or its first layers under its own final norm and head, reading its history through a
memory trained on the target, or, without training, through a strided cache. Verification is untouched: the target
reads its full cache with all of its layers.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.adapter.shallow import first_layers
from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.base import ChainSession, check_draft_width
from masw_lightning.drafts.runner import MemoryRunner
from masw_lightning.drafts.strided import strided
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout


@dataclass
class SelfSpeculativeDraft:
    """The target drafting for itself.

    Args:
        target: the model that verifies; it stays as it is.
        layout: of the strided cache, see ``StridedDraft``; ``None`` takes the memory's.
        layers: draft with the target's first so many layers; ``None``: all of them.
        memory: a memory attached to this very target; with ``layers``, its mirrors of those layers are used.

    Raises:
        UserError: fewer than one layer or more than the target has; neither layout nor memory; a memory of another
            model, or of another layout than the one given.
    """

    target: PreTrainedModel
    layout: MemoryLayout | None = None
    layers: int | None = None
    memory: MemoryDraft | None = None
    target_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.layers is not None:
            first_layers(self.target, self.layers)
        if self.memory is None:
            if self.layout is None:
                raise UserError("self-speculation needs a layout for its strided cache, or a memory: give one of them.")
            return
        if self.memory.model is not self.target:
            raise UserError("the memory is attached to another model than the target: attach or load it on the target.")
        if self.layout is not None and self.layout.resolve(self.memory.writer) != self.memory.layout:
            raise UserError(f"the layout {self.layout} is not the memory's, {self.memory.layout}: leave it out.")

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``. Raises ``UserError`` when ``k + 1`` exceeds the layout's rollback window."""
        source: PreTrainedModel | MemoryDraft = self.target
        layout = self.layout
        if self.memory is not None:
            source, layout = self.memory, self.memory.layout
        assert layout is not None
        check_draft_width(k, layout.rollback)
        runner = MemoryRunner(source, strided(layout), batch, max_tokens + k, self.layers)
        return ChainSession(runner, text_config(self.target).vocab_size)
