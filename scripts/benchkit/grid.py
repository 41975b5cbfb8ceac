"""A table's grid, read from YAML: targets × drafts × prefixes × methods × data sets. Knows no models and no decoding.

A YAML string that ends in `.yaml` stands for that file's content, seen from the file that names it; a part that holds a
list is spliced into the list that names it.
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, get_loader

import callbacks.methods_compressed
import callbacks.methods_heads  # noqa: F401  YAML selects their classes by name
from benchkit.options import count
from callbacks.methods import Method
from callbacks.trial import DEFAULT_NEW_TOKENS, Decoding
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.data.longbench import PromptSource
from masw_lightning.errors import UserError
from masw_lightning.layout import MemoryLayout


@dataclass
class Target:
    """A model that verifies.

    Args:
        name: in tables and folders; unique.
        backbone: the model.
        prefixes: prompt lengths in tokens; every prompt has exactly one of them.
        rows: rows of each data set; None leaves it to the sources' limits.
        methods: what drafts with this target's own states or weights: EAGLE heads, self-speculation.
    """

    name: str
    backbone: Backbone
    prefixes: list[int]
    rows: int | None = None
    methods: list[Method] = field(default_factory=list)


@dataclass
class Draft:
    """A model that drafts, for every target.

    Args:
        name: in tables, where there are several; unique.
        backbone: the model; None: the target itself.
        methods: what belongs to this draft only: its trained memories.
    """

    name: str
    backbone: Backbone | None = None
    methods: list[Method] = field(default_factory=list)


@dataclass
class Grid:
    """The whole table.

    Args:
        title: of the page.
        targets: each with every draft.
        drafts: each with `methods` and its own.
        methods: of every draft. Autoregressive decoding is always there; the lines of equal entries beside each MASW
            row are added.
        sources: data sets.
        decoding: K, new tokens and sampling, the same for all.
        chat_template: dress prompts by the target's chat template.
        memory: what a method that matches a memory, and names none, is matched to.
        warmup_tokens: length of an unrecorded decode per method before the first measurement; 0 does without.
        remark: a sentence for the page.
    """

    title: str
    targets: list[Target]
    drafts: list[Draft]
    methods: list[Method]
    sources: list[PromptSource]
    decoding: Decoding = field(default_factory=Decoding)
    chat_template: bool = False
    memory: MemoryLayout = field(default_factory=MemoryLayout)
    warmup_tokens: int = 256
    remark: str | None = None

    def limit(self, of_dataset: int | None) -> int:
        """New tokens of a prompt: the grid's number, else the data set's own."""
        return self.decoding.max_new_tokens or of_dataset or DEFAULT_NEW_TOKENS


def read_grid(path: Path, data: Path | None = None) -> Grid:
    """The grid in a YAML file.

    Args:
        data: a folder in which the sources' files lie under their own names, instead of where the YAML says.

    Raises:
        UserError: no such file, not a grid, two targets or drafts of one name, or an empty list.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--grid", type=Grid)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    try:
        grid: Grid = instantiate(parser.parse_object({"grid": _read(path)})).grid
    except (ArgumentError, TypeError) as error:
        raise UserError(f"{path.name} is no grid of a table ({' '.join(str(error).split())[:400]}).") from error
    for what, names in (("target", [t.name for t in grid.targets]), ("draft", [d.name for d in grid.drafts])):
        if not names or len(set(names)) < len(names):
            raise UserError(f"{path.name} names {names or 'no'} {what}s: give at least one, each a name of its own.")
    for target in grid.targets:
        check_prefixes(target.prefixes, target.name)
    if data is not None:
        grid.sources = [_redirect(source, data) for source in grid.sources]
    return grid


def check_prefixes(prefixes: list[int], name: str) -> None:
    """Raise `UserError` unless these are different positive lengths."""
    if not prefixes or min(prefixes) < 1 or len(set(prefixes)) < len(prefixes):
        raise UserError(f"prefixes={prefixes} of target '{name}': give different positive numbers of tokens.")


def grid_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The command line of a script that runs a grid."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)
    made.add_argument("--config", type=Path, required=True, help="a grid, such as configs/table1/cpu_smollm2.yaml")
    made.add_argument("--data", type=Path, help="folder that holds the sources' files, instead of where the YAML says")
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default cpu")
    made.add_argument("--threads", type=count, help="CPU threads of PyTorch; default its own choice")
    made.add_argument("--out", type=Path, default=Path("docs/results") / name, help=f"default docs/results/{name}")
    made.set_defaults(dtype=[], writers=[])
    return made


def _redirect(source: PromptSource, folder: Path) -> PromptSource:
    if source.path is None:
        return source
    return replace(source, path=str(folder / source.path.partition("::")[0].rpartition("/")[2]))


def _read(path: Path) -> Any:
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except Exception as error:  # the file system's, and whatever the parser of YAML has
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot read {path} ({reason}): give a YAML file that exists.") from None
    return _resolve(content, path.parent)


def _resolve(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value.endswith(".yaml"):
        return _read(folder / value)
    if isinstance(value, dict):
        return {key: _resolve(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for item in value:
            part = _resolve(item, folder)
            found += part if isinstance(item, str) and isinstance(part, list) else [part]
        return found
    return value
