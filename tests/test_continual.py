"""Continual training as one process sees it: configuration, memories, the projection, scores, what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import train
import utils.cli
from utils.continual import memory
from utils.continual.course import fingerprint
from utils.continual.plugin import make_plugins
from utils.continual.scores import read_matrix, summarise, write_matrix
from utils.continual.stages import Plan, make_stages, plan_stages, read_experiences
from utils.continual.strategies import KINDS, Cumulative, Joint, solve_bounded
from utils.errors import InputError
from utils.metrics import VOSMetric
from utils.plots import learning_curve

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs" / "continual").glob("*.yaml"))
LENGTHS, BATCH = (6, 5, 4), 4
CLIPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=40)


def plans() -> list[Plan]:
    entries = [{"name": f"e{i}", "datasets": ["davis2017"], "epochs": 2} for i in range(3)]
    return plan_stages(read_experiences(entries), LENGTHS, BATCH)


# --- which clips are seen -----------------------------------------------------------------------------------------


def test_every_clip_twice_in_two_epochs():
    stages = make_stages(plans(), LENGTHS, BATCH, seed=3)
    assert [(stage.first, stage.end) for stage in stages] == [(0, 3), (3, 6), (6, 8)]
    for stage, length, more in zip(stages, LENGTHS, (0, 2, 0), strict=True):
        clips = [clip for step in range(stage.first, stage.end) for clip in stage.batch(step)]
        assert {experience for experience, _ in clips} == {stage.number}
        items = [item for _, item in clips]
        assert sorted(items)[: 2 * length] == list(range(2 * length)) and len(items) == 2 * length + more
        assert len(set(items)) == len(items)  # the third turn of the last batch, too, is drawn anew


def test_joint_has_the_clips_of_naive():
    def clips(made: list[Plan]) -> list:
        stages = make_stages(made, LENGTHS, BATCH, seed=3)
        return [clip for stage in stages for step in range(stage.first, stage.end) for clip in stage.batch(step)]

    naive, joint = clips(plans()), clips(Joint().plan(plans()))
    assert sorted(naive) == sorted(joint) and naive != joint


def test_cumulative_shares_stages_evenly_and_repeats_no_clip():
    made = Cumulative().plan(plans())
    assert [plan.clips for plan in made] == [{0: 12}, {0: 6, 1: 6}, {0: 2, 1: 3, 2: 3}]
    stages = make_stages(made, LENGTHS, BATCH, seed=3)
    clips = [clip for stage in stages for step in range(stage.first, stage.end) for clip in stage.batch(step)]
    assert len(set(clips)) == len(clips)


# --- memories -----------------------------------------------------------------------------------------------------


@given(CLIPS, CLIPS, st.integers(1, 20))
def test_reservoir_does_not_depend_on_how_clips_are_offered(one, other, size):
    whole = memory.reservoir(one + other, size, 1)
    assert memory.reservoir(memory.reservoir(one, size, 1) + other, size, 1) == whole
    assert memory.reservoir(other + one + one, size, 1) == whole
    assert len(whole) == min(size, len({*one, *other}))


def test_reservoir_is_a_fair_sample():
    clips = [(e, i) for e in range(4) for i in range(50)]
    counts = np.zeros((4, 50))
    for seed in range(200):
        for clip in memory.reservoir(clips, 20, seed):
            counts[clip] += 1
    assert abs(counts.sum(1) / 200 - 5).max() < 0.6  # a standard deviation is 0.13
    assert counts.min() > 2 and counts.max() < 45  # 20 expected, 4 the standard deviation


@given(CLIPS, st.integers(1, 20))
def test_balanced_memory(clips, size):
    kept = memory.balanced(clips, size, 1)
    shares = [sum(clip[0] == e for clip in kept) for e in sorted({e for e, _ in clips})]
    there = [len({clip for clip in clips if clip[0] == e}) for e in sorted({e for e, _ in clips})]
    for share, available in zip(shares, there, strict=True):
        assert share == available or share in (size // len(shares), -(-size // len(shares)))
    assert len(kept) <= size


# --- projection ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([0.0, 0.5]))
def test_quadratic_programme(seed, size, least):
    """Against the optimality conditions: at the bound the derivative pushes outwards, elsewhere it is 0."""
    rng = np.random.default_rng(seed)
    references = rng.standard_normal((size, 6))
    matrix, vector = references @ references.T + 1e-3 * np.eye(size), rng.standard_normal(size)
    v = solve_bounded(matrix, vector, least)
    slope = matrix @ v + vector
    assert (v >= least).all()
    assert (np.abs(slope[v > least]) < 1e-8).all() and (slope[v == least] > -1e-8).all()


def test_gem_leaves_no_reference_against_the_step():
    references = torch.randn(3, 20, dtype=torch.float64, generator=torch.manual_seed(0))
    gradient = -references.sum(0) + torch.randn(20, dtype=torch.float64)
    gem = KINDS["gem"](damping=1e-9)
    mixed = gem.mixture((references @ references.T).numpy(), (references @ gradient).numpy())
    after = gradient + torch.as_tensor(mixed) @ references
    assert (references @ gradient).min() < -1 and (references @ after).min() > -1e-6
    assert gem.mixture(np.eye(2), np.array([0.0, 1.0])) is None


# --- scores -------------------------------------------------------------------------------------------------------

MATRIX = {
    "start": {"a": 0.5, "b": 0.4, "c": 0.3},
    "a": {"a": 0.8, "b": 0.5, "c": 0.35},
    "b": {"a": 0.9, "b": 0.7, "c": 0.4},
    "c": {"a": 0.6, "b": 0.75, "c": 0.9},
}


def test_summary_by_hand():
    summary = summarise(MATRIX, ["a", "b", "c"])
    assert summary["average"] == pytest.approx((0.6 + 0.75 + 0.9) / 3)
    assert summary["forgetting"] == pytest.approx(((0.9 - 0.6) + (0.7 - 0.75)) / 2)
    assert summary["backward"] == pytest.approx(((0.6 - 0.8) + (0.75 - 0.7)) / 2)
    assert summary["forward"] == pytest.approx(((0.5 - 0.4) + (0.4 - 0.3)) / 2)
    joint = {"start": MATRIX["start"], "joint": MATRIX["c"]}
    assert summarise(joint, ["a", "b", "c"]) == {
        "average": summary["average"],
        "forgetting": None,
        "backward": None,
        "forward": None,
    }


def test_matrix_files(tmp_path):
    write_matrix(MATRIX, ["a", "b", "c"], tmp_path)
    assert read_matrix(tmp_path / "matrix.csv") == MATRIX
    header, values = (tmp_path / "summary.csv").read_text().splitlines()
    assert header == "average,forgetting,backward,forward" and float(values.split(",")[0]) == pytest.approx(0.75)
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_average_of_process_averages_would_be_seen():
    """Three objects on one process and one on the other: the metric's union is right, the mean of means is not."""
    videos = {"one": [0.9], "three": [0.5, 0.6, 0.7]}
    whole, means = VOSMetric("all"), []
    for name, values in videos.items():
        part = VOSMetric("all")
        part.update(name, [(name, i, "00000", value, value) for i, value in enumerate(values, 1)])
        means.append(part.compute()["J&F-Mean"])
        whole.merge(part)
    assert whole.compute()["J&F-Mean"] == pytest.approx(0.675)
    assert abs(np.mean(means) - whole.compute()["J&F-Mean"]) >= 1e-3


