"""Every prediction YAML is read by the real command line; the tiny one runs, is killed, and continues."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from callbacks.methods import Autoregressive, FullKV, Masw, Method, SlidingWindow
from callbacks.methods_compressed import SelfSpeculative, SnapKV, Strided
from callbacks.methods_heads import Eagle, Eagle3
from callbacks.predictions import FILE_NAME, read_predictions
from callbacks.speculative_decoding import SpeculativeDecoding
from masw_lightning.cli import MaswCLI, main
from masw_lightning.layout import MemoryLayout

ROOT = Path(__file__).resolve().parents[2]
METHODS = "--trainer.callbacks.init_args.methods"
PARTS = sorted(path.name for path in (ROOT / "configs" / "draft").glob("*.yaml"))
EXPECTED: dict[str, Method] = {
    "autoregressive.yaml": Autoregressive(),
    "full_kv.yaml": FullKV(),
    "swa_1024.yaml": SlidingWindow(name="swa_1024"),
    "streaming_llm.yaml": SlidingWindow(name="streaming_llm", sink=4),
    "window_equal.yaml": SlidingWindow(name="window_equal", match="shape"),
    "window_matched.yaml": SlidingWindow(name="window_matched", match="entries"),
    "snapkv.yaml": SnapKV(name="snapkv_4096"),
    "snapkv_matched.yaml": SnapKV(name="snapkv_matched", match="entries"),
    "strided.yaml": Strided(name="strided"),
    "masw.yaml": Masw(name="masw"),
    "self_speculative.yaml": SelfSpeculative(name="self_speculative"),
    "eagle.yaml": Eagle(head="runs/eagle/head", name="eagle"),
    "eagle3.yaml": Eagle3(head="runs/eagle3/head", name="eagle3"),
}
# With one model, self-speculation is "strided"; heads have to be trained or downloaded first.
TABLE = [EXPECTED[n] for n in EXPECTED if n not in ("self_speculative.yaml", "eagle.yaml", "eagle3.yaml")]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def callback(tmp_path: Path, *arguments: str, config: str = "configs/predict.yaml") -> SpeculativeDecoding:
    """The callback that a command line makes."""
    cli = MaswCLI(["--config", config, "--trainer.default_root_dir", str(tmp_path), *arguments], run=False)
    found = [c for c in cli.trainer.callbacks if isinstance(c, SpeculativeDecoding)]  # type: ignore[attr-defined]
    assert len(found) == 1
    return found[0]


def test_the_whole_table_is_the_default(tmp_path: Path) -> None:
    made = callback(tmp_path)
    assert made.methods == TABLE
    assert (made.decoding.num_draft_tokens, made.decoding.max_new_tokens, made.decoding.temperature) == (5, None, 0.0)


def test_run_time_knobs_on_the_command_line(tmp_path: Path) -> None:
    made = callback(
        tmp_path,
        *("--trainer.callbacks.init_args.num_draft_tokens", "3"),
        *("--trainer.callbacks.init_args.temperature", "0.7"),
        *("--trainer.callbacks.init_args.eos", "[1, 2]"),
        *("--trainer.callbacks.init_args.buckets", "[1024, 2048]"),
        *("--trainer.callbacks.init_args.target", "configs/tiny/backbone.yaml"),
    )
    assert made.decoding.num_draft_tokens == 3
    assert made.decoding.temperature == 0.7
    assert made.decoding.eos == [1, 2]
    assert made.buckets == [1024, 2048]
    assert made.target is not None
    assert made.target.path == "configs/tiny/model"


@pytest.mark.parametrize("name", [name for name in PARTS if name != "table.yaml"])
def test_a_part_swaps_in_from_the_command_line(tmp_path: Path, name: str) -> None:
    assert callback(tmp_path, METHODS, f"configs/draft/{name}").methods == [EXPECTED[name]]


def test_lists_of_parts(tmp_path: Path) -> None:
    both = callback(tmp_path, f"{METHODS}=[configs/draft/full_kv.yaml, configs/draft/masw.yaml]").methods
    assert both == [FullKV(), Masw(name="masw")]
    more = callback(tmp_path, f"{METHODS}+=configs/draft/full_kv.yaml").methods
    assert more == [*TABLE, FullKV()]
    assert callback(tmp_path, METHODS, "configs/draft/table.yaml", config="configs/tiny/predict.yaml").methods == TABLE


def test_settings_inside_a_method(tmp_path: Path) -> None:
    inline = "[{class_path: SlidingWindow, init_args: {match: entries, memory: configs/memory/8x.yaml}}, {class_path: "
    inline += "FullKV, init_args: {draft: configs/tiny/backbone.yaml}}]"
    window, full = callback(tmp_path, f"{METHODS}={inline}").methods
    assert isinstance(window, SlidingWindow)
    assert window.memory == MemoryLayout(ratio=8)
    assert isinstance(full, FullKV)
    assert full.draft is not None
    assert full.draft.random_init


def test_an_unknown_method_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "--config", "configs/tiny/predict.yaml", f"{METHODS}=[{{class_path: Telepathy}}]"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Telepathy" in error
    assert "Traceback" not in error


def tiny_run(folder: Path, *arguments: str) -> list[str]:
    """The tiny run's command line, without a trained memory."""
    untrained = "[configs/draft/full_kv.yaml, {class_path: Masw, init_args: {allow_untrained: true}}]"
    return [
        *("predict", "--config", "configs/tiny/predict.yaml", f"{METHODS}={untrained}"),
        *("--model.init_args.init_from", "null", "--trainer.default_root_dir", str(folder)),
        *("--trainer.callbacks.init_args.output_dir", str(folder), *arguments),
    ]


def test_the_tiny_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tiny_run(tmp_path / "run", "--trainer.limit_predict_batches", "2"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["methods"]) == ["autoregressive", "full_kv", "masw (untrained)"]
    assert all(m["overall"]["identical"] for m in summary["methods"].values())
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert "[6/6]" in capsys.readouterr().out


def test_bad_input_is_one_sentence_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["predict", "--config", "configs/tiny/predict.yaml", "--trainer.default_root_dir", str(tmp_path / "run")]
    run += ["--model.init_args.init_from", "null"]
    (tmp_path / "file").write_text("")
    for arguments, sentence in (
        (["--trainer.callbacks.init_args.output_dir", str(tmp_path / "file" / "x")], "cannot be written"),
        (["--trainer.callbacks.init_args.output_dir", str(tmp_path / "run")], "has no trained memory"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*run, *arguments])
        assert stopped.value.code not in (0, None)
        captured = capsys.readouterr().err.strip().splitlines()
        assert sentence in captured[-1]
        assert not any("Traceback" in line for line in captured)


def test_killed_for_real_then_continued_by_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "masw_lightning", *tiny_run(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    file = tmp_path / FILE_NAME
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not file.exists() or file.read_bytes().count(b"\n") < 4):
            assert running.poll() is None
            time.sleep(0.01)
    finally:
        running.kill()
        running.wait()
    kept = file.read_bytes().split(b"\n")
    assert 4 <= len(kept) - 1 < 24
    with file.open("ab") as half:
        half.write(b'{"id": "cut off')
    two = [*command, "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = subprocess.run(two, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "cut off in the middle" in done.stdout
    assert file.read_bytes().split(b"\n")[: len(kept) - 1] == kept[:-1]
    assert not list(tmp_path.glob("predictions.rank*"))
    records = read_predictions(tmp_path)
    assert len(records) == len({(r.id, r.method) for r in records}) == 24
    assert all(r.identical_to_autoregressive for r in records)
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is True
