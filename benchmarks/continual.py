"""Forgetting on real pixels: the bundled weights, three experiences, every remedy with several seeds.

    python -m benchmarks.continual --train_pack DIR --davis_mini DIR --output_dir runs/continual

The experiences are photographs with instance masks (moved and cropped as in pre-training), videos of DAVIS 2016, and
cut-outs that move over coloured noise. What is evaluated is never trained on here: photographs and cut-outs that are
held out, and videos of DAVIS that are not among the training videos. The bundled weights themselves have seen all the
photographs and cut-outs, in other clips, and the training videos. Objects are tracked together, ten to a group, where
the demo tracks each by itself.

A run that was stopped goes on when the command is given again, down to the step.
"""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ["naive", "joint", "replay_balanced", "ewc", "lwf", "agem"]
HELD_OUT = 8  # every so many photographs and cut-outs are kept for the evaluation
VIDEOS = {"blackswan": 8, "dog": 8, "horsejump-high": 8, "schoolgirls": 5}  # every fourth frame, so many of them
SIZE = (240, 432)  # of the frames of these videos
CLIPS, FRAMES, MOST = 5, 6, 3  # of the two other evaluations: clips, frames of a clip, objects of a clip


def prepare(train_pack: Path, davis_mini: Path, folder: Path) -> None:
    """Make the folder that configs/continual/*.yaml read: training data as links, evaluation clips as files."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    photos = sorted((train_pack / "coco384" / "images").iterdir())
    cutouts = sorted(path for path in (train_pack / "tuxpaint").iterdir() if path.suffix in (".webp", ".png"))
    masks = train_pack / "coco384" / "masks"
    for place, held_out in (("", False), ("held_out", True)):
        for number, photo in enumerate(photos):
            if (number % HELD_OUT == 0) == held_out:
                _link(photo, partial / place / "photos" / "images")
                _link(masks / f"{photo.stem}.png", partial / place / "photos" / "masks")
        for number, cutout in enumerate(cutouts):
            if (number % HELD_OUT == 0) == held_out:
                _link(cutout, partial / place / "cutouts")
    (partial / "davis").symlink_to((train_pack / "davis240").resolve())
    _write_photos(partial / "held_out" / "photos", partial / "eval" / "photos")
    _write_rendered(partial / "held_out" / "cutouts", partial / "eval" / "rendered")
    _write_videos(davis_mini, partial / "eval" / "davis")
    partial.rename(folder)


def _link(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file.name).symlink_to(file.resolve())


def _write_photos(source: Path, target: Path) -> None:
    from data.clips import StillClips
    from data.transforms import StillTransform

    transform = StillTransform(size=(241, 241), frames=FRAMES, max_objects=MOST)
    _write_samples(StillClips(source / "images", source / "masks", transform=transform, merge=0.0, seed=1), target)


def _write_rendered(source: Path, target: Path) -> None:
    from data.synthetic import SyntheticClips

    clips = SyntheticClips([source], size=(241, 241), frames=FRAMES, max_objects=MOST, max_gap=6, seed=1)
    _write_samples(clips, target)


def _write_samples(clips: Any, target: Path) -> None:
    for item in range(CLIPS):
        sample = clips[item]
        frames = sample["frames"].permute(0, 2, 3, 1).numpy()
        labels = np.where(sample["labels"].numpy() == 255, 0, sample["labels"].numpy())
        _write_clip(target, f"clip{item}", frames, labels)


def _write_videos(source: Path, target: Path) -> None:
    import cv2

    from data.images import list_images, read_rgb
    from data.labels import read_label_png

    for name, count in VIDEOS.items():
        paths = list_images(source / "JPEGImages" / "480p" / name)[0][::4][:count]
        frames = [cv2.resize(read_rgb(path), SIZE[::-1], interpolation=cv2.INTER_AREA) for path in paths]
        truth = [read_label_png(source / "Annotations" / "480p" / name / f"{path.stem}.png") for path in paths]
        labels = [cv2.resize(label.astype(np.uint8), SIZE[::-1], interpolation=cv2.INTER_NEAREST) for label in truth]
        _write_clip(target, name, frames, labels)


def _write_clip(target: Path, name: str, frames: Any, labels: Any) -> None:
    from PIL import Image

    from data.masks import write_mask

    for number, (frame, label) in enumerate(zip(frames, labels, strict=True)):
        image = target / "JPEGImages" / name / f"{number:05}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(frame).save(image)
        mask = target / "Annotations" / name / image.name
        mask.parent.mkdir(parents=True, exist_ok=True)
        write_mask(mask, np.asarray(label, np.uint8))


def report(output: Path, strategies: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """One row a strategy over the seeds that are done, as results.csv and results.md; heat maps of mean matrices."""
    from utils.continual.scores import START, read_matrix, summarise
    from utils.plots import heat_map

    table = []
    for strategy in strategies:
        files = [output / f"{strategy}_{seed}" / "experiences" / "matrix.csv" for seed in seeds]
        matrices = [read_matrix(file) for file in files if (file.parent / "done.json").is_file()]
        if not matrices:
            continue
        names = list(matrices[0][START])
        rows = list(matrices[0])
        mean = {row: {name: float(np.mean([m[row][name] for m in matrices])) for name in names} for row in rows}
        heat_map([[mean[row][name] for name in names] for row in rows], rows, names, output / f"{strategy}.png")
        summaries = [summarise(matrix, names) for matrix in matrices]
        line: dict[str, Any] = {"strategy": strategy, "seeds": len(matrices)}
        for name in names:
            line |= _mean_and_spread(name, [matrix[rows[-1]][name] for matrix in matrices])
        for name in summaries[0]:
            line |= _mean_and_spread(name, [summary[name] for summary in summaries])
        table.append(line)
        if strategy == strategies[0]:
            untrained = {"strategy": "no training", "average": float(np.mean(list(mean[START].values())))}
            table.insert(0, untrained | mean[START])
    if table:
        columns = list(table[-1])
        with open(output / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(table)
        shown = [name for name in columns if not name.endswith("_std")]
        lines = ["| " + " | ".join(shown) + " |", "| --- " * len(shown) + "|"]
        lines += ["| " + " | ".join(_show(line, name) for name in shown) + " |" for line in table]
        (output / "results.md").write_text("\n".join(lines) + "\n")
    return table


def _mean_and_spread(name: str, values: list[float | None]) -> dict[str, float | None]:
    if None in values:
        return {name: None, f"{name}_std": None}
    return {name: float(np.mean(values)), f"{name}_std": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def _show(line: dict[str, Any], name: str) -> str:
    value, spread = line.get(name), line.get(f"{name}_std")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def main(
    train_pack: str = str(ROOT.parent / "shared" / "train_pack"),
    davis_mini: str = str(ROOT.parent / "shared" / "data" / "davis_mini"),
    output_dir: str = "runs/continual",
    init: str = str(ROOT / "assets" / "starter.safetensors"),
    strategies: list[str] | None = None,
    seeds: list[int] | None = None,
    prepare_only: bool = False,
    report_only: bool = False,
    debug: bool = False,
) -> None:
    """Train the bundled weights through three experiences with every strategy and seed, and make the table.

    Args:
        train_pack: Folder with coco384, tuxpaint and davis240.
        davis_mini: Folder in DAVIS layout with the videos of VIDEOS.
        output_dir: Gets data/, a folder for every run, results.csv, results.md and a heat map for each strategy.
        init: Weights to start from.
        strategies: Names of configs/continual; default naive, joint, replay_balanced, ewc, lwf and agem.
        seeds: Of the order of clips and all else that is random; default 0, 1, 2.
        prepare_only: Make data/ and end.
        report_only: Make the table of what is done and end.
        debug: Show the traceback of an error.
    """
    import time

    import torch

    import train
    from utils.cli import read_options

    output, strategies, seeds = Path(output_dir), strategies or STRATEGIES, seeds or [0, 1, 2]
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "data").exists():
        prepare(Path(train_pack), Path(davis_mini), output / "data")
    if prepare_only:
        return
    torch.set_num_threads(1)
    start = None  # scores before any training: those of one run serve all
    for seed in seeds if not report_only else []:
        for strategy in strategies:
            folder = output / f"{strategy}_{seed}"
            done = folder / "experiences" / "done.json"
            if not done.is_file():
                if start is not None and not (folder / "experiences" / "start").exists():
                    shutil.copytree(start, folder / "experiences" / "start")
                begun = time.process_time()
                given = {"data_root": str(output / "data"), "output_dir": str(folder), "init": init, "seed": seed}
                given |= {"accelerator": "cpu", "devices": 1, "workers": 0}
                train.main(**read_options(train.main, ROOT / "configs" / "continual" / f"{strategy}.yaml", given))
                done.write_text(json.dumps({"cpu_seconds": round(time.process_time() - begun)}) + "\n")
                shutil.rmtree(folder / "checkpoints")
                report(output, strategies, seeds)
            start = folder / "experiences" / "start"
    report(output, strategies, seeds)
    print((output / "results.md").read_text() if (output / "results.md").is_file() else "no run is done yet")


if __name__ == "__main__":
    from utils.cli import run

    run(main)
