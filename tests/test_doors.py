"""Imports point one way. Read from the syntax trees, so that late and type-only imports count as well.

errors <- layout <- attention <- cache <- adapter <- drafts <- decoding <- modules, data <- callbacks <- cli
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("masw_lightning", "callbacks")
# A room may import rooms with a smaller number, and itself. Rooms of one number do not know each other.
FLOOR = {
    "errors": 0,
    "metrics": 1,
    "layout": 1,
    "attention": 2,
    "cache": 3,
    "adapter": 4,
    "drafts": 5,
    "decoding": 6,
    "modules": 7,
    "data": 7,
    "": 7,  # masw_lightning/__init__.py: what the Python API exports
    "callbacks": 8,
    "cli": 9,
    "__main__": 10,
}
# Plain tensor code: these files import the standard library, these packages, our errors, and each other; nothing else.
TENSORS_ONLY = {
    "masw_lightning/decoding/verification.py": {"torch"},
    "masw_lightning/decoding/sampling.py": {"torch"},
    "masw_lightning/data/packing.py": {"torch"},
    "masw_lightning/metrics.py": {"torch", "torchmetrics"},
}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted module name of a source file; a package's __init__ carries the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, source: str | None = None) -> set[str]:
    """Every module a file imports, absolute; `from a import b` counts as a.b where that is a module of ours."""
    found = set()
    module = name_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                at = ROOT.joinpath(*inner.split("."))
                found.add(inner if at.with_suffix(".py").exists() or (at / "__init__.py").exists() else base)
    return found


def room(module: str) -> str | None:
    """The room a dotted name lies in; None for foreign modules."""
    first, _, rest = module.partition(".")
    if first == "callbacks":
        return "callbacks"
    return rest.partition(".")[0] if first == "masw_lightning" else None


def broken(path: Path, source: str | None = None) -> list[str]:
    """The imports of a file that go through a closed door, as sentences."""
    here = room(name_of(path))
    assert here in FLOOR, f"{path} lies in no known room: give it a floor in tests/test_doors.py"
    wrong = []
    for module in sorted(imports(path, source)):
        there = room(module)
        if module.partition(".")[0] in ("scripts", "tests", "configs", "conftest"):
            wrong.append(f"{path.name} imports {module}: nothing imports scripts, tests or configs")
        elif there is None or there == here:
            continue
        elif there not in FLOOR:
            wrong.append(f"{path.name} imports {module}, which is in no known room")
        elif FLOOR[there] >= FLOOR[here]:
            wrong.append(f"{path.name} ({here}) imports {module} ({there or 'the whole package'}): that door is closed")
        elif here == "modules" and there == "drafts":
            wrong.append(f"{path.name} imports {module}: training modules know no draft policies")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    assert broken(path) == []


def test_a_closed_door_is_noticed() -> None:
    engine = ROOT / "masw_lightning" / "decoding" / "engine.py"
    base = ROOT / "masw_lightning" / "modules" / "base.py"
    assert broken(engine, "def f():\n    from masw_lightning.data import packing")  # upwards, inside a function
    assert broken(engine, "from ..modules.base import X")  # upwards, relative
    assert broken(engine, "import masw_lightning")  # the whole package from inside
    assert broken(base, "from masw_lightning.drafts import FullKVDraft")
    assert broken(base, "import scripts.quickstart")
    assert broken(base, "import callbacks.report")
    assert not broken(base, "import torch\nfrom masw_lightning.layout import MemoryLayout")


@pytest.mark.parametrize("name", sorted(TENSORS_ONLY))
def test_plain_tensor_files_import_nothing_else(name: str) -> None:
    allowed = TENSORS_ONLY[name] | set(sys.stdlib_module_names)
    ours = {"masw_lightning.errors"} | {name_of(ROOT / other) for other in TENSORS_ONLY}
    foreign = {m for m in imports(ROOT / name) if m.partition(".")[0] not in allowed} - ours
    assert foreign == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_knows_no_lightning(path: Path) -> None:
    floor = FLOOR[room(name_of(path)) or ""]
    heavy = {module.partition(".")[0] for module in imports(path)}
    if name_of(path) == "masw_lightning" or floor <= FLOOR["decoding"]:
        assert not heavy & {"lightning", "pytorch_lightning", "datasets", "tensorboard", "jsonargparse", "matplotlib"}
    if floor < FLOOR["attention"] or (floor == FLOOR["attention"] and path.name != "interface.py"):
        assert "transformers" not in heavy  # one file knows how a Hugging Face model is run through our attention


def test_importing_the_package_stays_light() -> None:
    code = "import sys, masw_lightning; print([m for m in ('lightning', 'datasets', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_package_below_tests() -> None:
    # tests/callbacks/__init__.py would shadow the callbacks package under pytest
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "two test files carry one name"


def test_scripts_and_tests_are_imported_by_nobody() -> None:
    for path in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        siblings = {other.stem for other in (ROOT / "scripts").rglob("*.py")}
        assert not {m.partition(".")[0] for m in modules} & ({"scripts", "tests", "configs"} | siblings), path
