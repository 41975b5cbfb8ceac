"""The layout's arithmetic and its masks, drawn by hand."""

import pytest
import torch

from masw_lightning import MemoryLayout, UserError
from masw_lightning.errors import UserError as AlsoUserError


def mask(text):
    return torch.tensor([[c == "1" for c in line if c in "01"] for line in text.strip().splitlines()])


def test_the_notes_worked_example_by_the_definition():
    layout = MemoryLayout()
    assert (layout.num_slots(4100), layout.num_entries(4100)) == (993, 1249)


def test_counting():
    layout = MemoryLayout(3, 2, 2)
    assert [layout.num_slots(n) for n in range(9)] == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    assert layout.boundaries(8) == [5, 7] == layout.slot_positions(8)
    assert layout.slot_positions(8, "token") == [4, 6]
    assert [layout.num_entries(n) for n in (1, 3, 5, 6, 7, 8)] == [1, 3, 6, 6, 7, 7]
    assert MemoryLayout(3, 2, None).num_slots(100) == 0


def test_slot_writer_written():
    # S=1 W=2 r=2, n=6: slots at boundaries 3 and 5. Columns: raw 0..5 | slots 0, 1.
    expected = mask("""
        100000 00
        110000 00
        111000 00
        101100 10
        100110 10
        100011 11
        111000 10
        100110 11
    """)
    assert torch.equal(MemoryLayout(1, 2, 2).dense_mask(6, "slot"), expected)


def test_slot_writer_evicted():
    # W=2: slot 0 (b=3) is seen from 3+1, slot 1 (b=5) from 6; a slot row sees slots with b' <= b - 2, and itself.
    expected = mask("""
        1000000 000
        1100000 000
        1110000 000
        1011000 000
        1001100 100
        1000110 100
        1000011 110
        1110000 100
        1001100 110
        1000011 111
    """)
    layout = MemoryLayout(1, 2, 2, visibility="evicted")
    full = layout.dense_mask(7, "slot")
    assert torch.equal(full, expected)


def test_token_writer_default_is_evicted():
    expected = mask("""
        100000 00
        110000 00
        111000 00
        101100 00
        100110 10
        100011 10
    """)
    assert torch.equal(MemoryLayout(1, 2, 2).dense_mask(6, "token"), expected)


def test_no_slots_up_to_the_sinks_and_a_plain_window():
    assert torch.equal(MemoryLayout(4, 2, 2).dense_mask(4), torch.ones(4, 4).tril().bool())
    expected = mask("""
        1000
        1100
        0110
        0011
    """)
    assert torch.equal(MemoryLayout(0, 2, None).dense_mask(4), expected)


def test_vectorised_rules_equal_the_scalar_one():
    layout = MemoryLayout(3, 5, 4, visibility="evicted")
    i, k = torch.arange(40), torch.arange(9)
    assert torch.equal(
        layout.raw_sees_slot(i[:, None], k),
        torch.tensor([[layout.visible(a, b, False, True) for b in range(9)] for a in range(40)]),
    )
    assert torch.equal(
        layout.slot_sees_slot(k[:, None], k),
        torch.tensor([[layout.visible(a, b, True, True) for b in range(9)] for a in range(9)]),
    )


@pytest.mark.parametrize("field", ["sink", "window", "ratio", "rollback"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_bad_numbers(field, value):
    with pytest.raises(UserError, match=f"{field}={value!r}"):
        MemoryLayout(**{field: value})


def test_other_bad_values():
    with pytest.raises(AlsoUserError, match="visibility='always'"):
        MemoryLayout(visibility="always")
    with pytest.raises(UserError, match="writer='pen'"):
        MemoryLayout().dense_mask(4, "pen")
    with pytest.raises(UserError, match="no slots"):
        MemoryLayout(ratio=None).boundary(0)
    assert MemoryLayout(sink=0, ratio=None).sink == 0
