"""What README.md says can be typed, can be typed: its Python runs on a tiny model, its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from masw_lightning import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.partition(" #")[0].strip() for line in README.splitlines() if re.match(r"masw (fit|predict) ", line)]


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 5
    assert README.count("```python") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        cli.main([*shlex.split(command)[1:], "--print_config"])
    assert ended.value.code in (0, None), capsys.readouterr().err


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny" / "model")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    example = README.split("```python")[1].split("```")[0]
    example = re.sub(r'^name = ".*"', f"name = {str(folder)!r}", example, flags=re.MULTILINE)
    example = example.replace('"A long prompt …"', '"a long prompt, " * 60')
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert len(names["out"].tokens[0]) > 1
    plain = names["generate"](names["model"], names["ids"], max_new_tokens=64)
    assert names["out"].tokens == plain.tokens
