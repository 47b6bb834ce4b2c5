"""Evaluation from the command to the files, on tiny videos: as the reference, for every number of processes."""

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import Case, golden_state
from PIL import Image
from torch.distributed import HashStore

import eval as script
from data.benchmarks import open_benchmark
from data.labels import read_label_png
from data.masks import write_mask
from models import build_model
from utils import evaluation
from utils.checkpoint import save_weights
from utils.cli import run
from utils.errors import InputError
from utils.fabric import make_fabric
from utils.results import score_predictions
from utils.sharding import WorkQueue

ROOT = Path(__file__).resolve().parents[1]
CPU = {"accelerator": "cpu", "devices": 1, "threads": 1}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "aott.safetensors"
    save_weights(build_model("aott"), path, kind="ema")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four videos of 4 to 6 frames of 48 x 64 pixels with two moving squares, in the layout of DAVIS 2017."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for n in range(4):
        images, masks = root / f"JPEGImages/480p/v{n}", root / f"Annotations/480p/v{n}"
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        background = rng.integers(0, 256, (48, 64, 3), np.uint8)
        for t in range(4 + n % 3):
            labels = np.zeros((48, 64), np.uint8)
            labels[8 + t : 24 + t, 6 + 2 * t : 22 + 2 * t] = 1
            labels[28:44, 40 - t : 56 - t] = 2
            image = np.where((labels == 1)[..., None], (220, 30, 30), background)
            Image.fromarray(np.where((labels == 2)[..., None], (30, 30, 220), image).astype(np.uint8)).save(
                images / f"{t:05}.jpg"
            )
            write_mask(masks / f"{t:05}.png", labels)
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/val.txt").write_text("".join(f"v{n}\n" for n in range(4)))
    return root


@pytest.fixture(scope="module")
def finished(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    script.main(str(data), str(output), checkpoint=str(weights), **CPU)
    return output


def test_one_command_writes_masks_scores_speed_report_and_submission(data: Path, weights: Path, finished: Path) -> None:
    truth = read_label_png(data / "Annotations/480p/v1/00000.png")
    assert np.array_equal(read_label_png(finished / "Annotations/v1/00000.png"), truth)
    for n in range(4):
        assert len(list((finished / f"Annotations/v{n}").glob("*.png"))) == 4 + n % 3
    scores = json.loads((finished / "scores.json").read_text())
    assert scores["preset"] == "davis2017"
    assert sorted(scores["per_object"]) == [f"v{n}_{i}" for n in range(4) for i in (1, 2)]
    assert scores["weights"]["kind"] == "ema"
    assert len(scores["weights"]["sha256"]) == 64
    speed = json.loads((finished / "speed.json").read_text())
    assert (speed["frames"], speed["objects"], speed["warmup_frames"], speed["timed_frames"]) == (19, 8, 3, 12)
    assert speed["fps_model"] > speed["fps_end_to_end"] > 0
    assert speed["device"] == "cpu (1 threads)"
    assert speed["peak_memory_bytes"] > 1e8
    assert len((finished / "per_object.csv").read_text().splitlines()) == 9
    assert len((finished / "per_sequence.csv").read_text().splitlines()) == 5
    with zipfile.ZipFile(finished / "submission.zip") as file:
        assert len(file.namelist()) == 19
    report = (finished / "report.html").read_text()
    assert report.count("<svg") == 8
    assert report.count("data:image/jpeg") == 16
    assert "http" not in report
    assert not list(finished.rglob("*.partial"))


def test_own_masks_score_the_same_when_handed_in(data: Path, finished: Path, tmp_path: Path) -> None:
    returned = script.main(str(data), str(tmp_path), predictions=str(finished))
    mine, theirs = (json.loads((folder / "scores.json").read_text()) for folder in (finished, tmp_path))
    assert returned == theirs
    assert mine.pop("weights") != theirs.pop("weights")
    assert mine == theirs


def test_a_finished_video_is_not_done_again(data: Path, weights: Path, tmp_path: Path) -> None:
    def masks() -> dict[str, int]:
        return {p.parent.name: p.stat().st_mtime_ns for p in tmp_path.glob("Annotations/v*/00001.png")}

    script.main(str(data), str(tmp_path), checkpoint=str(weights), **CPU)
    scores, before = (tmp_path / "scores.json").read_bytes(), masks()
    (tmp_path / "Annotations/v1/00003.png").unlink()
    (tmp_path / "records/v2.json").write_text('{"half a record')
    script.main(str(data), str(tmp_path), checkpoint=str(weights), **CPU)
    assert (tmp_path / "scores.json").read_bytes() == scores
    assert {name for name, time in masks().items() if time != before[name]} == {"v1", "v2"}
    script.main(str(data), str(tmp_path), checkpoint=str(weights), max_long_edge=48, **CPU)  # other results
    assert all(time != before[name] for name, time in masks().items())


def _evaluate(rank: int, world: int, data: Path, weights: Path, output: Path) -> dict | None:
    from utils.checkpoint import describe_weights, load_model

    fabric = make_fabric("cpu", world)
    fabric.launch()
    benchmark = open_benchmark("davis2017", data)
    options = {"flip": False, "scales": (1.0,), "long_term_gap": None, "max_memory_frames": None}
    options |= {"max_long_edge": None, "max_short_edge": None}
    return evaluation.evaluate(
        fabric, load_model(weights), describe_weights(weights), benchmark, output, options, "davis2017", threads=1
    )


def test_two_processes_give_the_same_bits(gloo_pool, data: Path, weights: Path, finished: Path, tmp_path: Path) -> None:
    first, second = gloo_pool.run(_evaluate, data, weights, tmp_path)
    assert second is None
    assert (tmp_path / "scores.json").read_bytes() == (finished / "scores.json").read_bytes()
    assert (tmp_path / "submission.zip").read_bytes() == (finished / "submission.zip").read_bytes()
    assert first["J&F-Mean"] == json.loads((finished / "scores.json").read_text())["J&F-Mean"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 5])
