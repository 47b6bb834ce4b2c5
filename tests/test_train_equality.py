"""One recipe, the same numbers, however its clips are spread over processes and passes.

The whole of train.py runs: launch, Fabric, loader, reduction, clipping, AdamW, moving average. Drop path and dropout
are off, being the only draws that depend on how clips are grouped; sizes, crops, merging and identities are drawn by
clip.
"""

from pathlib import Path

import pytest
import torch
from training_cases import checkpoint, difference, run, tensors, without_drops, write_videos

from utils.loading import StepSampler

SMALL = {"log_every": 1, "save_every": 10}
# A shift of all keys changes no attention: this gradient is 0, and AdamW makes steps of what rounding leaves of it.
WITHOUT_GRADIENT = "self_attn.linear_K.bias"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_rank(rank: int, world_size: int, videos: Path, output: Path, options: dict) -> None:
    with without_drops():
        run(videos, output, **SMALL | options)


def runs(gloo_pool, videos: Path, folder: Path, **options) -> dict[str, Path]:
    """The same run by one process, by one in two passes a step and activations computed twice, by two processes."""
    folders = {name: folder / name for name in ("one", "passes", "two")}
    run_rank(0, 1, videos, folders["one"], options)
    run_rank(0, 1, videos, folders["passes"], options | {"accumulation": 2, "recompute": True})
    gloo_pool.run(run_rank, videos, folders["two"], options, timeout=600)
    return folders


@pytest.mark.parametrize("model", ["aott", "deaott"])
def test_gradients_of_one_step(gloo_pool, videos, tmp_path, model):
    folders = runs(gloo_pool, videos, tmp_path, model=model, precision="64-true", total_steps=1, clip_norm=1e9)
    # After one step AdamW's first moment is a tenth of the gradient.
    one, *others = [
        {key: value["exp_avg"] / 0.1 for key, value in checkpoint(folder, 1)["optimizer"]["state"].items()}
        for folder in folders.values()
    ]
    assert max(gradient.abs().max() for gradient in one.values()) > 0.01
    for other in others:
        assert difference(one, other) < 1e-6


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-9), ("32-true", 1e-5)])
def test_twenty_steps(gloo_pool, videos, tmp_path, precision, tolerance):
    """Half of the steps feed predictions and train without the identity bank."""
    folders = runs(gloo_pool, videos, tmp_path, precision=precision, total_steps=20, batch_size=2)
    middle, end = checkpoint(folders["one"], 10), checkpoint(folders["one"], 20)
    assert difference(middle["model"], end["model"]) > 1e-4
    for name in ("passes", "two"):
        other = checkpoint(folders[name], 20)
        for mine, theirs in ((end["model"], other["model"]), (end["ema"]["shadow"], other["ema"]["shadow"])):
            if precision == "32-true":
                mine = {key: value for key, value in mine.items() if not key.endswith(WITHOUT_GRADIENT)}
                theirs = {key: theirs[key] for key in mine}
            assert difference(mine, theirs) < tolerance
    tables = [(folder / "metrics.csv").read_text().splitlines()[1:] for folder in folders.values()]
    assert [len(rows) for rows in tables] == [20, 20, 20]
    for rows in zip(*tables, strict=True):
        losses = [float(row.split(",")[2]) for row in rows]
        assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)  # the logged loss is float32


def test_a_wrong_share_would_be_seen(videos, tmp_path):
    """The comparison can fail: with other clips in the batch the gradients differ."""
    one = run(videos, tmp_path / "one", **SMALL, total_steps=1, clip_norm=1e9)
    two = run(videos, tmp_path / "two", **SMALL, total_steps=1, clip_norm=1e9, batch_size=2)
    moments = [tensors(checkpoint(folder, 1)["optimizer"]["state"]) for folder in (one, two)]
    assert difference(*moments) > 1e-3


def batches(steps: range, world_size: int = 1, accumulation: int = 1) -> list[set[int]]:
    """The clips of each step, over all processes and passes."""
    ranks = [list(StepSampler(7, 12, steps, 5, rank, world_size, accumulation)) for rank in range(world_size)]
    assert all(len(rank) == len(steps) * accumulation for rank in ranks)
    return [
        {clip for rank in ranks for part in rank[i * accumulation : (i + 1) * accumulation] for clip in part}
        for i in range(len(steps))
    ]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 3), (2, 1), (2, 3), (4, 1)])
def test_order_of_clips(world_size, accumulation):
    whole = batches(range(7))
    assert batches(range(7), world_size, accumulation) == whole
    assert batches(range(3, 7), world_size, accumulation) == whole[3:]  # what a resumed run gets
    clips = [clip for step in whole for clip in step]
    assert sorted(clips) == list(range(84))  # twelve turns of seven clips, each drawn anew
