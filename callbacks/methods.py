"""The methods a prediction run compares: each is one row of the table and one entry of its YAML.

A method is a dataclass of plain settings that knows how to build a draft policy from the models at hand; it neither
decodes nor measures. To add one: a policy file in `masw_lightning/drafts/`, a dataclass here, a YAML in
`configs/draft/` (see docs/decoding.md). YAML selects a method by its bare class name. The base is no dataclass on
purpose: the command line reads a dataclass type as one fixed group of settings, a plain class as "any subclass of it".
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel

from callbacks.predictions import REFERENCE, Json, Settings, fingerprint
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.adapter.inject import MemoryDraft
from masw_lightning.adapter.storage import attach_stored
from masw_lightning.drafts.base import DraftPolicy
from masw_lightning.drafts.full_kv import FullKVDraft
from masw_lightning.drafts.masw import MemorySlotDraft
from masw_lightning.drafts.sliding_window import SlidingWindowDraft
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout
from masw_lightning.modules.identity import check_is_memory, read_adapter


@dataclass
class Models:
    """What a method may build its draft from.

    Args:
        target: verifies; may be the same object as `draft`.
        draft: the module's frozen backbone.
        memory: the module's own memory on that backbone.
        trained: whether `memory` has learned anything: a checkpoint was loaded, or this process trained it.
        trained_length: tokens of the texts it was trained on, if known.
        checkpoint: where it was loaded from, if it was.
        load: another backbone by its settings, on the right device, its tokenizer checked; each is loaded once.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    memory: MemoryDraft
    trained: bool
    trained_length: int | None
    checkpoint: str | None
    load: Callable[[Backbone], PreTrainedModel]
    attached: list[MemoryDraft] = field(default_factory=list)

    def attach(self, checkpoint: str) -> MemoryDraft:
        """A second memory on `draft`, from a .ckpt file of ours or a `save_pretrained` folder.

        Raises:
            UserError: nothing usable there, or it belongs to another base model.
        """
        memory = attach_checkpoint(self.draft, checkpoint)
        self.attached.append(memory)
        return memory

    def detach(self) -> None:
        """Take every memory of `attach` off the backbone again."""
        while self.attached:
            self.attached.pop().detach()


@dataclass
class Contender:
    """A method that is ready to decode: its row's name, its policy (None: no draft), what a record must say of it."""

    name: str
    policy: DraftPolicy | None
    settings: Settings
    trained_length: int | None = None
    ratio: int | None = None


class Method:
    """One row of the table. `name`, if given, is the row's name; two rows of one name are refused."""

    name: str | None = None

    def default_name(self) -> str:
        """The row's name where the settings give none."""
        raise NotImplementedError

    def build(self, models: Models) -> Contender:
        """Make the draft policy.

        Raises:
            UserError: the settings and the models do not fit.
        """
        raise NotImplementedError

    def contender(self, policy: DraftPolicy | None, **settings: Json) -> Contender:
        """A contender of this method's name, recorded with all of its own settings and the ones given."""
        own = {key: value for key, value in asdict(cast(Any, self)).items() if key != "name"}
        return Contender(self.name or self.default_name(), policy, {"class": type(self).__name__, **own, **settings})


@dataclass
class Autoregressive(Method):
    """The target alone: the reference that every other method is compared with. Always run, always first, no name."""

    def default_name(self) -> str:
        """The reference's name."""
        return REFERENCE

    def build(self, models: Models) -> Contender:
        """No draft."""
        return self.contender(None)


@dataclass
class FullKV(Method):
    """A draft that keeps all keys and values.

    Args:
        draft: the draft model; null takes the module's own backbone.
    """

    draft: Backbone | None = None
    name: str | None = None

    def default_name(self) -> str:
        """Plain speculative decoding."""
        return "full_kv"

    def build(self, models: Models) -> Contender:
        """The whole prefix in the draft's cache."""
        return self.contender(FullKVDraft(models.load(self.draft) if self.draft else models.draft))


