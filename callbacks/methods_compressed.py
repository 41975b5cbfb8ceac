"""Further rows of the prediction table, none of which is trained: a cache of chosen or of strided entries, and the
target's own weights on such a cache as its draft. The base class and the first rows are in `methods.py`.
"""

from dataclasses import asdict, dataclass
from typing import Literal, cast

from callbacks.methods import Contender, Method, Models, weights_fingerprint
from callbacks.predictions import Json
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.cache.snapkv import Pooling
from masw_lightning.drafts.self_speculative import SelfSpeculativeDraft
from masw_lightning.drafts.snapkv import SnapKVDraft
from masw_lightning.drafts.strided import StridedDraft
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout


@dataclass
class SnapKV(Method):
    """A draft that keeps the prompt entries its last queries look at, and every generated token.

    Args:
        budget: entries kept per layer and head, the window included (ignored with `match`); shorter prompts stay whole.
        window: last prompt tokens, whose queries choose; always kept.
        kernel: odd width of the pooling over neighbouring keys.
        pooling: "avg" or "max".
        per_query_head: choose per query head, as the original does, at several times the bytes, not per KV head.
        match: "entries" keeps as many entries as the whole memory, slots included, has for the prompt.
        memory: the layout to match; null takes the module's own.
        draft: the draft model; null takes the module's own backbone.
    """

    budget: int = 4096
    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"
    per_query_head: bool = False
    match: Literal["none", "entries"] = "none"
    memory: MemoryLayout | None = None
    draft: Backbone | None = None
    name: str | None = None

    def default_name(self) -> str:
        """Says what is kept."""
        return f"snapkv_{self.budget}" if self.match == "none" else "snapkv_matched"

    def build(self, models: Models) -> Contender:
        """The policy; what it matches is recorded."""
        layout = (self.memory or models.memory.layout) if self.match == "entries" else None
        policy = SnapKVDraft(
            models.load(self.draft) if self.draft else models.draft,
            budget=self.budget,
            window=self.window,
            kernel=self.kernel,
            pooling=self.pooling,
            per_query_head=self.per_query_head,
            match=layout,
        )
        return self.contender(policy, memory=cast(Json, asdict(layout) if layout else None))


@dataclass
class Strided(Method):
    """A draft that keeps sinks, a window and every `ratio`-th older entry as it is: the memory without its training.

    Args:
        memory: the layout; null takes the module's own.
        draft: the draft model; null takes the module's own backbone.
    """

    memory: MemoryLayout | None = None
    draft: Backbone | None = None
    name: str | None = None

    def default_name(self) -> str:
        """The method's name."""
        return "strided"

    def build(self, models: Models) -> Contender:
        """The policy; its layout is recorded."""
        layout = self.memory or models.memory.layout
        policy = StridedDraft(models.load(self.draft) if self.draft else models.draft, layout)
        return self.contender(policy, memory=cast(Json, asdict(layout)))


@dataclass
class SelfSpeculative(Method):
    """The target drafts for itself, on a compact cache, with all or with the first of its layers: no second model.

    Args:
        layers: how many of the target's first layers draft; null takes all.
        through: "strided" keeps raw entries and needs no training; "memory" drafts through the module's own trained
            memory, where the module's backbone is the target.
        memory: the layout of the strided cache; null takes the module's own.
    """

    layers: int | None = None
    through: Literal["strided", "memory"] = "strided"
    memory: MemoryLayout | None = None
    name: str | None = None

    def default_name(self) -> str:
        """Says how much of the target drafts."""
        return "self_speculative" if self.layers is None else f"self_first_{self.layers}"

    def build(self, models: Models) -> Contender:
        """The policy; its layout is recorded, and the memory's weights by a fingerprint."""
        if self.through == "strided":
            layout = self.memory or models.memory.layout
            policy = SelfSpeculativeDraft(models.target, layout, self.layers)
            return self.contender(policy, memory=cast(Json, asdict(layout)))
        if not models.trained:
            raise UserError(
                f"method '{self.name or self.default_name()}' has no trained memory: give --ckpt_path, or set through: "
                "strided."
            )
        policy = SelfSpeculativeDraft(models.target, self.memory, self.layers, models.memory)
        built = self.contender(
            policy, memory=cast(Json, asdict(models.memory.layout)), weights=weights_fingerprint(models.memory)
        )
        built.trained_length, built.ratio = models.trained_length, models.memory.layout.ratio
        return built
