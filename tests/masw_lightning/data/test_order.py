"""The order of samples: a pure function of seed and epoch, each source by its weight, each rank its own share."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from masw_lightning.data.loader import EpochOrder, ResumableLoader
from masw_lightning.errors import UserError


def test_same_numbers_same_order_whatever_ran_before() -> None:
    first = EpochOrder([5, 7], [1.0, 1.0], seed=3)
    second = EpochOrder([5, 7], [1.0, 1.0], seed=3)
    torch.manual_seed(1)
    later = first.indices(4).tolist()
    [second.indices(epoch) for epoch in range(4)]
    torch.rand(9)
    assert second.indices(4).tolist() == later
    assert sorted(later) == [*range(12)]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(EpochOrder([20], [1.0], seed).indices(epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_weights_are_passes_per_epoch() -> None:
    order = EpochOrder([8, 4, 5], [0.25, 2.0, 1.0], seed=0)
    counts = Counter(order.indices(0).tolist())
    assert len(order) == 2 + 8 + 5
    assert sum(counts[i] for i in range(8)) == 2
    assert [counts[i] for i in range(8, 12)] == [2] * 4
    assert [counts[i] for i in range(12, 17)] == [1] * 5


def test_parts_of_a_source_add_up_before_any_sample_returns() -> None:
    order = EpochOrder([8], [0.25], seed=0)
    read = torch.cat([order.indices(epoch) for epoch in range(4)]).tolist()
    assert sorted(read) == [*range(8)]
    order = EpochOrder([7], [0.6], seed=1)  # 4 of 7: epochs cross the border between two passes
    read = torch.cat([order.indices(epoch) for epoch in range(7)]).tolist()
    assert Counter(read) == dict.fromkeys(range(7), 4)


def test_without_shuffling_every_epoch_is_the_plain_sequence() -> None:
    order = EpochOrder([2, 4], [1.0, 0.5], seed=0, shuffle=False)
    assert order.indices(0).tolist() == order.indices(3).tolist() == [0, 1, 2, 3]


def test_small_weight_still_gives_one_sample() -> None:
    assert len(EpochOrder([3], [0.01], seed=0)) == 1


def loader(rank: int = 0, world_size: int = 1, batch_size: int = 2, size: int = 11) -> ResumableLoader:
    return ResumableLoader(range(size), EpochOrder([size], [1.0], 0), batch_size, list, rank, world_size)  # type: ignore[arg-type]


def test_ranks_share_each_step_without_overlap() -> None:
    alone = [sorted(batch) for batch in loader(batch_size=4)]
    ranks = [list(loader(rank, world_size=2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == alone
    assert len(alone) == len(loader(batch_size=4)) == 2


def test_iterating_again_is_the_next_epoch() -> None:
    batches = loader()
    first, second = list(batches), list(batches)
    assert first == loader().batches(0).tolist()
    assert second == loader().batches(1).tolist()


def test_iterators_made_in_vain_read_nothing_and_the_epoch_may_be_told_late() -> None:
    batches = loader()
    iter(batches)
    iterator = iter(batches)
    batches.sampler.set_epoch(5)
    assert [next(iterator)] == loader().batches(5)[:1].tolist()
    assert (batches.state_dict()["epoch"], batches.state_dict()["batches"]) == (5, 1)


@pytest.mark.parametrize("read", range(1, 8))
def test_state_leads_to_the_next_batch(read: int) -> None:
    def endless(batches: ResumableLoader):
        while True:
            yield from batches

    whole = endless(loader())
    expected = [next(whole) for _ in range(12)]
    broken_off = loader()
    stream = endless(broken_off)
    assert [next(stream) for _ in range(read)] == expected[:read]
    resumed = loader()
    resumed.load_state_dict(broken_off.state_dict())
    assert resumed.state_dict() == broken_off.state_dict()
    stream = endless(resumed)
    assert [next(stream) for _ in range(12 - read)] == expected[read:]


def test_too_few_samples_for_a_step() -> None:
    with pytest.raises(UserError, match="An epoch has 3 samples, too few for one step of 2 x batch_size 2"):
        loader(world_size=2, size=3)
