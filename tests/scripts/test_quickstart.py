"""scripts/quickstart.py: what runs, what is kept, what a failure says. The stages here are real, small commands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
APPEND = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.open('a').write('x')"


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_script", ROOT / "scripts" / "quickstart.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def stage(quickstart: ModuleType, folder: Path, **given):
    """A stage that appends one letter to `made` in its folder: the letters count how often it ran."""
    given = {"makes": (folder / "made",), "command": ("-c", APPEND, str(folder / "made"))} | given
    return quickstart.Stage(name="some", title="some stage", folder=folder, **given)


def go(quickstart: ModuleType, some, again: bool = False) -> bool:
    """Run it the way main does; True if it ran."""
    return quickstart.run(some, some.command, quickstart.digest(some, some.command, {}), again) is not None


def test_a_finished_stage_is_kept_until_something_changes(quickstart: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "some.yaml"
    config.write_text("lr: 1")
    some = stage(quickstart, tmp_path / "out", reads=(config,))
    assert go(quickstart, some)
    assert not go(quickstart, some)
    assert go(quickstart, some, again=True)
    config.write_text("lr: 2")
    assert go(quickstart, some)
    assert (tmp_path / "out" / "made").read_text() == "x"  # each run began in an empty folder
    (tmp_path / "out" / "made").unlink()
    assert go(quickstart, some)  # a result that was deleted is made again


def test_an_interrupted_stage_starts_anew_or_continues(quickstart: ModuleType, tmp_path: Path) -> None:
    for continues, letters in ((False, "x"), (True, "xx")):
        folder = tmp_path / str(continues)
        fails = ("-c", APPEND + "; sys.exit(3)", str(folder / "made"))
        some = stage(quickstart, folder, continues=continues, command=fails)
        with pytest.raises(quickstart.StageError, match="exit status 3"):
            go(quickstart, some)
        works = stage(quickstart, folder, continues=continues)
        quickstart.run(works, works.command, quickstart.digest(some, some.command, {}), False)
        assert (folder / "made").read_text() == letters


def test_a_continuing_stage_starts_anew_when_it_is_another(quickstart: ModuleType, tmp_path: Path) -> None:
    some = stage(quickstart, tmp_path / "out", continues=True)
    assert go(quickstart, some)
    other = stage(quickstart, tmp_path / "out", continues=True, command=(*some.command, "other"))
    assert go(quickstart, other)
    assert (tmp_path / "out" / "made").read_text() == "x"


def test_a_stage_that_makes_nothing_has_failed(quickstart: ModuleType, tmp_path: Path) -> None:
    some = stage(quickstart, tmp_path / "out", command=("-c", "pass"))
    with pytest.raises(quickstart.StageError, match="made no"):
        go(quickstart, some)
    with pytest.raises(quickstart.StageError):
        go(quickstart, some)  # and is not taken for finished the next time


def test_a_stage_depends_on_those_it_builds_on_alone(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = quickstart.stages()

    def digests(changed: str) -> dict[Path, str]:
        found: dict[Path, str] = {}
        for each in path:
            command = (*each.command, "changed") if str(each.folder).endswith(changed) else each.command
            found[each.folder] = quickstart.digest(each, command, found)
        return found

    plain, other = digests("nothing"), digests("pretrain/slot")
    differ = {str(folder.relative_to("runs/quickstart")) for folder in plain if plain[folder] != other[folder]}
    assert differ == {"pretrain/slot", "sft/slot", "predict"}


def test_the_configurations_of_every_stage_exist(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for each in quickstart.stages():
        assert all(path.is_file() for path in each.reads), each.reads
        if "--config" in each.command:
            assert Path(each.command[each.command.index("--config") + 1]) in each.reads


def test_parts_are_followed(quickstart: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "4x.yaml").write_text("ratio: 4\n")
    (tmp_path / "memory.yaml").write_text("memory: memory/4x.yaml  # a part\n")
    (tmp_path / "run.yaml").write_text("model: memory.yaml\ndata: missing.yaml\n")
    names = [path.relative_to(tmp_path).as_posix() for path in quickstart.parts(tmp_path / "run.yaml")]
    assert names == ["memory/4x.yaml", "memory.yaml", "run.yaml"]
