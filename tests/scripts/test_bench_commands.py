"""scripts/bench_*.py: every command runs on tiny shapes, writes its three files, and fails in one sentence."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from callbacks.trial import margin_after
from masw_lightning import generate, prefill_target

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--dtype", "float32", "--repeats", "1", "--ratios", "4", "--sink", "16", "--window", "16"]
SHAPE = ["--shapes", "tiny"]
COMMANDS = {
    "bench_prefill": ["--prefixes", "48,96"],
    "bench_memory": ["--prefixes", "48,96", "--writers", "token", "--swa", "32"],
    "bench_decode": [
        "--prefixes",
        "48,96",
        "--swa",
        "32",
        "--new-tokens",
        "13",
        "--acceptance",
        "2.5",
        "--widest",
        "3",
    ],
    "bench_end_to_end": ["--prefixes", "48,96", "--swa", "32", "--new-tokens", "8", "--prompts", "1"],
    "bench_compile": ["--prefixes", "48", "--backend", "eager"],
    "bench_training": ["--prefixes", "64", "--no-checkpointing"],
    "bench_floors": [
        *["--short", "48", "--middle", "64", "--long", "96", "--long-repeats", "1", "--rounds", "2"],
        *["--groups", "kv,steps,decode,verify,speculate,prefill"],
    ],
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as it is when a script is run

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_benchmark_is_tried_here() -> None:
    assert {path.stem for path in (ROOT / "scripts").glob("bench_*.py")} == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_benchmark_writes_its_three_files(name: str, script, tmp_path: Path) -> None:
    assert script(name).main([*TINY, *SHAPE, *COMMANDS[name], "--out", str(tmp_path)]) == 0
    held = json.loads((tmp_path / f"{name}.json").read_text())
    assert held["rows"] and held["command"].startswith(f"python scripts/{name}.py --dtype float32")
    assert {"date", "device", "commit", "versions", "cpus"} <= held["environment"].keys()
    page = (tmp_path / f"{name}.md").read_text()
    assert page.startswith("# ") and f"{name}.png" in page and held["command"] in page
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for text in (page, json.dumps(held)):
        assert str(tmp_path.parent) not in text and str(ROOT) not in text  # nothing of this machine's folders
        assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", text)


def test_a_decode_agrees_with_its_plan_and_its_prediction_is_equation_1(script, tmp_path: Path) -> None:
    script("bench_decode").main([*TINY, *SHAPE, *COMMANDS["bench_decode"], "--out", str(tmp_path)])
    held = json.loads((tmp_path / "bench_decode.json").read_text())
    steps = {r["method"]: r["median_ms"] for r in held["rows"] if r["kind"] == "step" and r["prefix"] == 96}
    decodes = [r for r in held["rows"] if r["kind"] == "decode"]
    assert {"full KV", "window 32", "masw 4x slot", "masw 4x token"} == {r["method"] for r in decodes}
    for row in decodes:
        assert 3.0 <= row["emitted"] <= 3.5  # 2.5 accepted and one from the target, the last iteration cut
        share = 5 * steps[row["method"]] / steps["target"]
        assert row["predicted"] == pytest.approx(row["emitted"] / (share + 1))
    assert {line["method"] for line in held["lines"]} == steps.keys()


def test_floors_keep_the_rows_of_other_groups(script, tmp_path: Path) -> None:
    floors = script("bench_floors")
    given = [*TINY, *SHAPE, *COMMANDS["bench_floors"], "--out", str(tmp_path), "--groups"]
    for groups in ("kv", "verify", "verify"):
        assert floors.main([*given, groups]) == 0
    rows = json.loads((tmp_path / "bench_floors.json").read_text())["rows"]
    assert [row["group"] for row in rows] == ["kv", "kv", "verify"]
    assert all(row["verdict"] in ("reached", "missed") for row in rows)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--shapes", "huge"], "shape 'huge' is unknown"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--writers", "pen"], "writer='pen' is unknown"),
        (["--model", "./missing.gguf"], "no GGUF file"),
    ],
)
def test_a_mistake_is_one_sentence(given: list[str], sentence: str, script, tmp_path: Path, capsys) -> None:
    assert script("bench_prefill").main([*SHAPE, "--prefixes", "48", "--out", str(tmp_path), *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench_prefill: ") and sentence in said and said.count("\n") == 1


def test_the_gpu_check_parses_and_stays_within_its_time() -> None:
    check = ROOT / "scripts" / "gpu_check.sh"
    assert subprocess.run(["bash", "-n", check], check=False).returncode == 0
    text = check.read_text()
    limits = [int(number) for number in re.findall(r"^step (\d+) ", text, re.MULTILINE)]
    assert len(limits) == 5 and sum(limits) < 480  # seconds: under 8 minutes whatever happens
    assert all((ROOT / name).is_file() for name in re.findall(r"scripts/bench_\w+\.py", text))


def test_real_text_becomes_prompts(script, tmp_path: Path) -> None:
    bench = script("bench_end_to_end")
    (tmp_path / "b.txt").write_text("two words")
    (tmp_path / "a.txt").write_text("one")
    assert bench.texts(str(tmp_path)) == ["one", "two words"]
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n\n{"context": "y"}\n')
    assert bench.texts(str(tmp_path / "c.jsonl")) == ["x", "y"]
    with pytest.raises(ValueError, match="cannot read texts"):
        bench.texts(str(tmp_path / "d.jsonl"))

    class Letters:
        def __call__(self, text: str):
            return type("Encoded", (), {"input_ids": [ord(c) for c in text]})

    found = bench.prompts(Letters(), ["abc", "defgh", "ijklm"], 5, 2)
    assert ["".join(map(chr, ids[0].tolist())) for ids in found] == ["abcde", "ijklm"]
    with pytest.raises(ValueError, match="give 1 prompts of 5"):
        bench.prompts(Letters(), ["abcdefg"], 5, 2)


def test_margin_where_texts_part(script, build_model) -> None:
    bench, model = script("bench_end_to_end"), build_model()
    ids, more = torch.arange(20)[None], [3, 1, 4]
    prefix = prefill_target(model, ids, 8)
    text = generate(model, ids, None, 5, 8, eos_token_id=[], prefix=prefix).tokens
    margin = bench.margin_after(prefix, more)
    assert margin == pytest.approx(margin_after(model, ids, more), abs=1e-5)
    assert generate(model, ids, None, 5, 8, eos_token_id=[], prefix=prefix).tokens == text  # the cache is as it was


def test_where_a_method_passes_one(script) -> None:
    crossover = script("bench_end_to_end").crossover
    assert crossover([(4096, 0.8), (16384, 1.2)]) == "about 8,192"  # halfway in log2
    assert crossover([(16384, 1.2), (4096, 1.0)]) == "at or below 4,096"
    assert crossover([(4096, 0.7), (8192, 0.9)]) == "not up to 8,192"
    assert crossover([(4096, 1.1), (8192, 0.9), (16384, 1.1)]) == "about 11,585"  # from where it stays above
    assert crossover([]) == "not measured"
