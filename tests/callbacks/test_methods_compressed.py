"""The rows of compressed caches, built from the models of a run: what they take, name, record and refuse."""

from pathlib import Path

import pytest

from callbacks.methods import Models
from callbacks.methods_compressed import SelfSpeculative, SnapKV, Strided
from masw_lightning import MemoryLayout, SelfSpeculativeDraft, SnapKVDraft, StridedDraft, UserError, attach_memory
from masw_lightning.adapter.backbone import Backbone, load_backbone

TINY = Backbone(str(Path(__file__).resolve().parents[2] / "configs" / "tiny" / "model"), random_init=True)
LAYOUT, OTHER = MemoryLayout(4, 8, 4), MemoryLayout(2, 6, 3)


@pytest.fixture(scope="module")
def models() -> Models:
    model = load_backbone(TINY)
    return Models(model, model, attach_memory(model, LAYOUT), True, 64, None, load_backbone)


def test_snapkv(models: Models) -> None:
    made = SnapKV(budget=64, pooling="max", per_query_head=True).build(models)
    assert made.policy == SnapKVDraft(models.draft, 64, pooling="max", per_query_head=True)
    assert (made.name, made.settings["class"], made.settings["memory"]) == ("snapkv_64", "SnapKV", None)
    for method, layout in (
        (SnapKV(match="entries"), models.memory.layout),
        (SnapKV(match="entries", memory=OTHER), OTHER),
    ):
        made = method.build(models)
        assert isinstance(made.policy, SnapKVDraft)
        assert (made.name, made.policy.match) == ("snapkv_matched", layout)
        assert made.settings["memory"]["sink"] == layout.sink  # type: ignore[index,call-overload]
    with pytest.raises(UserError, match="budget=8 is smaller than its window=32"):
        SnapKV(budget=8).build(models)
    other = SnapKV(draft=TINY).build(models).policy
    assert isinstance(other, SnapKVDraft)
    assert other.model is not models.draft


def test_strided(models: Models) -> None:
    assert Strided().build(models).policy == StridedDraft(models.draft, models.memory.layout)
    made = Strided(memory=OTHER, name="x").build(models)
    assert (made.name, made.policy) == ("x", StridedDraft(models.draft, OTHER))


def test_self_speculative(models: Models) -> None:
    made = SelfSpeculative(memory=OTHER, layers=1).build(models)
    assert (made.name, made.policy) == ("self_first_1", SelfSpeculativeDraft(models.target, OTHER, 1))
    made = SelfSpeculative(through="memory").build(models)
    assert made.policy == SelfSpeculativeDraft(models.target, memory=models.memory)
    assert (made.name, made.trained_length, made.ratio) == ("self_speculative", 64, 4)
    assert made.settings["weights"]
    with pytest.raises(UserError, match="layers=9 is out of range"):
        SelfSpeculative(layers=9).build(models)
    untrained = Models(models.target, models.draft, models.memory, False, None, None, load_backbone)
    with pytest.raises(UserError, match="'self_speculative' has no trained memory"):
        SelfSpeculative(through="memory").build(untrained)
    apart = Models(load_backbone(TINY), models.draft, models.memory, True, 64, None, load_backbone)
    with pytest.raises(UserError, match="another model than the target"):
        SelfSpeculative(through="memory").build(apart)
