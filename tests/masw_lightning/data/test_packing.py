"""Packing, cutting and padding against what is written out by hand."""

from __future__ import annotations

import pytest
import torch

from masw_lightning.data.packing import IGNORE, BlockIndex, cut_middle, fit_pair, pad_rows


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_blocks_lie_where_the_drawing_says() -> None:
    # documents  A A A | B | C C C C C | D D       blocks of 4: AAAB CCCC CDD(dropped)
    index = BlockIndex(ids(3, 1, 5, 2), 4)
    assert (index.tokens, len(index)) == (11, 2)
    assert index.pieces(0) == [(0, 0, 3), (1, 0, 1)]
    assert index.pieces(1) == [(2, 0, 4)]
    with pytest.raises(IndexError):
        index.pieces(2)


def test_blocks_equal_the_plain_concatenation() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(200):
        lengths = torch.randint(0, 9, (int(torch.randint(1, 12, (1,), generator=generator)),), generator=generator)
        block = int(torch.randint(1, 14, (1,), generator=generator))
        documents = [torch.arange(int(n)) + 100 * i for i, n in enumerate(lengths)]
        stream = torch.cat(documents)
        index = BlockIndex(lengths, block)
        assert len(index) == len(stream) // block, case
        for b in range(len(index)):
            packed = torch.cat([documents[d][start:stop] for d, start, stop in index.pieces(b)])
            assert torch.equal(packed, stream[b * block : (b + 1) * block]), case


def test_no_documents_no_blocks() -> None:
    assert len(BlockIndex(ids(), 4)) == 0


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(1, [0]), (2, [0, 9]), (3, [0, 1, 9]), (4, [0, 1, 8, 9]), (9, [0, 1, 2, 3, 4, 6, 7, 8, 9]), (10, [*range(10)])],
)
def test_cut_keeps_both_ends_and_the_exact_budget(budget: int, kept: list[int]) -> None:
    assert cut_middle(torch.arange(10), budget).tolist() == kept


def test_cut_leaves_short_prompts_alone() -> None:
    assert cut_middle(torch.arange(3), 7).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="at least one token"):
        cut_middle(torch.arange(3), 0)


def test_pair_that_fits() -> None:
    row, labels = fit_pair(ids(1, 2, 3), ids(8, 9), 5)
    assert row.tolist() == [1, 2, 3, 8, 9]
    assert labels.tolist() == [IGNORE, IGNORE, IGNORE, 8, 9]


def test_long_prompt_is_cut_in_the_middle_and_the_answer_survives() -> None:
    row, labels = fit_pair(torch.arange(10), ids(70, 71, 99), 7)
    assert row.tolist() == [0, 1, 8, 9, 70, 71, 99]
    assert labels.tolist() == [IGNORE] * 4 + [70, 71, 99]


def test_long_answer_is_cut_at_its_end_behind_one_prompt_token() -> None:
    row, labels = fit_pair(ids(5, 6), torch.arange(20, 30), 4)
    assert row.tolist() == [5, 20, 21, 22]
    assert labels.tolist() == [IGNORE, 20, 21, 22]


def test_answer_without_prompt() -> None:
    assert fit_pair(ids(), ids(1, 2, 3), 2)[1].tolist() == [1, 2]


def test_every_pair_has_supervised_tokens_and_keeps_its_length() -> None:
    for prompt in range(7):
        for answer in range(1, 7):
            for length in range(2, 12):
                row, labels = fit_pair(torch.arange(prompt), torch.arange(answer) + 50, length)
                assert len(row) == len(labels) == min(prompt + answer, length)
                assert (labels != IGNORE).sum() == min(answer, length - (1 if prompt else 0))
                assert torch.equal(row[labels != IGNORE], labels[labels != IGNORE])


def test_padding_is_to_the_right_and_not_supervised() -> None:
    rows, labels = pad_rows([(ids(1, 2, 3), ids(IGNORE, 2, 3)), (ids(4), ids(4))], pad_id=0)
    assert rows.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert labels.tolist() == [[IGNORE, 2, 3], [4, IGNORE, IGNORE]]
