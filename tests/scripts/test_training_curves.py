"""scripts/training_curves.py: end values, resumed runs, and one sentence for a folder that is no run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("training_curves", ROOT / "scripts" / "training_curves.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, suffix: str, points: dict[str, dict[int, float]]) -> None:
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for tag, values in points.items():
            for step, value in values.items():
                writer.add_scalar(tag, value, step)


def make_run(folder: Path) -> Path:
    write(
        folder,
        ".a",
        {
            "val/agreement": {3: 0.5, 7: 0.6},
            "val/agreement_window": {3: 0.55, 7: 0.55},
            "train/tokens_seen": {7: 800.0},
            "train/tokens_per_s": {3: 10.0, 7: 20.0},
        },
    )
    # resumed from step 4: step 8 was run again
    write(
        folder, ".b", {"val/agreement": {7: 0.7}, "train/tokens_seen": {11: 1200.0}, "train/tokens_per_s": {11: 20.0}}
    )
    config = {"model": {"class_path": "masw_lightning.AdapterPretraining", "init_args": {"objective": "distill"}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_end_values_of_a_resumed_run(tmp_path: Path, script: ModuleType) -> None:
    run = make_run(tmp_path / "one")
    assert script.main(["--runs", str(run), "--out", str(tmp_path / "out")]) == 0
    row = json.loads((tmp_path / "out" / "curves.json").read_text())["rows"][0]
    assert row["agreement"] == pytest.approx(0.7) and row["agreement_window"] == pytest.approx(0.55)
    assert (row["steps"], row["tokens"], row["minutes"]) == (12, 1200, pytest.approx(1.0))
    assert yaml.safe_load((tmp_path / "out" / "configs" / "one.yaml").read_text())["model"]["init_args"]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| one | AdapterPretraining | distill | 12 | 1,200 |" in page and str(tmp_path) not in page
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000


def test_a_folder_that_is_no_run_is_one_sentence(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no config.yaml: give a run's" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("model: {class_path: A, init_args: {}}")
    assert script.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no validation" in capsys.readouterr().err
