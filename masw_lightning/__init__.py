"""masw_lightning: long-context speculative decoding with compressed draft memories (arXiv 2608.30252)."""

from masw_lightning.adapter.head_storage import load_head
from masw_lightning.adapter.inject import MemoryDraft, attach_memory
from masw_lightning.adapter.storage import load_memory
from masw_lightning.decoding.engine import Decoded, PrefilledTarget, generate, prefill_target
from masw_lightning.drafts.eagle import EagleDraft
from masw_lightning.drafts.eagle3 import Eagle3Draft
from masw_lightning.drafts.full_kv import FullKVDraft
from masw_lightning.drafts.masw import MemorySlotDraft
from masw_lightning.drafts.self_speculative import SelfSpeculativeDraft
from masw_lightning.drafts.sliding_window import SlidingWindowDraft
from masw_lightning.drafts.snapkv import SnapKVDraft
from masw_lightning.drafts.strided import StridedDraft
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout

__version__ = "0.1.0"

__all__ = [
    "Decoded",
    "Eagle3Draft",
    "EagleDraft",
    "FullKVDraft",
    "MemoryDraft",
    "MemoryLayout",
    "MemorySlotDraft",
    "PrefilledTarget",
    "SelfSpeculativeDraft",
    "SlidingWindowDraft",
    "SnapKVDraft",
    "StridedDraft",
    "UserError",
    "attach_memory",
    "generate",
    "load_head",
    "load_memory",
    "prefill_target",
]