def test_more_processes_give_the_same_bits(devices: int, data: Path, weights: Path, finished: Path, tmp_path: Path):
    done = _command(data, weights, tmp_path, "--devices", str(devices))
    assert done.wait(timeout=300) == 0
    assert (tmp_path / "scores.json").read_bytes() == (finished / "scores.json").read_bytes()


@pytest.mark.slow
def test_a_killed_process_costs_nothing_but_time(data: Path, weights: Path, finished: Path, tmp_path: Path) -> None:
    main = _command(data, weights, tmp_path, "--devices", "2")
    children = Path(f"/proc/{main.pid}/task/{main.pid}/children")
    if not children.exists():
        main.kill()
        pytest.skip("needs /proc to find the second process")
    while not (child := children.read_text().split()) or not list(tmp_path.glob(f"Annotations/.*.{child[0]}.partial")):
        assert main.poll() is None, "the second process never drew a video"
        time.sleep(0.01)
    os.kill(int(child[0]), 9)
    assert main.wait(timeout=300) == 0
    assert (tmp_path / "scores.json").read_bytes() == (finished / "scores.json").read_bytes()


def _command(data: Path, weights: Path, output: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "eval.py", "--checkpoint", weights, "--data_root", data, "--output_dir", output]
    command += ["--accelerator", "cpu", "--threads", "1", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_work_of_a_dead_process_is_done_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    store, done = HashStore(), []
    assert store.add("next", 1) == 1  # rank 1 draws the first piece and dies
    store.set("owner/0", "1")
    assert store.add("next", 1) == 2  # rank 2 dies before it has said what it drew
    WorkQueue(["a", "b", "c"], rank=0, store=store, stale_after=0.3).run(done.append)
    assert done[0] == 2
    assert sorted(done) == [0, 1, 2]
    assert "the process of a has died" in caplog.text


def test_a_failure_elsewhere_is_raised_on_rank_0_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.sharding.BEAT_SECONDS", 0.02)
    store = HashStore()
    here, there = (WorkQueue(["a", "b"], rank=rank, store=store) for rank in (0, 1))
    both = threading.Barrier(2)

    def fail(_: int) -> None:
        both.wait()
        raise InputError("frame 7 is broken")

    def keep_working(_: int) -> None:
        both.wait()
        for _ in range(500):
            here.check()
            time.sleep(0.01)

    other = threading.Thread(target=there.run, args=(fail,))
    other.start()
    with pytest.raises(InputError, match="frame 7 is broken"):
        here.run(keep_working)
    other.join()


def test_a_process_that_lost_rank_0_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.sharding.BEAT_SECONDS", 0.02)

    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            if key.startswith("beat"):
                raise RuntimeError("connection reset")
            return super().add(key, amount)

    queue = WorkQueue(["a"], rank=1, store=Gone())

    def keep_working(_: int) -> None:
        for _ in range(500):
            queue.check()
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match="main process of the run has ended"):
        queue.run(keep_working)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("c", {}),  # an object that appears later
        ("e", {"flip": True, "scales": "1.0,1.3"}),
        ("f", {"max_long_edge": 150}),
        ("g", {"long_term_gap": 2}),  # a second group of objects
    ],
)
def test_masks_equal_the_reference(case: str, options: dict, tmp_path: Path) -> None:
    golden = Case(f"infer_aott_{case}.npz")
    torch.save({"state_dict": golden_state("aott")}, tmp_path / "aott.pth")
    (tmp_path / "JPEGImages/video").mkdir(parents=True)
    (tmp_path / "Annotations/video").mkdir(parents=True)
    for t, frame in enumerate(golden["frames"]):
        Image.fromarray(frame).save(tmp_path / f"JPEGImages/video/{t:05}.png")
    for t, mask in golden.masks().items():
        write_mask(tmp_path / f"Annotations/video/{t:05}.png", mask)
    arguments = {"dataset": "folder", "model": "aott", "checkpoint": str(tmp_path / "aott.pth")} | CPU | options
    script.main(str(tmp_path), str(tmp_path / "out"), **arguments)
    assert not (tmp_path / "out/scores.json").exists()  # most frames have no true mask
    for t, expected in enumerate(golden["pred"], start=1):
        labels = read_label_png(tmp_path / f"out/Annotations/video/{t:05}.png")
        differs = labels != expected
        assert differs.mean() < 0.005
        assert not differs[~golden.near_tie(t)].any()


