"""Training clips a second of each data set: `python -m benchmarks.data --data_root DIR --datasets [davis2017]`.

Each data set is measured in this process first, and then through loader processes.
"""

import json
import time
from itertools import islice
from typing import Any


def main(
    datasets: list[str | dict[str, Any]],
    data_root: str = ".",
    size: tuple[int, int] = (465, 465),
    short_edge: int = 480,
    frames: int = 5,
    batch_size: int = 4,
    workers: int = 2,
    clips: int = 60,
    cache_megabytes: float = 0,
    strong_augmentation: bool = False,
    debug: bool = False,
) -> None:
    """Print clips a second of each data set, one JSON line each.

    Args:
        datasets: names or descriptions, as for training.
        data_root: folder of the data sets.
        size: height and width of the clips.
        short_edge: short edge that frames are scaled to, times 0.7 to 1.3.
        frames: frames of a clip.
        batch_size: clips of a batch.
        workers: loader processes.
        clips: clips to draw for each measurement.
        cache_megabytes: memory for decoded frames.
        strong_augmentation: colour jitter, grey and blur of each frame.
        debug: show the traceback of an error.
    """
    import cv2
    import torch

    from data.clips import collate, worker_init
    from data.training import open_training_data

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    for entry in datasets:
        start = time.perf_counter()
        dataset = open_training_data(
            [entry],
            data_root,
            size=size,
            short_edge=short_edge,
            frames=frames,
            cache_megabytes=cache_megabytes,
            strong_augmentation=strong_augmentation,
        )
        opened = time.perf_counter() - start
        dataset[0]
        start, busy = time.perf_counter(), time.process_time()
        for index in range(clips):
            dataset[index % len(dataset)]
        wall, busy = time.perf_counter() - start, time.process_time() - busy
        row = {
            "dataset": entry,
            "size": list(size),
            "open_s": round(opened, 2),
            "ms_per_clip": round(1000 * wall / clips, 1),
            "cpu_ms_per_clip": round(1000 * busy / clips, 1),
        }
        if workers:
            sampler = [index % len(dataset) for index in range(clips + 2 * workers * batch_size)]
            loader = torch.utils.data.DataLoader(
                dataset,
                sampler=sampler,
                batch_size=batch_size,
                num_workers=workers,
                collate_fn=collate,
                worker_init_fn=worker_init,
            )
            # The first batches pay for the start of the workers.
            batches = iter(loader)
            for _ in islice(batches, workers):
                start = time.perf_counter()
            count = sum(len(batch["names"]) for batch in batches)
            row |= {"workers": workers, "clips_per_s": round(count / (time.perf_counter() - start), 1)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    from utils.cli import run

    run(main)
