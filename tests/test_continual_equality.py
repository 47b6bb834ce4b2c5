"""Continual training is the same mathematics on 1, 2 and 3 processes, and the comparison sees what is not.

The whole of train.py runs over three experiences of two epochs, one of which fills its batches of six and two that do
not. All plugins are in the default cases, some of them together; the marker `slow` has each by itself, resumed too.
"""

import csv
import json
import os
from pathlib import Path

import pytest

from utils.continual.check import FLOAT32 as RATES
from utils.continual.check import (
    OPTIONS,
    TOLERANCE,
    Case,
    cases_of,
    compare,
    difference,
    last_checkpoint,
    run_worlds,
    write_experiences,
)
from utils.continual.scores import read_matrix

os.environ["VOS_PLUGINS"] = "continual_controls"

EWC = {"kind": "ewc", "strength": 300.0, "clips": 3}
SI = {"kind": "si", "strength": 1.0}
REPLAY = {"kind": "replay", "size": 5}
GEM = {"kind": "gem", "size": 3}
AGEM = {"kind": "agem", "size": 3, "sample": 3}
BALANCED = {"kind": "replay", "policy": "balanced", "size": 4, "share": 0.34}
MANY = [EWC | {"online": True, "decay": 0.9}, SI, "lwf", BALANCED, AGEM]
TOGETHER = {
    "cumulative, ewc and replay": ["cumulative", EWC, REPLAY],
    "online ewc, si, lwf, balanced replay and agem": MANY,
    "gem": [GEM],
    "joint": ["joint"],
}
ALONE = {
    "naive": ["naive"],
    "joint": ["joint"],
    "cumulative": ["cumulative"],
    "ewc": [EWC],
    "online ewc": [EWC | {"online": True, "decay": 0.9}],
    "si": [SI],
    "lwf": ["lwf"],
    "gem": [GEM],
    "agem": [AGEM],
    "reservoir replay": [REPLAY],
    "balanced replay": [BALANCED],
    "ewc and replay": [EWC, REPLAY],
}
PAIR = "cumulative, ewc and replay"
# What is wrong with it, the case that is right, the plugins.
CONTROLS = {
    "penalty times processes": (PAIR, ["cumulative", EWC | {"kind": "PenaltyTimesProcesses"}, REPLAY]),
    "fisher of process batches": (PAIR, ["cumulative", EWC | {"kind": "FisherOfProcessBatches"}, REPLAY]),
    "duplicated replay": (PAIR, ["cumulative", EWC, REPLAY | {"kind": "DuplicatedReplay"}]),
    "projection of local gradients": ("gem", [GEM | {"kind": "ProjectionOfLocalGradients"}]),
    "references not reduced": ("gem", [GEM | {"kind": "ReferencesNotReduced"}]),
}
FEWER = {"joint": (1, 3)}  # it changes which clips are seen and nothing else
RESUMED = "online ewc, si, lwf, balanced replay and agem"
FLOAT32 = "ewc, lwf and replay in float32"