@dataclass
class SlidingWindow(Method):
    """A draft that sees sinks and a window only, untrained: SWA, StreamingLLM, and the lines a memory has to beat.

    Args:
        window: newest tokens kept (ignored with `match`).
        sink: first tokens kept (ignored with `match`).
        match: "none": `window` and `sink` as given. "shape": the sinks and the window of the memory, without its slots.
            "entries": a few sinks and a window, together as many entries as the whole memory, slots included, has for
            the prompt.
        memory: the layout to match; null takes the module's own.
        draft: the draft model; null takes the module's own backbone.
    """

    window: int = 1024
    sink: int = 0
    match: Literal["none", "shape", "entries"] = "none"
    memory: MemoryLayout | None = None
    draft: Backbone | None = None
    name: str | None = None

    def default_name(self) -> str:
        """Says what is kept."""
        if self.match != "none":
            return {"shape": "window_equal", "entries": "window_matched"}[self.match]
        return f"window_{self.window}" if self.sink == 0 else f"sink_{self.sink}_window_{self.window}"

    def build(self, models: Models) -> Contender:
        """A window; what it matches is recorded."""
        model = models.load(self.draft) if self.draft else models.draft
        layout = self.memory or models.memory.layout
        if self.match == "none":
            return self.contender(SlidingWindowDraft(model, window=self.window, sink=self.sink))
        policy = SlidingWindowDraft(model, window=layout.window, sink=layout.sink)
        if self.match == "entries":
            policy = SlidingWindowDraft(model, match=layout)
        return self.contender(policy, memory=asdict(layout))


@dataclass
class Masw(Method):
    """The draft reads its prefix through a trained memory.

    Args:
        checkpoint: null takes the module's own memory (with the weights of `--ckpt_path`); else a .ckpt file of a
            training run, or a folder written by `save_pretrained`, attached to the same backbone. So one table can
            compare several memories.
        allow_untrained: decode with a memory that nothing was loaded into; the row then says so in its name.
    """

    checkpoint: str | None = None
    allow_untrained: bool = False
    name: str | None = None

    def default_name(self) -> str:
        """The method's name."""
        return "masw"

    def build(self, models: Models) -> Contender:
        """The memory, fingerprinted by its weights: a retrained checkpoint under an old name is another experiment."""
        memory, trained, length = models.memory, models.trained, models.trained_length
        if self.checkpoint is not None:
            memory = models.attach(self.checkpoint)
            trained, length = True, memory.trained_length
        if not trained and not self.allow_untrained:
            raise UserError(
                f"method '{self.name or self.default_name()}' has no trained memory: give --ckpt_path or the method's "
                "checkpoint, or set allow_untrained: true to see what an untrained one does."
            )
        settings: Settings = {
            "checkpoint": self.checkpoint or models.checkpoint,
            "memory": cast(Json, asdict(memory.layout)),
            "writer": memory.writer,
            "weights": weights_fingerprint(memory),
        }
        built = self.contender(MemorySlotDraft(memory), **settings)
        built.name += "" if trained else " (untrained)"
        built.trained_length, built.ratio = length, memory.layout.ratio
        return built


def attach_checkpoint(model: PreTrainedModel, path: str) -> MemoryDraft:
    """See `Models.attach`."""
    state, record = read_adapter(path)
    check_is_memory(record, path)
    return attach_stored(model, record, state, path)


def weights_fingerprint(memory: MemoryDraft) -> str:
    """A short hash of the memory's own tensors."""
    return state_fingerprint(memory.adapter_state_dict())


def state_fingerprint(state: dict[str, torch.Tensor]) -> str:
    """A short hash of named tensors."""
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for _, tensor in sorted(state.items()))
    return fingerprint(*(row.view(torch.uint8).numpy().tobytes() for row in flat))


def line_up(methods: list[Method], models: Models) -> list[Contender]:
    """Build every method, the autoregressive reference first (added where it is not listed).

    Raises:
        UserError: two rows of one name, or a method that cannot be built.
    """
    references: list[Method] = [m for m in methods if isinstance(m, Autoregressive)] or [Autoregressive()]
    others = [m for m in methods if not isinstance(m, Autoregressive)]
    contenders = [method.build(models) for method in [*references, *others]]
    names = [c.name for c in contenders]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"two methods are named '{twice[0]}': give each a name of its own (init_args: name: …).")
    return contenders
