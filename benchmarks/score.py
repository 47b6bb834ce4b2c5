"""Time to score a folder of masks, against the textbook way: `python -m benchmarks.score`.

The textbook way holds one mask per object and frame of a whole sequence and dilates every boundary with a disk, as the
official DAVIS toolkit does. Both take turns in one process, so that a busy machine slows both.
"""

import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np


def main(
    ground_truth: Path | None = None,
    predictions: Path | None = None,
    runs: int = 5,
    output: Path | None = None,
    debug: bool = False,
) -> None:
    """Print seconds and object frames a second of both, and by how much they differ.

    Args:
        ground_truth: Folder of <sequence>/<frame>.png; without it masks are made up.
        predictions: The same for the predictions; only its sequences are scored.
        runs: Turns of both, after one that does not count.
        output: JSON file for the table.
        debug: Show the traceback of an error.
    """
    from utils.metrics import collect_scores

    with tempfile.TemporaryDirectory() as made_up:
        if ground_truth is None or predictions is None:
            ground_truth, predictions = make_masks(Path(made_up))
        names = sorted(path.name for path in predictions.iterdir() if path.is_dir())
        turns: dict[str, list[tuple[float, float]]] = {"project": [], "textbook": []}
        for _ in range(runs + 1):
            start = time.perf_counter(), time.process_time()
            metric = collect_scores(ground_truth, predictions, "davis2017", names)
            scores = metric.compute()
            middle = time.perf_counter(), time.process_time()
            j, f = textbook_scores(ground_truth, predictions, names)
            end = time.perf_counter(), time.process_time()
            turns["project"].append((middle[0] - start[0], middle[1] - start[1]))
            turns["textbook"].append((end[0] - middle[0], end[1] - middle[1]))
    difference = max(abs(scores["J-Mean"] - j), abs(scores["F-Mean"] - f))
    count = len(metric.rows)
    print(f"{count} object frames of {len(names)} sequences; J and F differ by {difference:.1e}")
    print("way        s, median (min-max)    CPU s, median    object frames/s")
    rows = []
    for way, measured in turns.items():
        wall, cpu = zip(*measured[1:], strict=True)
        row = {"way": way, "s": wall, "cpu_s": cpu, "object_frames_per_s": count / statistics.median(wall)}
        rows.append(row)
        print(
            f"{way:9}  {statistics.median(wall):.3f} ({min(wall):.3f}-{max(wall):.3f})  {statistics.median(cpu):14.3f}"
            f"  {row['object_frames_per_s']:15.0f}"
        )
    ratios = {}
    for i, kind in enumerate(("s", "cpu_s")):
        ratios[kind] = [slow[i] / fast[i] for fast, slow in zip(*(t[1:] for t in turns.values()), strict=True)]
        middle = statistics.median(ratios[kind])
        print(f"ratio of {kind}, turn by turn: median {middle:.1f}, {min(ratios[kind]):.1f} to {max(ratios[kind]):.1f}")
    if output is not None:
        table = {"object_frames": count, "difference": difference, "rows": rows, "ratios": ratios}
        output.write_text(json.dumps(table, indent=1) + "\n")


def textbook_scores(ground_truth: Path, predictions: Path, names: list[str]) -> tuple[float, float]:
    """Mean J and F over objects by the DAVIS 2017 rules, one object and frame after the other."""
    j, f = [], []
    for name in names:
        frames = sorted(path.name for path in (ground_truth / name).glob("*.png"))
        gt, pred = (_load(folder / name, frames) for folder in (ground_truth, predictions))
        count = int(gt[0].max())
        ids = np.ones((count, *gt.shape)) * np.arange(1, count + 1)[:, None, None, None]
        gt, pred = ids == gt, ids == pred
        for i in range(count):
            pairs = list(zip(gt[i, 1:-1], pred[i, 1:-1], strict=True))
            j.append(np.mean([_jaccard(a, b) for a, b in pairs]))
            f.append(np.mean([_boundary_f(a, b) for a, b in pairs]))
    return float(np.mean(j)), float(np.mean(f))


def _load(folder: Path, frames: list[str]) -> np.ndarray:
    from PIL import Image

    first = np.array(Image.open(folder / frames[0]))
    masks = np.zeros((len(frames), *first.shape))
    for i, frame in enumerate(frames):
        masks[i] = np.array(Image.open(folder / frame))
    masks[masks == 255] = 0
    return masks


def _jaccard(gt: np.ndarray, pred: np.ndarray) -> float:
    union = np.sum(gt | pred)
    return np.sum(gt & pred) / union if union else 1.0


def _boundary_f(gt: np.ndarray, pred: np.ndarray) -> float:
    import cv2

    radius = math.ceil(0.008 * np.linalg.norm(gt.shape))
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    disk = (x * x + y * y <= radius * radius).astype(np.uint8)
    a, b = _boundary(gt), _boundary(pred)
    near_a, near_b = (cv2.dilate(boundary.astype(np.uint8), disk) for boundary in (a, b))
    precision = np.sum(b * near_a) / np.sum(b) if b.any() else 1.0
    recall = np.sum(a * near_b) / np.sum(a) if a.any() else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _boundary(mask: np.ndarray) -> np.ndarray:
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    boundary = (padded[:-1, 1:] ^ mask) | (padded[1:, :-1] ^ mask)
    boundary[:-1, :-1] |= mask[:-1, :-1] ^ mask[1:, 1:]
    return boundary


def make_masks(folder: Path, sequences: int = 4, frames: int = 40, size: tuple[int, int] = (480, 854)):
    """Ellipses that move, with 1, 1, 3 and 7 objects; the predictions are a little off."""
    from data.masks import write_mask

    rng = np.random.default_rng(0)
    y, x = np.mgrid[: size[0], : size[1]]
    for n in range(sequences):
        count = (1, 1, 3, 7)[n % 4]
        center, speed = rng.uniform((100, 100), (380, 750), (count, 2)), rng.uniform(-2, 2, (count, 2))
        radii = rng.uniform(30, 110, (count, 2))
        for kind, error in (("truth", 0.0), ("predictions", 3.0)):
            (folder / kind / str(n)).mkdir(parents=True)
            for t in range(frames):
                labels = np.zeros(size, np.uint8)
                for i in range(count):
                    cy, cx = center[i] + t * speed[i] + rng.normal(0, error, 2)
                    labels[((y - cy) / radii[i, 0]) ** 2 + ((x - cx) / radii[i, 1]) ** 2 < 1] = i + 1
                write_mask(folder / kind / str(n) / f"{t:05}.png", labels)
    return folder / "truth", folder / "predictions"


if __name__ == "__main__":
    from utils.cli import run

    run(main)
