"""Training clips: the sample format, and what every clip data set shares.

A sample is one clip: `dict(frames=uint8 (t, 3, h, w) RGB, labels=uint8 (t, h, w), num_objects=int, name=str)`. Labels
are 0 for background, 1..num_objects without gaps for the objects of the first frame, 255 for pixels to ignore.
"""

from typing import Any

import numpy as np
import torch

Sample = dict[str, Any]


class ClipDataset(torch.utils.data.Dataset):
    """A map-style data set whose item `i` depends on `(seed, epoch, i)` alone, never on worker, rank or call order.

    The epoch lives in shared memory, so that `set_epoch` reaches workers that stay alive between epochs.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that all following draws belong to."""
        self._epoch.fill_(epoch)

    def generator(self, index: int, stream: int = 0) -> np.random.Generator:
        """The random numbers of item `index` in the present epoch; `stream` gives independent ones for a second use."""
        return np.random.default_rng([self.seed, int(self._epoch), index, stream])


def make_sample(frames: np.ndarray, labels: np.ndarray, num_objects: int, name: str) -> Sample:
    """Pack images (t, h, w, 3) uint8 and label maps (t, h, w) uint8 into the sample format."""
    return {
        "frames": torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2))),
        "labels": torch.from_numpy(np.ascontiguousarray(labels)),
        "num_objects": int(num_objects),
        "name": name,
    }


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Stack samples of equal size: frames (b, t, 3, h, w), labels (b, t, h, w), num_objects (b,) int64, names list."""
    return {
        "frames": torch.stack([sample["frames"] for sample in samples]),
        "labels": torch.stack([sample["labels"] for sample in samples]),
        "num_objects": torch.tensor([sample["num_objects"] for sample in samples]),
        "names": [sample["name"] for sample in samples],
    }


def worker_init(worker_id: int) -> None:
    """`worker_init_fn` of the loader: one thread a worker, because OpenCV's own pool only slows several workers."""
    import cv2

    cv2.setNumThreads(0)
