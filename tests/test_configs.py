"""Every YAML in configs/ is built by the real command line, and the tiny path runs from pretraining to the report.

Parts are told from whole runs by what they hold: a run names a ``trainer`` and a ``model``; other files are put into
the run they are made for.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from masw_lightning.cli import MaswCLI, main

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
YAMLS = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
# Where a part belongs: folder -> arguments that put it into a run.
PLACES = {
    "model": "--model.backbone={}",
    "memory": "--model.memory={}",
    "adapter": "--model.adapter={}",
    "trainer": "--config={}",
    "draft": "--trainer.callbacks.init_args.methods={}",
}
TINY_PLACES = {"backbone": "--model.backbone={}", "memory": "--model.memory={}"}


def content(path: Path) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / path).read_text(encoding="utf-8"))


RUNS = [p for p in YAMLS if isinstance(content(p), dict) and {"model", "trainer"} <= content(p).keys()]
PARTS = [p for p in YAMLS if p not in RUNS and p.parts[0] != "table1"]  # grids of scripts/table1.py, tried there


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def build(root: Path, *arguments: str) -> MaswCLI:
    """Classes, trainer and all, with nothing run. No accelerator is asked for, since a test machine may have none."""
    here = ["--trainer.default_root_dir", str(root), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    return MaswCLI([*arguments, *here, "--trainer.strategy", "auto"], run=False)


def test_there_are_runs_and_parts() -> None:
    assert {Path("pretrain.yaml"), Path("sft.yaml"), Path("predict.yaml")} <= set(RUNS)
    assert {path.parts[0] for path in PARTS} >= {"model", "memory", "adapter", "data", "draft", "trainer", "tiny"}


@pytest.mark.parametrize("path", RUNS, ids=str)
def test_a_run_is_built(tmp_path: Path, path: Path) -> None:
    cli = build(tmp_path, "--config", str(CONFIGS / path))
    assert cli.datamodule is not None
    folder = content(path)["trainer"]["default_root_dir"]
    assert folder.startswith("runs/")


@pytest.mark.parametrize("path", PARTS, ids=str)
def test_a_part_is_built_in_its_place(tmp_path: Path, path: Path) -> None:
    run = content(Path("tiny/predict.yaml" if path.parts[0] == "draft" else "tiny/pretrain.yaml"))
    for name, part in (
        ("backbone", "tiny/backbone.yaml"),
        ("memory", "tiny/memory.yaml"),
        ("adapter", "adapter/slot.yaml"),
    ):
        run["model"]["init_args"][name] = str(CONFIGS / part)
    run["data"] = str(CONFIGS / "tiny/data/pretrain.yaml")
    if path.parts[0] == "draft":
        run["trainer"]["callbacks"][0]["init_args"]["methods"] = []
    more = []
    if "data" in path.parts:
        run["data"] = str(CONFIGS / path)  # in the YAML: on the command line it would be merged into what is there
    else:
        places = TINY_PLACES if path.parts[0] == "tiny" else PLACES
        more = [places[path.stem if path.parts[0] == "tiny" else path.parts[0]].format(CONFIGS / path)]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    cli = build(tmp_path, "--config", str(tmp_path / "run.yaml"), *more)
    if path.parts[0] in ("model", "memory", "adapter"):
        built = {"model": cli.model.backbone_config, "memory": cli.model.memory, "adapter": cli.model.adapter}
        for key, value in content(path).items():
            found = getattr(built[path.parts[0]], key)
            assert (list(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize("path", RUNS, ids=str)
def test_a_run_fits_on_a_page(path: Path) -> None:
    lines = (CONFIGS / path).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("folder", ["adapter", "memory"])
def test_swapping_a_part_leaves_nothing_of_another(folder: str) -> None:
    """A part given on the command line is laid over the run's: what it does not name would stay."""
    keys = {path.name: set(yaml.safe_load(path.read_text())) for path in (CONFIGS / folder).glob("*.yaml")}
    assert len(keys) > 1
    assert len({frozenset(found) for found in keys.values()}) == 1, keys


def test_the_papers_token_count() -> None:
    for size in ("3b", "8b"):
        trainer = content(Path(f"paper/pretrain_{size}.yaml"))["trainer"]
        length = content(Path("data/redpajama.yaml"))["init_args"]["sequence_length"]
        tokens = trainer["max_steps"] * trainer["accumulate_grad_batches"] * trainer["devices"] * length
        assert tokens == pytest.approx(2e9, rel=1e-3)


def test_the_tiny_path_from_pretraining_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(verb: str, name: str, *more: str) -> None:
        folder = str(tmp_path / name)
        main([verb, "--config", f"configs/tiny/{name}.yaml", "--trainer.default_root_dir", folder, *more])

    command("fit", "pretrain")
    command("fit", "sft", "--model.init_from", str(tmp_path / "pretrain/checkpoints/last.ckpt"))
    output = ["--trainer.callbacks.init_args.output_dir", str(tmp_path / "predict")]
    command("predict", "predict", "--model.init_from", str(tmp_path / "sft/checkpoints/last.ckpt"), *output)
    said = capsys.readouterr().out
    assert "step 8/8" in said and "step 4/4" in said and "val/tokens_per_iteration" in said
    lines = [json.loads(line) for line in (tmp_path / "predict/predictions.jsonl").read_text().splitlines()]
    assert len({line["method"] for line in lines}) == 5
    assert all(line["identical_to_autoregressive"] for line in lines)
    for name in ("summary.json", "summary.md"):
        assert (tmp_path / "predict" / name).stat().st_size > 0
