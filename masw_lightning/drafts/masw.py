"""Draft through a learned memory: sinks, an exact window, and one slot per ``r`` tokens (arXiv 2608.30252)."""

from dataclasses import dataclass

from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.base import ChainSession, check_draft_width
from masw_lightning.drafts.runner import MemoryRunner


@dataclass
class MemorySlotDraft:
    """The memory ``draft`` of ``attach_memory`` or ``load_memory``; its backbone may be the target's own object."""

    draft: MemoryDraft
    target_layers: tuple[int, ...] = ()

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``. Raises ``UserError`` when ``k + 1`` exceeds the layout's rollback window."""
        check_draft_width(k, self.draft.layout.rollback)
        runner = MemoryRunner(self.draft, None, batch, max_tokens + k)
        return ChainSession(runner, text_config(self.draft.model).vocab_size)