def test_davis_at_full_resolution_is_written_and_scored_at_480p(data: Path, weights: Path, tmp_path: Path) -> None:
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "png")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "480p").symlink_to(data / kind / "480p")
        (tmp_path / kind / "Full-Resolution/v0").mkdir(parents=True)
        for path in (data / kind / "480p/v0").glob(f"*.{suffix}"):
            with Image.open(path) as image:
                large = image.resize((96, 72), Image.Resampling.NEAREST)
            large.save(tmp_path / kind / "Full-Resolution/v0" / path.name)
    (tmp_path / "ImageSets/2017").mkdir(parents=True)
    (tmp_path / "ImageSets/2017/val.txt").write_text("v0\n")
    script.main(str(tmp_path), str(tmp_path / "out"), checkpoint=str(weights), resolution="full", **CPU)
    assert read_label_png(tmp_path / "out/Annotations/v0/00002.png").shape == (48, 64)
    assert len(json.loads((tmp_path / "out/scores.json").read_text())["per_object"]) == 2


def test_dense_evaluation_also_writes_the_sparse_frames(weights: Path, tmp_path: Path, data: Path) -> None:
    valid, dense = tmp_path / "valid", tmp_path / "valid_all_frames/JPEGImages"
    (valid / "Annotations/v2").mkdir(parents=True)
    dense.mkdir(parents=True)
    (dense / "v2").symlink_to(data / "JPEGImages/480p/v2")
    for frame in ("00000", "00005"):
        (valid / f"Annotations/v2/{frame}.png").symlink_to(data / f"Annotations/480p/v2/{frame}.png")
    objects = {i: {"category": c, "frames": ["00000", "00005"]} for i, c in (("1", "dog"), ("2", "tractor"))}
    (valid / "meta.json").write_text(json.dumps({"videos": {"v2": {"objects": objects}}}))
    arguments = {"dataset": "youtubevos2019", "split": "valid_all_frames", "checkpoint": str(weights)} | CPU
    script.main(str(tmp_path), str(tmp_path / "out"), **arguments)
    assert len(list((tmp_path / "out/Annotations/v2").iterdir())) == 6
    sparse = sorted(path.name for path in (tmp_path / "out/Annotations_sparse/v2").iterdir())
    assert sparse == ["00000.png", "00005.png"]
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    names = ("J-seen", "J-unseen", "F-seen", "F-unseen")
    assert scores["G"] == pytest.approx(sum(scores[name] for name in names) / 4)


