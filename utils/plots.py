"""What a training run looks like: `python -m utils.plots RUN_DIR --output curve.png`, and pictures of its clips."""

import csv
import os
from pathlib import Path

import numpy as np

from utils.errors import InputError

LOSSES = {"loss": "training clips", "val_loss": "fixed clips, averaged weights"}


def clip_picture(frames: np.ndarray, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """One row a clip: reference frame with its masks, last frame with the truth, last frame with the prediction.

    Args:
        frames: (b, t, 3, h, w) uint8 RGB.
        labels: (b, t, h, w) integers, 255 ignored (left unpainted).
        predicted: (b, t - 1, h, w) integers, the frames after the reference.

    Returns:
        (b * h, 3 * w, 3) uint8.
    """
    from data.masks import overlay

    images = np.ascontiguousarray(frames.transpose(0, 1, 3, 4, 2))
    labels = np.where(labels == 255, 0, labels)
    rows = [
        np.hstack([overlay(image[0], label[0]), overlay(image[-1], label[-1]), overlay(image[-1], guess[-1])])
        for image, label, guess in zip(images, labels, predicted, strict=True)
    ]
    return np.vstack(rows)


def save_picture(image: np.ndarray, path: Path) -> None:
    """Write (h, w, 3) uint8 as PNG under a temporary name and rename it."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    Image.fromarray(image).save(temporary, format="png")
    os.replace(temporary, path)


def learning_curve(run_dir: str | Path, output: str | Path) -> None:
    """Plot the losses (left axis) and the IoU (right axis) of a run's metrics.csv over its steps.

    Raises:
        InputError: there is no metrics.csv, or no row in it.
    """
    table = Path(run_dir) / "metrics.csv"
    if not table.is_file():
        raise InputError(f"{table}: no such file; RUN_DIR must be the --output_dir of a training run")
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise InputError(f"{table}: holds no row yet")
    import matplotlib

    matplotlib.use("Agg")  # a file is written, no window opened
    from matplotlib import pyplot

    def column(name: str) -> tuple[list[int], list[float]]:
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        return [step for step, _ in points], [value for _, value in points]

    figure, left = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    right = left.twinx()
    for name, label in LOSSES.items():
        steps, values = column(name)
        if steps:
            style = {"marker": "o", "markersize": 3} if name == "val_loss" else {"alpha": 0.6, "linewidth": 1}
            left.plot(steps, values, label=f"loss, {label}", color="C0" if name == "loss" else "C3", **style)
    for name, color in (("iou", "C2"), ("val_iou", "C1")):
        steps, values = column(name)
        if steps:
            right.plot(steps, values, label=f"IoU, {LOSSES[name.replace('iou', 'loss')]}", color=color, linewidth=1)
    left.set(xlabel="step", ylabel="loss", ylim=(0, None))
    right.set(ylabel="IoU", ylim=(0, 1))
    left.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}")
    figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=120)
    pyplot.close(figure)
    os.replace(temporary, output)


def heat_map(values: list[list[float | None]], rows: list[str], columns: list[str], output: Path) -> None:
    """Write a picture of a table of scores in 0..1: `values[i][j]` stands in row i and column j, None stays empty."""
    import matplotlib

    matplotlib.use("Agg")  # a file is written, no window opened
    from matplotlib import pyplot

    table = np.array([[np.nan if value is None else value for value in row] for row in values], float)
    size = (2.2 + 1.1 * len(columns), 1.4 + 0.5 * len(rows))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="J&F on", ylabel="after")
    for i, j in zip(*np.nonzero(np.isfinite(table)), strict=True):
        color = "white" if table[i, j] < 0.6 else "black"
        axes.text(j, i, f"{100 * table[i, j]:.1f}", ha="center", va="center", color=color)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}")
    figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=120)
    pyplot.close(figure)
    os.replace(temporary, output)


def main(run_dir: str, output: str = "curve.png", debug: bool = False) -> None:
    """Plot the learning curve of a run.

    Args:
        run_dir: Output folder of a training run.
        output: File to write; its ending chooses the format (png, svg, pdf).
        debug: Show the traceback of an error.
    """
    learning_curve(run_dir, output)
    print(output)


if __name__ == "__main__":
    import sys

    from utils.cli import run

    # The folder may stand alone, as in `python -m utils.plots RUN_DIR`.
    words = sys.argv[1:]
    run(main, ["--run_dir", *words] if words and not words[0].startswith("-") else words)
