"""The order of training samples, and a loader that a checkpoint can put back to the very next batch.

Both are pure functions of numbers: the sample at ``(seed, epoch, index)`` never depends on what ran before, on the
number of workers or on the global random state. Knows no text and no model. Lightning calls the loader's ``state_dict``
when it saves a checkpoint, its ``load_state_dict`` when it resumes, and its sampler's ``set_epoch`` before each epoch.

Shapes: B rows of a batch on one rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from masw_lightning.errors import UserError


def _permutation(size: int, *key: int) -> Tensor:
    """A random order of ``size`` things that depends on the numbers of ``key`` only."""
    mixed = 0
    for number in key:  # 64-bit mixing (splitmix64), so that neighbouring keys share nothing
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed & 0x7FFFFFFFFFFFFFFF))


class EpochOrder:
    """Which samples an epoch reads, in which order.

    Source s with n samples and weight w gives ``round(w n)`` samples (at least one) to every epoch. They are taken in
    turn from an endless sequence of shuffled passes over the source, so no sample returns before all others were read.
    The samples of all sources are then shuffled together.

    Args:
        sizes: Samples of each source; sources are numbered through, as in ``torch.utils.data.ConcatDataset``.
        weights: Passes over each source per epoch.
        seed: Changes the order.
        shuffle: False reads the sources one after the other, the same in each epoch.
    """

    def __init__(self, sizes: list[int], weights: list[float], seed: int, shuffle: bool = True) -> None:
        self.sizes, self.seed, self.shuffle = sizes, seed, shuffle
        self.counts = [max(1, round(weight * size)) for size, weight in zip(sizes, weights, strict=True)]
        self.epoch = 0

    def __len__(self) -> int:
        return sum(self.counts)

    def set_epoch(self, epoch: int) -> None:
        """Lightning's call before each epoch."""
        self.epoch = epoch

    def indices(self, epoch: int) -> Tensor:
        """The samples of ``epoch``, int64 [len(self)]."""
        chosen, first = [], 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            start = epoch * count if self.shuffle else 0
            passes = range(start // size, (start + count - 1) // size + 1)
            orders = [
                _permutation(size, self.seed, 1, source, each) if self.shuffle else torch.arange(size)
                for each in passes
            ]
            begin = start - passes[0] * size
            chosen.append(torch.cat(orders)[begin : begin + count] + first)
            first += size
        order = torch.cat(chosen)
        return order[_permutation(len(order), self.seed, 2, epoch)] if self.shuffle else order


class ResumableLoader:
    """Batches of a map-style dataset in an ``EpochOrder``, with a position that can be saved and restored.

    Step t of an epoch takes the next ``R B`` samples of the order, B for each rank; what does not fill a step is left
    for the other epochs. Once it has started, the loader counts epochs by itself: after a run that ``max_steps`` ended
    in the middle of an epoch, Lightning's own count is one ahead. A batch counts as read when it is handed out, so
    batches that workers fetched ahead do not.

    Args:
        dataset: Samples by number.
        order: Which samples each epoch reads. Lightning finds it as ``sampler`` and tells it the epoch to begin with.
        batch_size: B.
        collate: Makes a batch of a list of samples.
        rank: This process among R = ``world_size``.
        world_size: R.
        num_workers: Processes that load batches; 0 loads here.
        pin_memory: For a GPU.
        limit: Lightning's ``limit_train_batches``: the batches (int) or the part (float) of an epoch that are used.

    Raises:
        UserError: fewer samples than one step takes; a checkpoint's position does not fit this data.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: EpochOrder,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        limit: int | float = 1.0,
    ) -> None:
        self.data, self.sampler, self.batch_size, self.collate = dataset, order, batch_size, collate
        self.rank, self.world_size, self.num_workers, self.pin_memory = rank, world_size, num_workers, pin_memory
        if len(self) == 0:
            raise UserError(
                f"An epoch has {len(order)} samples, too few for one step of {world_size} x batch_size {batch_size}; "
                "lower batch_size or add data."
            )
        self._used = min(limit, len(self)) if isinstance(limit, int) else int(limit * len(self))  # batches per epoch
        self._position: tuple[int, int] | None = None  # epoch, batches read of it; None before the first batch
        self._resumed = False  # the position is a checkpoint's and not yet taken up

    def __len__(self) -> int:
        return len(self.sampler) // (self.batch_size * self.world_size)

    def batches(self, epoch: int) -> Tensor:
        """This rank's samples of an epoch, int64 [len(self), B]."""
        order = self.sampler.indices(epoch)[: len(self) * self.world_size * self.batch_size]
        return order.view(len(self), self.world_size, self.batch_size)[:, self.rank]

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing runs before the first batch is asked for: Lightning makes iterators early, some
        # in vain, and tells the epoch only afterwards.
        epoch, read = self._start()
        loader = DataLoader(
            self.data,
            batch_sampler=self.batches(epoch)[read:].tolist(),
            num_workers=self.num_workers,
            collate_fn=self.collate,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # workers' seeds are drawn from here, not from the global random state
        )
        for batch in loader:
            read += 1
            self._position = epoch, read
            yield batch

    def _start(self) -> tuple[int, int]:
        """Epoch and batch to begin with: after a resume the next batch, else the next epoch."""
        if self._position is None:
            return self.sampler.epoch, 0
        epoch, read = self._position
        resumed, self._resumed = self._resumed, False
        return (epoch, read) if resumed and read < self._used else (epoch + 1, 0)

    def _identity(self) -> dict[str, int]:
        return {
            "samples": len(self.sampler),
            "samples_per_step": self.batch_size * self.world_size,
            "seed": self.sampler.seed,
        }

    def state_dict(self) -> dict[str, int]:
        """The position, in plain numbers; the same on every rank."""
        epoch, batches = self._position or (self.sampler.epoch, 0)
        return {"epoch": epoch, "batches": batches, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the last batch that was handed out when ``state`` was saved."""
        here = self._identity()
        if different := [name for name in here if state.get(name) != here[name]]:
            told = ", ".join(f"{name} {state.get(name)} there, {here[name]} here" for name in different)
            raise UserError(
                f"The checkpoint was written in the middle of other training data ({told}); resume with the same data, "
                "seed and batch size, or start from its weights only."
            )
        self._position, self._resumed = (state["epoch"], state["batches"]), True
