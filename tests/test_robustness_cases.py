"""Acceptance cases that no other test holds: a machine without CUDA, and the same seed for the same bits."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from robustness import command
from safetensors.torch import load_file
from test_robustness_data import write_data
from training_cases import OPTIONS, checkpoint, command_line, tensors, write_videos
from training_cases import run as train_run

import demo
import eval as evaluation
import train
from models import build_model
from utils.checkpoint import save_weights

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_videos(folder / "videos")
    write_data(folder / "benchmark", "folder")
    torch.manual_seed(0)
    save_weights(build_model("aott", encoder=OPTIONS["encoder"]), folder / "w.safetensors")
    return folder


def scripts(place: Path, out: Path) -> dict:
    results = ["--checkpoint", place / "w.safetensors"]
    data = place / "benchmark"
    return {
        "train": (train.main, command_line(place / "videos", out / "train", total_steps=2)),
        "eval": (evaluation.main, [*results, "--data_root", data, "--dataset", "folder", "--output_dir", out / "eval"]),
        "demo": (
            demo.main,
            [*results, "--input", data / "JPEGImages/cat", "--mask", data / "Annotations/cat/00000.png"]
            + ["--output_dir", out / "demo"],
        ),
    }


def test_no_cuda_anywhere(place, tmp_path, monkeypatch, capfd) -> None:
    """A7: all three scripts finish, none asks for CUDA by itself; cuda:7 is refused with what there is."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model or tensor was sent to CUDA")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for owner in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(owner, "cuda", refuse)
    for name, (main, words) in scripts(place, tmp_path).items():
        words = [word for word in words if word not in ("--accelerator", "cpu")]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            status, line = command("without CUDA", main, [*words, "--accelerator", "cpu"], capfd)
            assert status == 0, line
        texts = [str(warning.message) for warning in caught]
        assert not [text for text in texts if "pin" in text or "autocast" in text], (name, texts)
        status, line = command("without CUDA", main, [*words, "--devices", "cuda:7"], capfd)
        assert status == 2 and "this machine has only" in line and "cpu" in line
    assert (tmp_path / "train/checkpoints/step_2.ckpt").exists()
    assert json.loads((tmp_path / "eval/scores.json").read_text())["J&F-Mean"] > 0
    assert json.loads((tmp_path / "demo/summary.json").read_text())["frames"] == 4


def test_the_seed_decides_every_bit(place, tmp_path) -> None:
    """Twice the same run, with loaders or without; then another seed."""
    for name, options in {"one": {}, "two": {"workers": 2}, "other": {"seed": 1}}.items():
        train_run(place / "videos", tmp_path / name, **{"total_steps": 3} | options)
    one, two, other = (
        tensors(checkpoint(tmp_path / name, 3)) | load_file(tmp_path / name / "checkpoints/ema_3.safetensors")
        for name in ("one", "two", "other")
    )
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_results_repeat(place, tmp_path, capfd) -> None:
    """Evaluation and demo have nothing random: the same masks and scores, bit for bit."""
    for out in (tmp_path / "one", tmp_path / "two"):
        for name, (main, words) in list(scripts(place, out).items())[1:]:
            assert command("repeated", main, [*words, "--accelerator", "cpu"], capfd)[0] == 0, name
    for file in ("eval/scores.json", "eval/submission.zip", *(f"demo/masks/{t:05}.png" for t in range(4))):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
