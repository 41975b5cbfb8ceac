"""Draft on sinks, an exact window and every ``r``-th older entry, kept raw: MASW's training-free sibling.

As many entries, in the same cells, as a learned memory of the same layout: what training has to beat. Slot ``k`` holds
the keys and values of its group's last token as the model itself made them, which is exactly what the token writer's
slots hold while its mirrors are still copies; no weight is copied and no projection added.
"""

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from masw_lightning.attention.interface import text_config
from masw_lightning.drafts.base import ChainSession, check_draft_width
from masw_lightning.drafts.runner import MemoryRunner
from masw_lightning.layout import MemoryLayout


@dataclass
class StridedDraft:
    """``model`` on a strided cache; its own sliding windows are replaced.

    Args:
        layout: sinks, window, stride (``ratio``; ``None`` keeps no older entries) and rollback. Its visibility is not
            used: an older entry is seen once its token has left the window, or it would count twice.
    """

    model: PreTrainedModel
    layout: MemoryLayout
    target_layers: tuple[int, ...] = ()

    def open(self, batch: int, prompt_tokens: int, max_tokens: int, k: int) -> ChainSession:
        """See ``DraftPolicy``. Raises ``UserError`` when ``k + 1`` exceeds the layout's rollback window."""
        check_draft_width(k, self.layout.rollback)
        runner = MemoryRunner(self.model, strided(self.layout), batch, max_tokens + k)
        return ChainSession(runner, text_config(self.model).vocab_size)


def strided(layout: MemoryLayout) -> MemoryLayout:
    """The same sinks, window and ratio, each older entry seen once its token has left the window."""
    return replace(layout, visibility="evicted")
