"""Heads from YAML to table: every configuration is built, the tiny ones train, and their heads decode losslessly."""

from pathlib import Path

import pytest
import torch

from callbacks.methods_heads import Eagle, Eagle3
from callbacks.predictions import read_predictions
from masw_lightning.cli import MaswCLI, main
from masw_lightning.decoding import engine
from masw_lightning.modules import Eagle3Training, EagleTraining

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "eagle").glob("*.yaml"))
METHODS = "--trainer.callbacks.init_args.methods"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_built(path: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(path), "--trainer.default_root_dir", str(tmp_path)]
    elsewhere = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.strategy", "auto"]
    cli = MaswCLI([*arguments, *elsewhere], run=False)
    kind = Eagle3Training if path.name.startswith("eagle3") else EagleTraining
    assert type(cli.model) is kind
    assert cli.model.schedule.warmup_steps < cli.trainer.max_steps
    assert any(getattr(callback, "folder", None) == "head" for callback in cli.trainer.callbacks)  # type: ignore[attr-defined]
    if kind is Eagle3Training:
        assert (cli.model.steps, cli.model.step_decay) == (7, 0.8)
    else:
        assert (cli.model.feature_weight, cli.model.token_weight, cli.model.noise) == (1.0, 0.1, 0.2)


def test_train_export_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("eagle", "eagle3"):
        main(["fit", "--config", f"configs/tiny/{name}.yaml", "--trainer.default_root_dir", str(tmp_path / name)])
        assert "val/tokens_per_iteration" in capsys.readouterr().out
    folder, ckpt = tmp_path / "eagle" / "head", tmp_path / "eagle3" / "checkpoints" / "last.ckpt"
    heads = (
        f"{{class_path: Eagle, init_args: {{head: {folder}}}}}",
        f"{{class_path: Eagle3, init_args: {{head: {ckpt}}}}}",
    )
    reads, real = [], engine.FullRunner.prefill
    monkeypatch.setattr(engine.FullRunner, "prefill", lambda self, ids: reads.append(ids.shape[1]) or real(self, ids))  # type: ignore[func-returns-value]
    run = ["predict", "--config", "configs/tiny/predict.yaml", "--model.init_args.init_from", "null"]
    run += [f"{METHODS}=[{', '.join(heads)}]", "--trainer.limit_predict_batches", "2"]
    run += ["--trainer.callbacks.init_args.warmup_tokens", "0", "--trainer.default_root_dir", str(tmp_path)]
    main([*run, "--trainer.callbacks.init_args.output_dir", str(tmp_path / "out")])
    records = read_predictions(tmp_path / "out")
    assert [r.method for r in records] == ["autoregressive", "eagle", "eagle3"] * 2
    assert all(r.identical_to_autoregressive for r in records)
    assert reads == sorted({r.prompt_tokens for r in records})  # one reading of each prompt serves all three
    assert all(r.draft_kv_bytes > 0 for r in records if r.method != "autoregressive")
    assert records[1].config["method"]["weights"] != records[2].config["method"]["weights"]  # type: ignore[index,call-overload]
    assert torch.load(ckpt, weights_only=True)["masw"]["head"] == "eagle3"


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_a_path_without_a_head_is_one_sentence(kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["predict", "--config", "configs/tiny/predict.yaml", "--model.init_args.init_from", "null"]
    run += ["--trainer.default_root_dir", str(tmp_path), "--trainer.callbacks.init_args.output_dir", str(tmp_path)]
    method = f"{METHODS}=[{{class_path: {kind.__name__}, init_args: {{head: {tmp_path}/none}}}}]"
    with pytest.raises(SystemExit) as stopped:
        main([*run, method])
    assert stopped.value.code == 1
    assert "masw: no checkpoint at" in capsys.readouterr().err.strip().splitlines()[-1]
