"""Which clips a step sees, and a loader that fits the device."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.clips import collate, worker_init
from utils.errors import InputError
from utils.stop import leave_stopping_to_parent

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PREFETCH = 4  # batches that each loader process holds ready


class BatchShare:
    """Batch sampler: this process's part of the clips that all processes together see in each step.

    Args:
        batch: step -> the items of the whole batch, the same on every process.
        steps: range of steps to run.
        rank, world_size: this process takes the rank-th of world_size equal parts of every batch.
        accumulation: yield each part in so many batches.
    """

    def __init__(
        self, batch: Callable[[int], list], steps: range, rank: int, world_size: int, accumulation: int = 1
    ) -> None:
        self.batch, self.steps, self.rank, self.world_size = batch, steps, rank, world_size
        self.accumulation = accumulation

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list]:
        for step in self.steps:
            whole = self.batch(step)
            share = len(whole) // self.world_size
            own = whole[self.rank * share : (self.rank + 1) * share]
            size = share // self.accumulation
            yield from (own[i : i + size] for i in range(0, share, size))


class StepSampler(BatchShare):
    """Batches that are a function of the step alone.

    Sample g of a run (counted over all steps and processes) is item `order(turn)[g % length]` of turn g // length of
    the data, so that a resumed run goes on with the clips that would have come, and the number of processes decides
    only who loads which.

    Args:
        length: items of the data set.
        batch_size: of all processes together.
        seed: of the order.
        steps, rank, world_size, accumulation: as in `BatchShare`.
    """

    def __init__(
        self, length: int, batch_size: int, steps: range, seed: int, rank: int, world_size: int, accumulation: int = 1
    ):
        order = ItemOrder(length, seed)
        super().__init__(
            lambda step: [order(g) for g in range(step * batch_size, (step + 1) * batch_size)],
            steps,
            rank,
            world_size,
            accumulation,
        )


class ItemOrder:
    """Item of sample g of a stream over a data set of `length` items; every turn is drawn anew from the seed's numbers.

    Items of later turns lie past the length, where data sets draw anew.
    """

    def __init__(self, length: int, *seed: int):
        self.length, self.seed = length, seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))

    def __call__(self, g: int) -> int:
        turn, place = divmod(g, self.length)
        if self._order[0] != turn:
            self._order = (turn, np.random.default_rng([*self.seed, turn]).permutation(self.length))
        return turn * self.length + int(self._order[1][place])


def identity_permutations(seed: int, items: list, slots: int) -> torch.Tensor:
    """(b, slots) int64: a random order of the identity slots for each clip, drawn from (seed, item).

    An item is a number, or a tuple of numbers where there are several data sets.
    """
    keys = [[seed, 1, *np.atleast_1d(item)] for item in items]
    return torch.stack([torch.from_numpy(np.random.default_rng(key).permutation(slots)) for key in keys])


class Keyed(Dataset):
    """A data set whose samples carry the item they were asked for."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> dict:
        return self.dataset[item] | {"item": item}


def make_loader(fabric: "Fabric", dataset: Dataset, sampler: BatchShare, workers: int | None) -> DataLoader:
    """Loader of clip batches for the device: pinned and prefetched for CUDA, worker count by the cores of the machine.

    Args:
        workers: loader processes of this rank, None: chosen for the device.
    """
    import os

    cuda = fabric.device.type == "cuda"
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        here = fabric.world_size // getattr(fabric.strategy, "num_nodes", 1)
        # The CPU computes the steps as well: one core in three is what clips need at most beside them.
        workers = min(8, max(1, cores // here)) if cuda else min(2, max(1, cores // (3 * here)))

    loader = DataLoader(
        Keyed(dataset),
        batch_sampler=sampler,
        collate_fn=_collate,
        num_workers=workers,
        worker_init_fn=_start_worker,
        pin_memory=cuda,
        prefetch_factor=PREFETCH if workers else None,
        persistent_workers=False,  # one pass over the sampler is the whole run, or experience
        # Decoded sources are shared with forked workers; CUDA forbids forking after its start only in the child.
        multiprocessing_context="fork" if workers and hasattr(os, "fork") else None,
    )
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False, move_to_device=True)


def batches(loader: DataLoader) -> Iterator[dict]:
    """The batches of a loader; bad data found by a loader process is reported like any other, in one line."""
    try:
        yield from loader
    except InputError as error:  # PyTorch puts the traceback of the loader process before the message
        raise InputError(str(error).strip().rsplit("InputError: ", 1)[-1]) from error


def _collate(samples: list[dict]) -> dict:
    return collate(samples) | {"items": [sample["item"] for sample in samples]}


def _start_worker(worker_id: int) -> None:
    worker_init(worker_id)
    leave_stopping_to_parent()
