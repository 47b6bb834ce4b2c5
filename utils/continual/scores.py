"""How well every experience is known after each of them: the matrix of J&F, its summary, a heat map.

R[i, j] is the score on experience j after training on experience i; row "start" is the model before any training.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.continual.course import Course, fingerprint
from utils.continual.stages import Experience
from utils.errors import InputError

if TYPE_CHECKING:
    from data.benchmarks import Benchmark

START = "start"
Matrix = dict[str, dict[str, float]]  # stage -> experience -> J&F


def open_evaluations(experiences: Sequence[Experience], data_root: str) -> dict[str, tuple["Benchmark", dict]]:
    """Benchmark and tracker options of every experience that has one. Raises InputError for what is not there."""
    import inspect

    from data.benchmarks import open_benchmark
    from models.tracker import Tracker

    opened = {}
    for experience in experiences:
        if experience.evaluate is None:
            continue
        options = dict(experience.evaluate)
        tracker = options.pop("tracker", {})
        root = Path(data_root) / options.pop("root", ".")
        place = f"experiences: evaluate of {experience.name}"
        for name in options:
            if name not in ("dataset", "split", "resolution"):
                raise InputError(f"{place}: no option {name!r}; it has root, dataset, split, resolution, tracker")
        allowed = [name for name in inspect.signature(Tracker).parameters if name != "model"]
        for name in tracker:
            if name not in allowed:
                raise InputError(f"{place}: tracker has no option {name!r}; it has {', '.join(allowed)}")
        benchmark = open_benchmark(options.pop("dataset", "folder"), root, **options)
        if benchmark.unlabelled:
            raise InputError(f"{place}: {benchmark.truth / benchmark.unlabelled[0]} lacks true masks, needed to score")
        opened[experience.name] = benchmark, tracker
    return opened


def evaluate_all(course: Course, evaluations: Mapping[str, tuple["Benchmark", dict]], folder: Path) -> dict[str, float]:
    """J&F of the present weights on every experience, on all processes of the run; the same result on each."""
    import torch

    from utils.evaluation import evaluate

    weights = {"file": None, "sha256": fingerprint(course.weights()).hex(), "kind": "ema"}
    scores = {}
    for name, (benchmark, tracker) in evaluations.items():
        result = evaluate(
            course.fabric,
            course.model,
            weights,
            benchmark,
            folder / name,
            tracker,
            benchmark.preset,
            torch.get_num_threads(),
        )
        scores[name] = course.fabric.broadcast(None if result is None else result["J&F-Mean"])
    course.model.train()
    return scores


def summarise(matrix: Matrix, experiences: Sequence[str]) -> dict[str, float | None]:
    """Average, forgetting, backward and forward transfer; None where a matrix does not say.

    With R as in the module's text and T experiences (Lopez-Paz and Ranzato 2017; Chaudhry et al. 2018):

        average    mean over j of R[T, j]
        forgetting mean over j < T of (max over j <= i < T of R[i, j]) - R[T, j]
        backward   mean over j < T of R[T, j] - R[j, j]
        forward    mean over j > 1 of R[j - 1, j] - R[start, j]

    Joint training has one row beside the start, which gives an average alone.
    """

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    rows = [name for name in matrix if name != START]
    last = matrix[rows[-1]] if rows else {}
    summary: dict[str, float | None] = {"average": mean([last[name] for name in experiences if name in last])}
    summary |= dict.fromkeys(("forgetting", "backward", "forward"))
    if rows != list(experiences):
        return summary
    early = list(enumerate(experiences[:-1]))
    best = [max(matrix[rows[i]][name] for i in range(j, len(rows) - 1)) for j, name in early]
    summary["forgetting"] = mean([b - last[name] for b, name in zip(best, experiences[:-1], strict=True)])
    summary["backward"] = mean([last[name] - matrix[name][name] for _, name in early])
    if START in matrix:
        later = list(zip(experiences[:-1], experiences[1:], strict=True))
        summary["forward"] = mean([matrix[before][name] - matrix[START][name] for before, name in later])
    return summary


def write_matrix(matrix: Matrix, experiences: Sequence[str], folder: Path) -> None:
    """Write matrix.csv (one row a stage), summary.csv and matrix.png."""
    from utils.plots import heat_map

    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"after": stage} | {name: row.get(name) for name in experiences} for stage, row in matrix.items()]
    _write(folder / "matrix.csv", ["after", *experiences], rows)
    summary = summarise(matrix, experiences)
    _write(folder / "summary.csv", list(summary), [summary])
    values = [[row.get(name) for name in experiences] for row in matrix.values()]
    heat_map(values, list(matrix), list(experiences), folder / "matrix.png")


def read_matrix(path: Path) -> Matrix:
    """A matrix.csv as it was written."""
    with open(path, newline="") as file:
        return {
            row["after"]: {name: float(value) for name, value in row.items() if name != "after" and value}
            for row in csv.DictReader(file)
        }


def _write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(f".{path.name}")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
