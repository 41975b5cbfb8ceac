"""What the repository promises about itself: typed packages, short commented configurations, nothing local inside."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import callbacks
import masw_lightning

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
YAMLS = sorted((ROOT / "configs").rglob("*.yaml"))
# A file may be longer than 300 lines for a reason that is written here.
LONGER = {"masw_lightning/modules/base.py": "one LightningModule; its hooks share one state and belong together"}


def tracked() -> list[Path]:
    """Text files of the repository: what git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


@pytest.mark.parametrize("package", [masw_lightning, callbacks], ids=lambda package: package.__name__)
def test_both_packages_are_typed_and_shipped(package) -> None:
    folder = Path(package.__file__).parent
    assert (folder / "py.typed").is_file()
    assert folder == ROOT / package.__name__  # an editable installation, not a stray copy
    assert package.__name__ in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="masw")
    assert [callable(script.load()) for script in scripts] == [True]


def test_one_version() -> None:
    assert masw_lightning.__version__ == PROJECT["project"]["version"]
    assert importlib.metadata.version("masw-lightning") == PROJECT["project"]["version"]


def test_constraints_satisfy_the_ranges() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["gguf"],
        *project["optional-dependencies"]["dev"],
    ]
    for requirement in map(requirements.Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name != "masw-lightning":
            assert requirement.specifier.contains(names[name], prereleases=True), requirement
    assert all("+" not in version for version in names.values()), "a build suffix would fit one machine only"


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_configuration_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40
    if any(line.startswith("trainer:") for line in lines) or len(path.relative_to(ROOT).parts) == 2:
        assert lines[0].startswith("#"), "the first line says what the run is"
    values = [line for line in lines if re.search(r"\w: *[^\s#]", line) and "class_path:" not in line]
    assert sum("#" in line for line in values) >= 0.75 * len(values), "lines say what they mean"


def test_there_are_configurations() -> None:
    names = {str(path.relative_to(ROOT / "configs")) for path in YAMLS}
    assert {"pretrain.yaml", "sft.yaml", "predict.yaml"} <= names


@pytest.mark.parametrize("package", ["masw_lightning", "callbacks", "scripts"])
def test_one_idea_per_file(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        length = len(path.read_text(encoding="utf-8").splitlines())
        assert length <= 300 or str(path.relative_to(ROOT)) in LONGER, (
            f"{path} has {length} lines: split it, or say why"
        )


def test_nothing_local_is_tracked() -> None:
    local = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp)/\w|/opt/wheels")
    for path in tracked():
        found = local.search(path.read_text(encoding="utf-8", errors="replace"))
        assert not found or path == Path(__file__).resolve(), (
            f"{path} names a place on one machine: {found and found[0]}"
        )


def test_nothing_large_is_tracked() -> None:
    published = ROOT / "docs" / "results"  # tables, plots and recommended weights have a place of their own
    large = [path for path in tracked() if path.stat().st_size > 1_000_000 and published not in path.parents]
    assert not large, f"{large}: data and weights of local runs do not belong in the repository"


def test_the_documents_link_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"