def named(plugins: list) -> list:
    """Plugins of continual_controls by their full names."""
    return [
        p | {"kind": f"continual_controls:{p['kind']}"} if isinstance(p, dict) and p["kind"][0].isupper() else p
        for p in plugins
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("continual")
    write_experiences(folder / "data")
    evaluated = []
    for experience in OPTIONS["experiences"]:
        (folder / "data" / experience["name"] / "ImageSets").mkdir()
        (folder / "data" / experience["name"] / "ImageSets" / "val.txt").write_text("video0\n")
        evaluated.append(experience | {"evaluate": {"root": experience["name"], "split": "val"}})
    cases = [
        Case(name, {"plugins": plugins}, FEWER.get(name, (1, 2, 3)))
        for name, plugins in TOGETHER.items()
        if name != RESUMED
    ]
    cases += cases_of(RESUMED, MANY)
    cases += [Case(FLOAT32, {"plugins": [EWC, "lwf", REPLAY], "experiences": evaluated} | RATES, (1, 3))]
    cases += [Case("two passes", {"plugins": TOGETHER[PAIR], "accumulation": 2}, (1,))]
    cases += [Case(name, {"plugins": named(plugins)}, (2,)) for name, (_, plugins) in CONTROLS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOS_PLUGINS", "continual_controls")
        return run_worlds(cases, folder)


@pytest.mark.parametrize(
    ("name", "processes"), [(name, n) for name in TOGETHER for n in FEWER.get(name, (1, 2, 3)) if n > 1]
)
def test_any_number_of_processes(runs, name, processes):
    found = compare(runs[name, 1], runs[name, processes])
    assert max(found.values()) <= TOLERANCE["64-true"], found


@pytest.mark.parametrize("processes", [1, 3])
def test_resumed_in_the_middle_of_an_experience(runs, processes):
    resumed = runs[f"{RESUMED}, resumed", processes]
    found = compare(runs[RESUMED, 1], resumed)
    assert max(found.values()) <= TOLERANCE["64-true"], found
    assert [row["step"] for row in rows(resumed)] == ["4", "5", "6"]
    assert rows(resumed)[0]["experience"] == "2"


def test_float32(runs):
    found = compare(runs[FLOAT32, 1], runs[FLOAT32, 3])
    assert max(found.values()) <= TOLERANCE["32-true"], found


@pytest.mark.parametrize("processes", [1, 3])
def test_evaluation_after_each_experience(runs, processes):
    folder = runs[FLOAT32, processes]
    matrix = read_matrix(folder / "experiences" / "matrix.csv")
    assert list(matrix) == ["start", "shade0", "shade1", "shade2"]
    one = read_matrix(runs[FLOAT32, 1] / "experiences" / "matrix.csv")
    assert matrix["start"] == one["start"]
    for stage, scores in matrix.items():
        assert scores == pytest.approx(one[stage], abs=0.02)  # weights that differ in last bits may turn a pixel
        place = folder / "experiences" / stage / "shade1"
        assert json.loads((place / "scores.json").read_text())["J&F-Mean"] == scores["shade1"]
    table = [row for row in rows(folder) if row["jf_shade0"]]
    assert [row["step"] for row in table] == ["2", "4", "6"]
    assert [float(row["jf_shade2"]) for row in table] == [matrix[name]["shade2"] for name in list(matrix)[1:]]
    assert (folder / "experiences" / "summary.csv").is_file() and (folder / "experiences" / "matrix.png").is_file()


def test_accumulation(runs):
    found = compare(runs[PAIR, 1], runs["two passes", 1])
    assert max(found.values()) <= TOLERANCE["64-true"], found


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_is_seen(runs, name):
    right = runs[CONTROLS[name][0], 1]
    one, other = last_checkpoint(right)["model"], last_checkpoint(runs[name, 2])["model"]
    assert difference(one, other) >= 1e-3


def test_processes_that_drift_apart_are_told(runs):
    """The run compares its processes after each experience; only the second one has references."""
    told = last_checkpoint(runs["references not reduced", 2])["plugins"]["0 ReferencesNotReduced"]["told"]
    assert told.startswith("after shade2, not the same on all processes: the model's weights;")
    ranks = compare(runs["references not reduced", 2], runs["references not reduced", 2])["ranks"]
    assert ranks == float("inf")


def test_every_remedy_took_part(runs):
    """What the cases compare is not naive training under other names."""
    table = rows(runs[RESUMED, 1])
    for column in ("ewc", "si", "lwf"):
        values = [float(row[column]) for row in table]
        assert values[:2] == [0, 0] and min(values[3], values[5]) > 0, column
    assert [float(row["replay_clips"]) for row in table] == [0, 0, 4, 4, 4, 4]
    assert sum(float(row["gem_projected"]) for row in rows(runs["gem", 1])) >= 1
    assert sum(float(row["agem_projected"]) for row in table) >= 1
    joint, cumulative = rows(runs["joint", 1]), rows(runs[PAIR, 1])
    assert [row["experience"] for row in joint] == ["1"] * 6
    assert [row["experience"] for row in cumulative] == ["1", "1", "2", "2", "3", "3"]
    weights = [last_checkpoint(runs[name, 1])["model"] for name in TOGETHER]
    assert min(difference(one, other) for i, one in enumerate(weights) for other in weights[:i]) > 1e-3


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_each_remedy_alone(tmp_path):
    cases = [case for name, plugins in ALONE.items() for case in cases_of(name, plugins)]
    runs = run_worlds(cases, tmp_path)
    for (name, processes), folder in runs.items():
        found = compare(runs[name.removesuffix(", resumed"), 1], folder)
        assert max(found.values()) <= TOLERANCE["64-true"], (name, processes, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "reservoir replay"])
def test_each_remedy_alone_in_float32(tmp_path, name):
    runs = run_worlds([Case(name, {"plugins": ALONE[name]} | RATES)], tmp_path)
    for processes in (2, 3):
        found = compare(runs[name, 1], runs[name, processes])
        assert max(found.values()) <= TOLERANCE["32-true"], (processes, found)
