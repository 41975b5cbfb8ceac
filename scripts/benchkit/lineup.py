"""The rows of a grid for one target: who decodes, and which lines of equal entries stand beside each MASW row.

Builds draft policies from the grid's methods; decodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedModel

from benchkit.grid import Draft, Grid, Target
from callbacks.methods import Autoregressive, Contender, Masw, Method, Models, SlidingWindow
from callbacks.methods_compressed import SnapKV, Strided
from callbacks.predictions import Settings
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.adapter.inject import attach_memory
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout

Load = Callable[[Backbone], PreTrainedModel]
BASELINES = "baselines"


@dataclass
class LineUp:
    """Contenders in the order in which they decode, and the table's blocks: title → names.

    A name may stand in several blocks: the window without slots belongs to the 4x and to the 8x memory.
    """

    contenders: list[Contender] = field(default_factory=list)
    blocks: dict[str, list[str]] = field(default_factory=dict)
    drafts: dict[str, Settings] = field(default_factory=dict)
    models: list[Models] = field(default_factory=list)

    def add(self, contender: Contender, block: str, backbone: Backbone) -> None:
        """One more row; one that is there already only gets its place in the block.

        Raises:
            UserError: another row has this name.
        """
        known = {c.name: c.settings for c in self.contenders}
        if known.get(contender.name, contender.settings) != contender.settings:
            raise UserError(f"two rows are named '{contender.name}': give each method a name of its own.")
        if contender.name not in known:
            self.contenders.append(contender)
            self.drafts[contender.name] = asdict(backbone)
        elif contender.name in self.blocks.get(block, []):
            raise UserError(f"the row '{contender.name}' is listed twice: list it once, or give each a name.")
        self.blocks.setdefault(block, []).append(contender.name)

    def detach(self) -> None:
        """Take every memory off its backbone again."""
        for models in self.models:
            models.detach()
            models.memory.detach()
        self.models.clear()


def line_up(grid: Grid, target: Target, load: Load) -> LineUp:
    """Every row of `target`, the autoregressive reference first.

    Raises:
        UserError: a method that cannot be built, or two of one name.
    """
    found = LineUp()
    own = _models(grid, target.backbone, target.backbone, load)
    found.models.append(own)
    try:
        for method in [Autoregressive(), *target.methods]:
            found.add(method.build(own), BASELINES, target.backbone)
        for draft in grid.drafts:
            backbone = draft.backbone or target.backbone
            models = own if backbone == target.backbone else _models(grid, backbone, target.backbone, load)
            if models is not own:
                found.models.append(models)
            _line_up_draft(found, grid, draft, backbone, models)
    except BaseException:
        found.detach()
        raise
    return found


def _line_up_draft(found: LineUp, grid: Grid, draft: Draft, backbone: Backbone, models: Models) -> None:
    suffix = f" ({draft.name})" if len(grid.drafts) > 1 else ""

    def add(built: Contender, block: str) -> None:
        built.name += suffix
        found.add(built, block, backbone)

    methods = [method for method in [*grid.methods, *draft.methods] if not isinstance(method, Autoregressive)]
    for method in methods:
        if not isinstance(method, Masw):
            add(method.build(models), BASELINES)
    blocks: dict[str, MemoryLayout] = {}
    for method in methods:
        if isinstance(method, Masw):
            built = method.build(models)
            layout = layout_of(built.settings)
            block = f"{shape(layout)}{suffix}"
            blocks.setdefault(block, layout)
            add(built, block)
    for block, layout in blocks.items():
        for method in honest_lines(layout):
            add(method.build(models), block)


def honest_lines(layout: MemoryLayout) -> list[Method]:
    """What a memory is compared with: its own sinks and window without slots, and as many entries kept otherwise."""
    layout = replace(layout, visibility=None)  # the writer's affair, and no line below has a writer
    name = shape(layout)
    return [
        SlidingWindow(match="shape", memory=layout.without_slots(), name=f"{shape(layout.without_slots())}, no slots"),
        SlidingWindow(match="entries", memory=layout, name=f"{name}: sinks + window"),
        Strided(memory=layout, name=f"{name}: strided"),
        SnapKV(match="entries", memory=layout, name=f"{name}: SnapKV"),
    ]


def shape(layout: MemoryLayout) -> str:
    """ "128+128 4x": sinks, window and tokens per slot."""
    return f"{layout.sink}+{layout.window}" + (f" {layout.ratio}x" if layout.ratio else "")


def layout_of(settings: Settings) -> MemoryLayout:
    """The layout that a contender's settings record."""
    return MemoryLayout(**cast(dict[str, Any], settings["memory"]))


def entries(settings: Settings, n: int) -> int | None:
    """Entries that a draft keeps per layer and head of a prompt of `n` tokens; None where it is another thing."""
    kind, match = settings["class"], settings.get("match", "none")
    if kind == "FullKV":
        return n
    if kind in ("Masw", "Strided", "SelfSpeculative") or match in ("entries", "shape"):
        layout = layout_of(settings)
        return (layout.without_slots() if match == "shape" else layout).num_entries(n)
    if kind == "SlidingWindow":
        return min(n, int(cast(int, settings["sink"])) + int(cast(int, settings["window"])))
    return min(n, int(cast(int, settings["budget"]))) if kind == "SnapKV" else None


def _models(grid: Grid, draft: Backbone, target: Backbone, load: Load) -> Models:
    model = load(draft)
    memory = attach_memory(model, grid.memory, "token")
    return Models(load(target), model, memory, trained=False, trained_length=None, checkpoint=None, load=load)
