"""Sources of text: which files or hub dataset, which of a row's fields, and how they become a prompt or a text.

Knows no files (see ``readers.py``), no tokens, no Lightning.

Relative paths are relative to the current directory.
"""

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from masw_lightning.errors import UserError


@dataclass
class Location:
    """Where rows come from: exactly one of ``path`` and ``hub``.

    Args:
        path: A .jsonl, .parquet or .txt file (a text file is one row with the field ``text``), a glob, a folder (all
            such files below it), or a URL that fsspec opens, such as ``hf://datasets/owner/name/*.jsonl`` or
            ``zip://data/*.jsonl::local.zip``. Files are read in sorted order.
        hub: A dataset's name on the Hugging Face hub, for ``datasets.load_dataset``.
        split: The hub dataset's split.
        subset: The hub dataset's configuration name.
        revision: The hub dataset's branch, tag or commit.
        limit: At most so many rows of the source (of prompts: of each data set in it), for a try-out.
    """

    path: str | None = None
    hub: str | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    limit: int | None = None

    @property
    def label(self) -> str:
        """How messages name this location."""
        return self.path or self.hub or "a source without path"


@dataclass
class Source(Location):
    """Rows to learn from: whole texts (``text``), or a prompt with the answer to supervise (``prompt`` and ``answer``).

    ``text``, ``prompt`` and ``answer`` are each the name of a field, or, with braces, a template over fields:
    ``"Summarize.\\n\\n{chapter}\\n\\nSummary:"``. A field that a row may lack or leave empty is written ``{input?}``.

    Args:
        text: Field or template of a whole text. The default is the field "text" when prompt and answer are not given.
        prompt: Field or template of the prompt; not supervised.
        answer: Field or template of the answer; supervised.
        weight: Passes over this source per epoch: 1 reads each sample once, 2 twice, 0.25 a quarter of them (the next
            quarter in the next epoch). A sample is a packed sequence or a prompt with its answer, so a source's share
            of an epoch is ``weight * samples`` over the sum of all sources. 0 leaves the source out.
        on_empty: What to do with a row whose text is null or whose answer is null or blank: stop, or leave it out.
    """

    text: str | None = None
    prompt: str | None = None
    answer: str | None = None
    weight: float = 1.0
    on_empty: Literal["error", "skip"] = "error"


class Row(Mapping[str, object]):
    """One row and where it stands; ``str()`` is that place, as messages and batches name it."""

    def __init__(
        self,
        fields: dict[str, object],
        file: str,
        number: int,
        unit: Literal["line", "row", ""],
        columns: list[str] | None = None,
    ) -> None:
        self.fields, self.file, self.number, self.unit = fields, file, number, unit
        self.columns = list(fields) if columns is None else columns  # of the file, also those not read

    def __getitem__(self, field: str) -> object:
        return self.fields[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" if self.unit else self.file


class Template:
    """A field's name, or text with ``{fields}``; ``option`` is the YAML key it was given under, for messages."""

    def __init__(self, spec: str, option: str) -> None:
        self.spec, self.option = spec, option
        try:
            parts = list(string.Formatter().parse(spec)) if "{" in spec or "}" in spec else [("", spec, "", None)]
        except ValueError as error:
            raise UserError(
                f"The template {spec!r} of {option!r} is broken ({error}); write a brace twice to mean it."
            ) from error
        self.parts = [(literal, field) for literal, field, _, _ in parts]
        if any(form or conversion for _, _, form, conversion in parts) or "" in self.names:
            raise UserError(f"The template {spec!r} of {option!r} may hold plain {{field}} names only.")

    @property
    def names(self) -> list[str]:
        """The fields it reads, optional ones included."""
        return [field.removesuffix("?") for _, field in self.parts if field is not None]

    def fill(self, row: Row) -> str | None:
        """The text for ``row``, or None when a field that must be there is null.

        An optional field that is missing takes the white space before it along, so that
        ``"{instruction}\\n\\n{input?}\\n\\nAnswer:"`` has no gap without an input.

        Raises:
            UserError: a field is missing, or is not a string.
        """
        text = ""
        for literal, field in self.parts:
            text += literal
            if field is None:
                continue
            name = field.removesuffix("?")
            value = row.get(name)
            if name != field and (value is None or value == ""):
                text = text.rstrip()
            elif name not in row:
                has = ", ".join(map(repr, row.columns)) or "none"
                raise UserError(
                    f"{row} has no field {name!r} (its fields: {has}); name the right one in {self.option!r}."
                )
            elif value is None:
                return None
            elif not isinstance(value, str):
                raise UserError(
                    f"{row}: the field {name!r} is of type {type(value).__name__}, not a string; correct the row or "
                    f"name another field in {self.option!r}."
                )
            else:
                text += value
        return text
