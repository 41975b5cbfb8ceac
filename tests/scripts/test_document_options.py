"""docs/configs.md says what the code takes: its tables are those that scripts/document_options.py writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document_options", ROOT / "scripts" / "document_options.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_a_stale_page_is_noticed_and_rewritten(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "configs.md"
    page.write_text(
        script.PAGE.read_text(encoding="utf-8").replace("| `rollback` |", "| `rolback` |"), encoding="utf-8"
    )
    current = script.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert script.main([]) == 0
    assert page.read_text(encoding="utf-8") == current


def test_a_missing_table_is_noticed(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="has tables for"):
        script.render("no tables here")
