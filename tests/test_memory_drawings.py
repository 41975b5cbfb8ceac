"""The hand-drawn masks of docs/memory.md are what MemoryLayout computes; neither may change without the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from masw_lightning.layout import MemoryLayout

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "memory.md").read_text(encoding="utf-8")
DRAWINGS = re.findall(r"^```mask (.+?)\n(.+?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_all_four_memories_are_drawn() -> None:
    assert len({title for title, _ in DRAWINGS}) == len(DRAWINGS) == 4


@pytest.mark.parametrize(("title", "drawing"), DRAWINGS, ids=[title for title, _ in DRAWINGS])
def test_a_drawing_is_the_dense_mask(title: str, drawing: str) -> None:
    given = dict(part.split("=") for part in title.split())
    n, writer = int(given["n"]), given["writer"]
    layout = MemoryLayout(int(given["S"]), int(given["W"]), int(given["r"]), visibility=given["visibility"])
    rows = [line.split()[2:] for line in drawing.splitlines() if line.startswith(("raw ", "slot "))]
    drawn = torch.tensor([[cell == "#" for cell in raw + slots] for raw, slots in rows])
    assert torch.equal(layout.dense_mask(n, writer), drawn)


def test_the_table_of_entries() -> None:
    for ratio, slots, entries in re.findall(r"^\| (\d) \(.*?\| ([\d,]+) \| ([\d,]+) \|", PAGE, flags=re.MULTILINE):
        layout = MemoryLayout(128, 128, int(ratio))
        assert f"{layout.num_slots(4100):,}" == slots
        assert f"{layout.num_entries(4100):,}" == entries
        assert f"{4100 / layout.num_entries(4100):.2f}x fewer" in PAGE
