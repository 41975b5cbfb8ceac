"""Write the option tables of docs/configs.md from the code: names, defaults and docstrings of what a YAML may set.

    python scripts/document_options.py            rewrite the tables in place
    python scripts/document_options.py --check    only say whether they are up to date (exit status 1 if not)

The page's text is written by hand; a table stands between `<!-- options: Class -->` and `<!-- end of options -->`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from pathlib import Path

import docstring_parser

from callbacks.adapter_export import AdapterExport
from callbacks.methods import Autoregressive, FullKV, Masw, SlidingWindow
from callbacks.methods_compressed import SelfSpeculative, SnapKV, Strided
from callbacks.methods_heads import Eagle, Eagle3
from callbacks.progress_lines import ProgressLines
from callbacks.speculative_decoding import SpeculativeDecoding
from masw_lightning import MemoryLayout
from masw_lightning.adapter.backbone import Backbone
from masw_lightning.data.corpora import Source
from masw_lightning.data.datamodule import LongContextDataModule
from masw_lightning.data.longbench import PromptSource
from masw_lightning.modules import Eagle3Training, EagleTraining, MemoryModule
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import AdapterConfig, ValidationConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configs.md"
TABLE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
CLASSES: tuple[type, ...] = (
    *(MemoryModule, Backbone, MemoryLayout, AdapterConfig, OptimizerConfig, ScheduleConfig, ValidationConfig),
    *(LongContextDataModule, Source, PromptSource),
    *(SpeculativeDecoding, Autoregressive, FullKV, SlidingWindow, Masw),
    *(EagleTraining, Eagle3Training, Eagle, Eagle3, SnapKV, Strided, SelfSpeculative, ProgressLines, AdapterExport),
)
EVERYWHERE = {"name": "the row's name; null takes the method's own."}


def table(cls: type) -> str:
    """The Markdown table of what `cls` takes.

    Raises:
        KeyError: an option that no docstring of the class or its bases explains.
    """
    said = dict(EVERYWHERE)
    for base in reversed(cls.__mro__):
        for entry in docstring_parser.parse(base.__doc__ or "").params:
            said |= {name.strip(): entry.description or "" for name in entry.arg_name.split(",")}
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, parameter in list(inspect.signature(vars(cls)["__init__"]).parameters.items())[1:]:
        lines.append(f"| `{name}` | {default(parameter.default)} | {plain(said[name])} |")
    return "\n".join(lines)


def default(value: object) -> str:
    """A default as it is written in YAML."""
    if value is inspect.Parameter.empty:
        return "required"
    if dataclasses.is_dataclass(value):
        return "its own"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`[{', '.join(map(str, value))}]`" if isinstance(value, (tuple, list)) else f"`{value}`"


def plain(text: str) -> str:
    """A docstring's words as one Markdown cell, in YAML's spelling."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.replace("``", "`").split()))
    text = re.sub(r"`?\bNone\b`?", "null", text).replace("|", "\\|").strip()
    first = text.split(" ")[0]
    return (text[:1].lower() + text[1:] if first[1:].isalpha() and first[1:].islower() else text).rstrip(".")


def render(page: str) -> str:
    """The page with every table as the code has it now.

    Raises:
        ValueError: the page lacks a table, or has one of an unknown class.
    """
    tables = {cls.__name__: table(cls) for cls in CLASSES}
    named = [match[1] for match in TABLE.findall(page)]
    if sorted(named) != sorted(tables):
        raise ValueError(f"docs/configs.md has tables for {named}, the code for {list(tables)}")
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", page)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when the page is (now) up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    wanted = render(page)
    if page == wanted:
        return 0
    if chosen.check:
        print("docs/configs.md is out of date: run python scripts/document_options.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
