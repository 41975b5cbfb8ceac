"""The command line: what wins, what is written where, and how a run ends that cannot go on."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from masw_lightning.cli import MaswCLI, check_writable, main
from masw_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = "configs/tiny/pretrain.yaml"
SHORT = ["--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--trainer.limit_val_batches", "1"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def fit(root: Path, *arguments: str, config: str = PRETRAIN) -> None:
    main(["fit", "--config", config, "--trainer.default_root_dir", str(root), *SHORT, *arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run."""
    root, before = tmp_path_factory.mktemp("run"), Path.cwd()
    os.chdir(ROOT)
    try:
        fit(root, "--trainer.callbacks.init_args.folder", "adapter")
    finally:
        os.chdir(before)
    return root


def sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> str:
    """The last line of stderr of a run that has to end with ``status`` and no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == status
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert last.startswith("masw: ")
    return last


# ---- what is written ---------------------------------------------------------------------------------------------
def test_a_run_writes_into_its_own_folder(run: Path) -> None:
    assert (run / "config.yaml").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "adapter" / "masw.safetensors").is_file()
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert not (run / "lightning_logs").exists()


def test_the_saved_configuration_runs_again_into_the_same_folder(run: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["class_path"].endswith("AdapterPretraining")
    assert config["model"]["init_args"]["memory"]["ratio"] == 4
    fit(tmp_path, config=str(run / "config.yaml"))
    fit(tmp_path, config=str(run / "config.yaml"))  # SaveConfigCallback would stop a second one
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_validate_writes_no_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--trainer.default_root_dir", str(tmp_path)]
    main(["validate", "--config", PRETRAIN, *arguments])
    assert "val/agreement" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists()


# ---- what wins ---------------------------------------------------------------------------------------------------
def made(*arguments: str) -> MaswCLI:
    """Everything built, nothing run."""
    return MaswCLI(["--config", PRETRAIN, *arguments], run=False)


def test_the_command_line_wins_over_yaml(tmp_path: Path) -> None:
    cli = made("--model.optimizer.lr", "0.5", "--model.memory", "configs/memory/8x.yaml",
               "--trainer.default_root_dir", str(tmp_path))  # fmt: skip
    assert cli.model.optimizer.lr == 0.5
    assert (cli.model.memory.ratio, cli.model.memory.window) == (8, 128)
    other = made("--data", "configs/data/redpajama.yaml", "--trainer.default_root_dir", str(tmp_path))
    assert [source.hub for source in other.datamodule.train] == [None]  # replaced, not merged
    assert other.datamodule.cache_dir is None
    later = made("--config", "configs/trainer/cpu.yaml", "--trainer.default_root_dir", str(tmp_path))
    assert later.trainer.max_steps == 8  # a second file merges into the first


def test_a_checkpoint_changes_no_setting(run: Path, tmp_path: Path) -> None:
    """Lightning lets its hyperparameters override YAML and command line; here the run is what it says it is."""
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    fit(tmp_path, "--ckpt_path", checkpoint, "--model.optimizer.lr", "0.25", "--model.loss_chunk", "7",
        "--trainer.max_steps", "5")  # fmt: skip
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["optimizer"]["lr"] == 0.25
    assert saved["hyper_parameters"]["loss_chunk"] == 7
    assert saved["global_step"] == 5


def test_predictions_are_not_collected() -> None:
    cli = MaswCLI.__new__(MaswCLI)
    try:
        MaswCLI.__init__(cli, ["predict", "--config", "nowhere.yaml"])
    except Exception:
        defaults = cli._subcommand_parsers["predict"].get_defaults()
        assert defaults["return_predictions"] is False
        assert "test" not in cli._subcommand_parsers


def test_a_run_is_seeded_without_being_told(tmp_path: Path) -> None:
    cli = made("--trainer.default_root_dir", str(tmp_path))
    assert cli.config["seed_everything"] == 0


# ---- what cannot go on -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model.memory.ratio", "0"], "ratio=0"),
        (["--model.memory.sink", "-3"], "sink=-3"),
        (["--model.optimizer.lr", "-1"], "lr=-1.0"),
        (["--model.validation.prompts", "-1"], "prompts=-1"),
        (["--model.backbone.path", "/no/such/model"], "no model folder at '/no/such/model'"),
        (["--model.init_from", "none.ckpt"], "no checkpoint at 'none.ckpt'"),
        (["--ckpt_path", "none.ckpt"], "no checkpoint at 'none.ckpt'"),
        (["--ckpt_path", "README.md"], "'README.md' is not a checkpoint"),
        (["--data.train", "[{path: none.jsonl}]"], "none.jsonl"),
        (["--model.schedule.warmup_steps", "3"], "warmup_steps=3"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    command = ["fit", "--config", PRETRAIN, "--trainer.default_root_dir", str(tmp_path), *SHORT, *arguments]
    assert told in sentence(capsys, command, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fit", "--config", "none.yaml"], "none.yaml"),
        (["fit", "--config", PRETRAIN, "--model.lr", "3"], "Option 'lr' is not accepted"),
        (["fit", "--config", PRETRAIN, "--model.optimizer.lr", "fast"], "optimizer.lr"),
        (["fit", "--config", PRETRAIN, "--model.objective", "guess"], "guess"),
        (["fit", "--config", PRETRAIN, "--model.adapter.writer", "ghost"], "ghost"),
        (["fit", "--config", PRETRAIN, "--model", "Nobody"], "Nobody"),
        (["fit", "--config", PRETRAIN, "--data", "none.yaml"], "none.yaml"),
        (["fit"], "model"),
        (["dance"], "dance"),
        ([], "subcommand"),
    ],
)
def test_a_wrong_command_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    told_line = sentence(capsys, arguments, 2)
    assert told in told_line
    assert len(told_line) < 400


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    command = ["fit", "--config", PRETRAIN, "--trainer.default_root_dir", str(tmp_path / "file" / "run")]
    assert "cannot write to the output folder" in sentence(capsys, command, 1)
    assert check_writable(tmp_path / "new" / "folder") == str(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_checkpoint_of_another_layout(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fit", "--config", PRETRAIN, "--trainer.default_root_dir", str(tmp_path), "--model.memory.ratio", "2"]
    told = sentence(capsys, [*command, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")], 1)
    assert "ratio=4, and this run asks for ratio=2" in told


def test_an_interrupted_start_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("masw_lightning.cli.import_rooms", interrupt)
    assert "stopped" in sentence(capsys, ["fit"], 130)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: Any) -> None:
        raise ValueError("not the user's fault")

    monkeypatch.setattr("masw_lightning.cli.import_rooms", bug)
    with pytest.raises(ValueError, match="not the user's fault"):
        main(["fit"])


def test_another_callbacks_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m masw_lightning`` in a folder that has a package of that name."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.partition(".")[0] == "callbacks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = sentence(capsys, ["fit"], 1)
    assert told.startswith(f"masw: Python finds another package named 'callbacks' in {tmp_path}")
    monkeypatch.delitem(sys.modules, "callbacks")


def test_main_leaves_warnings_and_loggers_as_they_were(tmp_path: Path) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = (list(warnings.filters), list(logger.filters))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "none.yaml"])
    assert (list(warnings.filters), list(logger.filters)) == before


def test_user_errors_are_value_errors() -> None:
    assert issubclass(UserError, ValueError)


def test_data_on_the_command_line_replaces_the_data_of_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """Merged, the books would keep the text field of the corpus they replace."""
    command = ["fit", "--config", "configs/pretrain.yaml", "--print_config"]
    for data in (["--data", "configs/data/local_text.yaml"], ["--data=configs/data/local_text.yaml"]):
        with pytest.raises(SystemExit):
            main([*command, *data])
        given = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
        assert [source["path"] for source in given["train"]] == ["books"]
        assert given["train"][0]["text"] is None
