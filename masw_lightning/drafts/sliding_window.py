"""Draft with sinks and a window of exact tokens and nothing else: SWA (no sinks) and StreamingLLM (a few)."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.base import ChainSession
from masw_lightning.drafts.runner import MemoryRunner
from masw_lightning.layout import MemoryLayout

MATCHED_SINKS = 4  # a few sinks are all a large window needs (StreamingLLM)


@dataclass
class SlidingWindowDraft:
    """``model`` reading ``sink`` first and ``window`` newest tokens; its own sliding windows are replaced.

    Args:
        window: tokens, the current one included (1024: the paper's SWA).
        sink: first tokens kept (0: SWA; 4: StreamingLLM).
        match: replaces both numbers at prefill: a few sinks, and a window such that all entries together are as many as
            this layout keeps for the prompt (never fewer than its own sinks and window hold).
    """

    model: PreTrainedModel
    window: int = 1024
    sink: int = 0
    match: MemoryLayout | None = None
    target_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.layout(1, 1)

    def layout(self, prompt_tokens: int, k: int) -> MemoryLayout:
        """The sinks and window used for a prompt of that length when drafting ``k`` tokens."""
        sink, window, rollback = self.sink, self.window, 16
        if self.match is not None:
            entries = max(self.match.num_entries(prompt_tokens), self.match.sink + self.match.window)
            sink = min(MATCHED_SINKS, self.match.sink)
            window, rollback = entries - sink, self.match.rollback
        return MemoryLayout(sink, window, None, max(rollback, k + 1))

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``."""
        runner = MemoryRunner(self.model, self.layout(prompt_tokens, k), batch, max_tokens + k)
        return ChainSession(runner, text_config(self.model).vocab_size)