def test_fingerprint_sees_a_bit():
    value = {"a": [torch.ones(3), 1], "b": "x"}
    other = {"b": "x", "a": [torch.ones(3), 1]}
    assert fingerprint(value) == fingerprint(other)
    other["a"][0][1] = torch.nextafter(torch.ones(()), torch.tensor(2.0))
    assert fingerprint(value) != fingerprint(other)


# --- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_differ_in_plugins_alone(path):
    config, naive = (yaml.safe_load(file.read_text()) for file in (path, CONFIGS[0].with_name("naive.yaml")))
    assert {key: value for key, value in config.items() if key != "plugins"} == {
        key: value for key, value in naive.items() if key != "plugins"
    }
    settings = utils.cli.read_options(train.main, path, {"data_root": ".", "output_dir": "."})
    assert [type(plugin) for plugin in make_plugins(settings["plugins"])]
    assert [experience.name for experience in read_experiences(settings["experiences"])]


def test_every_remedy_has_a_configuration():
    used = {plugin if isinstance(plugin, str) else plugin["kind"] for c in CONFIGS for plugin in load_plugins(c)}
    assert used == set(KINDS)


def load_plugins(path: Path) -> list:
    return yaml.safe_load(path.read_text())["plugins"]


EXPERIENCE = {"name": "a", "datasets": [{"kind": "video"}], "steps": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experiences": [EXPERIENCE], "strategy": "dp"}, "--strategy dp: .*--strategy ddp has a process for each GPU"),
        ({"experiences": [EXPERIENCE], "datasets": ["davis2017"]}, "--datasets and --experiences: give one of them"),
        ({"plugins": ["ewc"], "datasets": ["davis2017"]}, "--plugins: .* need --experiences"),
        ({}, "--datasets: missing"),
        ({"experiences": []}, "the list is empty"),
        ({"experiences": [EXPERIENCE | {"epochs": 2}]}, "number 1: either steps or epochs"),
        ({"experiences": [EXPERIENCE | {"steps": 0}]}, "number 1: 0 is no length"),
        ({"experiences": [EXPERIENCE, EXPERIENCE]}, "number 2: the name a is taken"),
        ({"experiences": [EXPERIENCE | {"name": "../a"}]}, "must consist of letters"),
        ({"experiences": [EXPERIENCE | {"batch": 2}]}, "no option 'batch'; it has name, datasets"),
        ({"experiences": [{"name": "a", "steps": 2}]}, "datasets is missing"),
        ({"experiences": [EXPERIENCE], "plugins": ["ewk"]}, "kind 'ewk' is none of naive, .*module:Class"),
        ({"experiences": [EXPERIENCE], "plugins": [{"kind": "ewc", "lambda": 1}]}, "ewc has no option 'lambda'"),
        ({"experiences": [EXPERIENCE], "plugins": [{"kind": "replay", "share": 2}]}, "share 2 between 0 and 1"),
        ({"experiences": [EXPERIENCE], "plugins": ["antigravity:X"]}, "if you trust it, set VOS_PLUGINS=antigravity"),
        ({"experiences": [EXPERIENCE], "plugins": ["no_module:X"]}, "no_module:X cannot be imported"),
        ({"experiences": [EXPERIENCE], "plugins": ["pathlib:Path"]}, "no class derived from"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("VOS_PLUGINS", "no_module,pathlib")
    given = {"data_root": str(tmp_path), "output_dir": str(tmp_path / "run"), "accelerator": "cpu"} | options
    with pytest.raises(InputError, match=message):
        train.main(**utils.cli.read_options(train.main, None, given))
    assert not (tmp_path / "run").exists()


def test_learning_curve_of_a_run_with_scores(tmp_path):
    """Rows of evaluations have no loss."""
    (tmp_path / "metrics.csv").write_text("step,loss,iou,jf_a\n0,,,0.5\n1,2.0,0.1,\n2,1.0,0.2,\n2,,,0.6\n")
    learning_curve(tmp_path, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