def command_line(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """Exit status and what was written to stderr."""
    with pytest.raises(SystemExit) as ended:
        run(script.main, [str(argument) for argument in arguments])
    return ended.value.code, capsys.readouterr().err


def test_wrong_use_is_one_line_and_status_2(data: Path, weights: Path, finished: Path, tmp_path: Path, capsys) -> None:
    out = ["--data_root", data, "--output_dir", tmp_path / "out"]
    truth = data / "Annotations/480p"
    for arguments, text in (
        ([*out, "--predictions", truth], "ground truth itself"),
        ([*out, "--predictions", tmp_path / "nowhere"], "nowhere: no such folder"),
        ([*out, "--predictions", tmp_path], "holds none of the 4 sequences"),
        ([*out, "--predictions", finished, "--preset", "davis"], "choose one of davis2017"),
        ([*out, "--checkpoint", weights, "--scales", "1.0;1.3"], "--scales"),
        ([*out, "--checkpoint", weights, "--model", "deaott"], "aott"),
        (out, "--checkpoint: missing"),
        ([*out, "--predicions", finished], "--predictions"),
    ):
        status, error = command_line(capsys, *arguments)
        assert status == 2
        assert text in error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_results_never_replace_the_true_masks(data: Path, weights: Path, tmp_path: Path, capsys) -> None:
    status, error = command_line(
        capsys, "--data_root", data, "--output_dir", data, "--checkpoint", weights, "--accelerator", "cpu"
    )
    assert (status, "true masks" in error) == (2, True)


def test_a_broken_frame_is_named_and_gives_no_score(data: Path, weights: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "JPEGImages").mkdir()
    (tmp_path / "Annotations").symlink_to(data / "Annotations/480p")
    for n in range(4):
        (tmp_path / f"JPEGImages/v{n}").mkdir()
        for path in (data / f"JPEGImages/480p/v{n}").iterdir():
            (tmp_path / f"JPEGImages/v{n}/{path.name}").write_bytes(path.read_bytes())
    broken = tmp_path / "JPEGImages/v3/00002.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    out = ["--output_dir", tmp_path / "out", "--checkpoint", weights, "--accelerator", "cpu", "--threads", "1"]
    status, error = command_line(capsys, "--dataset", "folder", "--data_root", tmp_path, *out)
    assert (status, str(broken) in error) == (2, True)
    assert not (tmp_path / "out/scores.json").exists()
    assert (tmp_path / "out/Annotations/v2").is_dir()  # what was finished is kept


def test_masks_without_truth_are_not_scored(data: Path, finished: Path, tmp_path: Path) -> None:
    masks = tmp_path / "Annotations/480p/v0"
    masks.mkdir(parents=True)
    (masks / "00000.png").symlink_to(data / "Annotations/480p/v0/00000.png")
    (tmp_path / "JPEGImages").symlink_to(data / "JPEGImages")
    (tmp_path / "ImageSets/2017").mkdir(parents=True)
    (tmp_path / "ImageSets/2017/val.txt").write_text("v0\n")
    with pytest.raises(InputError, match="v0: lacks the true masks"):
        score_predictions(open_benchmark("davis2017", tmp_path), finished, tmp_path / "out")
