"""The files in which scores are kept, and scores of masks that another program wrote."""

import csv
import json
import logging
import os
from pathlib import Path

from data.benchmarks import Benchmark
from utils.errors import InputError
from utils.metrics import VOSMetric, collect_scores, per_sequence
from utils.report import write_report

log = logging.getLogger(__name__)


def score_predictions(
    benchmark: Benchmark, predictions: Path, output: Path, preset: str | None = None, subset: bool = False
) -> dict:
    """Scores the masks that another program wrote, `<predictions>/<video>/<frame>.png`.

    `<predictions>/Annotations/<video>` will do as well, when `<predictions>/<video>` is not there. Writes the scores
    below `output` and returns the content of `scores.json`. Errors as in `utils.metrics.score_folders`.
    """
    names = [video.name for video in benchmark.videos]
    if benchmark.unlabelled:
        raise InputError(
            f"{benchmark.truth / benchmark.unlabelled[0]}: lacks the true masks of some frames; scoring needs them all"
        )
    inner = predictions / "Annotations"
    if inner.is_dir() and not any((predictions / name).is_dir() for name in names):
        predictions = inner
    rules = preset or benchmark.preset
    metric = collect_scores(benchmark.truth, predictions, rules, names, benchmark.seen, subset, log.warning)
    weights = {"file": None, "sha256": None, "kind": "predictions"}
    return write_scores(metric, benchmark, predictions, output, weights, None)


def write_scores(
    metric: VOSMetric, benchmark: Benchmark, masks: Path, output: Path, weights: dict, speed: dict | None
) -> dict:
    """Writes scores.json, per_sequence.csv, per_object.csv and report.html; returns the content of the first."""
    scores = metric.compute() | {"weights": weights}
    write_json(output / "scores.json", scores)
    write_table(output / "per_object.csv", "object", scores["per_object"])
    write_table(output / "per_sequence.csv", "sequence", per_sequence(scores))
    write_report(output / "report.html", scores, metric.rows, benchmark, masks, speed)
    names = [name for name in ("G", "J&F-Mean", "J-Mean", "F-Mean") if scores.get(name) is not None]
    log.info(", ".join(f"{name} {scores[name]:.4f}" for name in names) + f" ({len(scores['per_object'])} objects)")
    if scores["J&F-Mean"] > 0.99:
        log.warning("this is nearly perfect: are the true masks among the predictions?")
    return scores


def write_json(path: Path, content: dict) -> None:
    """Writes JSON under a temporary name and renames it. Floats come back bit for bit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def write_table(path: Path, key: str, rows: dict[str, dict]) -> None:
    """Writes rows that all have the same columns as CSV, their names in column `key`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [key, *next(iter(rows.values()))])
        writer.writeheader()
        writer.writerows({key: name, **row} for name, row in rows.items())
    os.replace(temporary, path)
