"""The quickstart's configurations build as they stand, and its two writers differ in nothing but the writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from callbacks.speculative_decoding import SpeculativeDecoding
from masw_lightning.cli import MaswCLI
from masw_lightning.modules import AdapterPretraining, SupervisedFinetuning

ROOT = Path(__file__).resolve().parents[1]


def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, *more: str) -> MaswCLI:
    monkeypatch.chdir(ROOT)
    config = f"configs/quickstart/{name}.yaml"
    return MaswCLI(["--config", config, *more, "--trainer.default_root_dir", str(tmp_path)], run=False)


@pytest.mark.parametrize(("name", "kind"), [("pretrain", AdapterPretraining), ("sft", SupervisedFinetuning)])
def test_one_part_makes_the_other_writer(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = ("--model.init_args.adapter", "configs/adapter/token.yaml")
    slot, token = built(monkeypatch, tmp_path, name), built(monkeypatch, tmp_path, name, *other)
    assert isinstance(slot.model, kind)
    assert (slot.model.adapter.writer, token.model.adapter.writer) == ("slot", "token")
    assert (slot.model.adapter.slot_input, token.model.adapter.slot_input) == ("repeat", "learned")
    first, second = dict(slot.model.hparams), dict(token.model.hparams)
    first.pop("adapter"), second.pop("adapter")
    assert first == second
    warm_up, steps = slot.model.schedule.warmup_steps, slot.trainer.max_steps
    assert warm_up < steps
    assert slot.trainer.val_check_interval == steps, "validation would come too early, or never"


def test_both_stages_share_backbone_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = [built(monkeypatch, tmp_path, name).model for name in ("pretrain", "sft", "predict")]
    assert len({model.backbone_config for model in models}) == 1
    assert len({model.memory for model in models}) == 1


def test_the_table_has_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = built(monkeypatch, tmp_path, "predict").trainer
    callback = next(c for c in trainer.callbacks if isinstance(c, SpeculativeDecoding))
    rows = [(type(method).__name__, getattr(method, "match", None)) for method in callback.methods]
    assert rows == [
        ("FullKV", None),
        ("SlidingWindow", "shape"),
        ("SlidingWindow", "entries"),
        ("Masw", None),
        ("Masw", None),
    ]
    checkpoints = [method.checkpoint for method in callback.methods[-2:]]
    assert checkpoints == ["runs/quickstart/sft/slot/adapter", "runs/quickstart/sft/token/adapter"]
    assert callback.target is None
    assert callback.decoding.temperature == 0
