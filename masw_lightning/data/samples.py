"""Tokenised documents seen as training samples: blocks of a packed stream, or one prompt with its answer.

Joins ``tokens.py`` (where token ids lie) to ``packing.py`` (how they are cut); knows no order and no Lightning.

Shapes: n tokens of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from masw_lightning.data.packing import BlockIndex, fit_pair
from masw_lightning.data.tokens import TokenTable
from masw_lightning.errors import UserError


class Sample(NamedTuple):
    """One row of a batch: ``input_ids [n]``, ``labels [n]``, and the place in the data that it came from."""

    input_ids: Tensor
    labels: Tensor
    source: str


class PackedTexts(Dataset[Sample]):
    """Blocks of exactly ``length`` tokens over the documents ``rows`` of a table, every token supervised.

    Raises:
        UserError: the documents do not fill one block.
    """

    def __init__(self, table: TokenTable, length: int, rows: Tensor | None = None, what: str = "The source") -> None:
        self.table = table
        self.rows = torch.arange(len(table)) if rows is None else rows
        self.index = BlockIndex(table.lengths("tokens")[self.rows], length)
        if not len(self.index):
            raise UserError(
                f"{what} {table.label} holds {self.index.tokens} tokens in {len(self.rows)} documents, too few to fill "
                f"one sequence of {length}; add text or lower sequence_length."
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, block: int) -> Sample:
        pieces = [(int(self.rows[document]), start, stop) for document, start, stop in self.index.pieces(block)]
        ids = torch.cat([self.table.read("tokens", *piece) for piece in pieces])
        return Sample(ids, ids.clone(), _span(self.table.place(pieces[0][0]), self.table.place(pieces[-1][0])))


class Pairs(Dataset[Sample]):
    """Prompts with their answers, one row each, at most ``length`` tokens, only the answers supervised."""

    def __init__(self, table: TokenTable, length: int, rows: Tensor | None = None, what: str = "The source") -> None:
        self.table, self.length = table, length
        self.rows = torch.arange(len(table)) if rows is None else rows
        if not len(self.rows):
            raise UserError(f"{what} {table.label} has no row left to learn from; check its answers and on_empty.")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.rows[index])
        ids, labels = fit_pair(self.table.read("prompt", row), self.table.read("answer", row), self.length)
        return Sample(ids, labels, self.table.place(row))


def _span(first: str, last: str) -> str:
    """Two places as one: "a.jsonl, lines 3 to 5" within a file, else both in full."""
    if first == last:
        return first
    (head, _, from_), (other, _, to) = first.rpartition(" "), last.rpartition(" ")
    if head == other and head.endswith((", line", ", row")):
        return f"{head}s {from_} to {to}"
    return f"{first} to {last}"


def samples(
    table: TokenTable, length: int, rows: Tensor | None = None, what: str = "The source"
) -> PackedTexts | Pairs:
    """The view that suits the table: packed blocks for whole texts, one row each for pairs."""
    return (Pairs if table.is_pair else PackedTexts)(table, length, rows, what)
