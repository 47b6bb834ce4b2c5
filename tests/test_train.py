"""train.py as one process sees it: resuming, stopping, bad numbers, bad data, what it writes."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_cases import OPTIONS, checkpoint, command_line, difference, run, tensors, without_drops, write_videos

import train
import utils.cli
from models import build_model
from utils.checkpoint import load_model, load_weights, save_weights
from utils.errors import InputError
from utils.fabric import launch, make_fabric
from utils.progress import Progress

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def straight(videos, tmp_path_factory) -> Path:
    """Six steps without interruption: checkpoints of steps 3 and 6."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = run(videos, tmp_path_factory.mktemp("straight"))
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def half(straight, tmp_path) -> Path:
    """The same run as it was after step 3."""
    shutil.copytree(straight, tmp_path / "half")
    for name in ("step_6.ckpt", "ema_6.safetensors"):
        (tmp_path / "half" / "checkpoints" / name).unlink()
    return tmp_path / "half"


def same(one: Path, other: Path, step: int = 6) -> bool:
    """Whether two runs are equal to the last bit: weights, average, optimiser, position."""
    for content in (
        lambda folder: tensors(checkpoint(folder, step)),
        lambda folder: load_file(folder / "checkpoints" / f"ema_{step}.safetensors"),
    ):
        left, right = content(one), content(other)
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "samples_per_s"} for row in csv.DictReader(file)]


def wait_for(condition, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# --- resuming -----------------------------------------------------------------------------------------------------


def test_killed_run_goes_on_to_the_same_bits(videos, straight, tmp_path):
    folder = tmp_path / "killed"
    words = [*command_line(videos, folder), "--workers", "1"]
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "train.py", *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=stderr,
        )
        wait_for(lambda: process.poll() is not None or (folder / "checkpoints" / "step_3.ckpt").exists())
        process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "stderr").read_text()[-2000:]
    left_over = folder / "checkpoints" / ".step_6.ckpt"
    left_over.write_bytes(b"half a checkp")
    with open(folder / "metrics.csv", "a") as table:
        table.write("5,1.0,0.3")  # a row that the kill cut off
    assert not same_step_exists(folder, 6)
    run(videos, folder)
    assert same(straight, folder) and rows(straight) == rows(folder)
    assert not left_over.exists()
    imported = re.findall(r"\| +([\w.]+)$", (tmp_path / "stderr").read_text(), re.MULTILINE)
    # timm's attempt to import wandb is in the list, and fails.
    assert "timm" in imported and not {"wandb.sdk", "matplotlib.pyplot"} & set(imported)


def same_step_exists(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step_{step}.ckpt").exists()


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_damaged_checkpoint_is_passed_over(videos, straight, tmp_path, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(straight, folder)
    newest = folder / "checkpoints" / "step_6.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    run(videos, folder)
    assert same(straight, folder) and rows(straight) == rows(folder)
    assert re.search(r"warning: .*step_6.ckpt is damaged and passed over", (folder / "train.log").read_text())
    aside = sorted(path.name for path in (folder / "checkpoints" / "set_aside").iterdir())
    assert aside == ["ema_6.safetensors", "step_6.ckpt"]


def two_ranks(rank: int, world_size: int, videos: Path, folder: Path) -> None:
    with without_drops():
        run(videos, folder)


def test_resuming_with_another_number_of_processes(gloo_pool, videos, tmp_path):
    with without_drops():
        one = run(videos, tmp_path / "one")
    shutil.copytree(one, two := tmp_path / "two")
    (two / "checkpoints" / "step_6.ckpt").unlink()
    gloo_pool.run(two_ranks, videos, two, timeout=600)
    assert 0 < difference(checkpoint(one, 6)["model"], checkpoint(two, 6)["model"]) < 1e-5
    assert [row["loss"] for row in rows(one)[:1]] == [row["loss"] for row in rows(two)[:1]]


def test_device_is_not_read_from_a_checkpoint(videos, straight, half):
    """A checkpoint that says its tensors lie on a GPU, as one written there does."""
    path = half / "checkpoints" / "step_3.ckpt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    on_cpu = b"X\x03\x00\x00\x00cpu"
    assert on_cpu in records[name]
    records[name] = records[name].replace(on_cpu, b"X\x06\x00\x00\x00cuda:5")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(RuntimeError, match="cuda"):
        torch.load(path, weights_only=True)
    run(videos, half)
    assert same(straight, half)


def test_never_and_a_path(videos, straight, half):
    run(videos, half, resume="never")  # from the start, beside what was there
    assert same(straight, half) and rows(straight) == rows(half)
    first = half / "checkpoints" / "set_aside" / "step_3.ckpt"
    run(videos, half, resume=str(first))  # from step 3, although step 6 is there
    assert same(straight, half) and rows(straight) == rows(half)


def test_a_finished_run_is_left_as_it_is(videos, straight, tmp_path):
    shutil.copytree(straight, again := tmp_path / "again")
    run(videos, again)
    assert same(straight, again) and rows(straight) == rows(again)


def test_checkpoints_that_do_not_fit(videos, half, tmp_path):
    with pytest.raises(InputError, match="step_3.ckpt does not fit this run .*--resume never"):
        run(videos, half, model="aots")
    broken = tmp_path / "step_9.ckpt"
    broken.write_bytes(b"no zip")
    for path in (broken, tmp_path / "nowhere.ckpt"):
        with pytest.raises(InputError, match=f"--resume {path}: not a whole checkpoint"):
            run(videos, half, resume=str(path))


def test_own_weights_know_their_model(videos, tmp_path):
    init = tmp_path / "init.safetensors"
    save_weights(build_model("deaott", encoder=OPTIONS["encoder"]), init)
    small = {"init": str(init), "encoder": None, "total_steps": 1, "batch_size": 1, "frames": 2}
    folder = run(videos, tmp_path / "run", **small)
    assert load_model(folder / "checkpoints" / "ema_1.safetensors").settings.encoder == OPTIONS["encoder"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"] == "deaott"
    with pytest.raises(InputError, match="holds a deaott, --model says aott"):
        run(videos, tmp_path / "other", model="aott", **small)


def test_newest_checkpoints_are_kept(videos, tmp_path):
    folder = run(videos, tmp_path, total_steps=4, save_every=1, keep=2, frames=2, batch_size=1)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "ema_3.safetensors", "ema_4.safetensors", "step_3.ckpt", "step_4.ckpt",
    ]  # fmt: skip
    model = build_model("aott", encoder=OPTIONS["encoder"])
    assert load_weights(model, folder / "checkpoints" / "ema_4.safetensors").kind == "ema"


# --- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_and_stops(videos, straight, tmp_path, number):
    handler = signal.getsignal(number)
    settings = settings_of(videos, tmp_path)

    def on_step(row: dict) -> None:
        if row["step"] == 2:
            signal.raise_signal(number)

    outcome = launch(make_fabric("cpu"), train.setup, settings, None, on_step)
    assert outcome == {"step": 2, "signal": number}
    assert signal.getsignal(number) is handler
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == ["step_2.ckpt"]
    assert f"stopped after step 2 ({signal.Signals(number).name})" in (tmp_path / "train.log").read_text()
    if number == signal.SIGTERM:
        run(videos, tmp_path)
        assert same(straight, tmp_path)


def settings_of(videos: Path, folder: Path, **options) -> dict:
    """All options of train.py for the small run."""
    given = OPTIONS | {"data_root": videos, "output_dir": folder} | options
    settings = utils.cli.read_options(train.main, None, given)
    del settings["debug"]
    return settings


def test_stop_after(videos, straight, tmp_path):
    folder = run(videos, tmp_path, stop_after=0.0)
    assert same_step_exists(folder, 1) and not same_step_exists(folder, 2)
    run(videos, folder)
    assert same(straight, folder)


# --- numbers that are not finite ----------------------------------------------------------------------------------


def hostile_weights(path: Path, slots: list[int]) -> str:
    """Weights whose logits are infinite where an object holds one of the slots."""
    model = build_model("aott", encoder=OPTIONS["encoder"])
    with torch.no_grad():
        model.decoder.conv_out.bias[slots] = torch.inf
    save_weights(model, path)
    return str(path)


def test_steps_that_are_not_finite_are_left_out(videos, tmp_path):
    init = hostile_weights(tmp_path / "init.safetensors", [1, 2, 3])
    folder = run(videos, tmp_path / "run", init=init, total_steps=10, log_every=1, save_every=1, keep=20, batch_size=1)
    log = (folder / "train.log").read_text()
    line = r"step (\d+) skipped, its loss or gradient is not finite; clips: video\d"
    skipped = [int(step) for step in re.findall(line, log)]
    assert 1 <= len(skipped) <= 8
    states = [checkpoint(folder, step) for step in range(1, 11)]
    assert states[-1]["ema"]["updates"] == 10 - len(skipped)
    for before, after in zip(states[:-1], states[1:], strict=True):
        for part in ("model", "ema", "optimizer"):
            old, new = tensors(before[part]), tensors(after[part])
            moved = [key for key in old if not torch.equal(old[key], new[key]) and not key.endswith("conv_out.bias")]
            if after["step"] not in skipped:
                assert moved
            elif part != "optimizer":  # it holds the step's learning rates
                assert not moved
    average = tensors(states[-1]["ema"])
    assert all(torch.isfinite(value).all() for key, value in average.items() if not key.endswith("conv_out.bias"))
    assert [int(row["step"]) for row in rows(folder) if not np.isfinite(float(row["loss"]))] == skipped


def test_five_in_a_row_end_the_run(videos, tmp_path):
    init = hostile_weights(tmp_path / "init.safetensors", list(range(1, 11)))
    with pytest.raises(RuntimeError, match="five steps in a row"):
        run(videos, tmp_path / "run", init=init, total_steps=10, batch_size=1)
    assert (tmp_path / "run" / "train.log").read_text().count("skipped") == 5


def test_scaler_that_starts_too_high_is_no_failure(videos, tmp_path):
    """16-mixed with a factor that overflows at first: the steps are left out, the factor falls, the run goes on."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23, growth_interval=1000)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    options = {"total_steps": 10, "batch_size": 1, "frames": 2}
    launch(fabric, train.setup, settings_of(videos, tmp_path, **options))
    end = checkpoint(tmp_path, 10)
    assert "skipped" not in (tmp_path / "train.log").read_text()
    left_out = 10 - end["ema"]["updates"]
    assert 5 < left_out < 10 and end["scaler"]["scale"] == 2.0 ** (23 - left_out)
    assert all(torch.isfinite(value).all() for value in tensors(end["model"]).values())


# --- data that is missing or broken -------------------------------------------------------------------------------


def failure(capsys: pytest.CaptureFixture, *words: str) -> str:
    """The one line on stderr of a command line that cannot be used."""
    with pytest.raises(SystemExit) as ended:
        utils.cli.run(train.main, list(words))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2 and len(lines) == 1
    return lines[0]


def test_missing_data_is_an_error_before_the_first_step(videos, tmp_path, capsys):
    words = command_line(videos, tmp_path / "run")
    line = failure(capsys, *words, "--data_root", str(tmp_path / "nowhere"))
    assert f"--data_root {tmp_path / 'nowhere'}: no such folder" in line
    line = failure(capsys, *words, "--datasets", "[davis2017]")
    assert str(videos / "DAVIS" / "JPEGImages" / "480p") in line and "<sequence>/<frame>.jpg" in line
    (tmp_path / "empty" / "JPEGImages").mkdir(parents=True)
    (tmp_path / "empty" / "Annotations").mkdir()
    line = failure(capsys, *words, "--data_root", str(tmp_path / "empty"))
    assert f"{tmp_path / 'empty' / 'Annotations'}: no sequence; expected" in line
    assert not (tmp_path / "run").exists()


def test_a_batch_that_cannot_be_shared_out(videos, tmp_path, capsys):
    line = failure(capsys, *command_line(videos, tmp_path), "--accumulation", "3")
    assert "--batch_size 4 cannot be split over 1 processes with --accumulation 3: take 3 or 6" in line


@pytest.mark.filterwarnings("ignore:skipped")
def test_broken_files_end_the_run_with_one_line(videos, tmp_path, capsys):
    """A loader process finds out, and its error arrives like any other."""
    shutil.copytree(videos, tmp_path / "data")
    for image in (tmp_path / "data").rglob("*.jpg"):
        image.write_bytes(b"no picture")
    line = failure(capsys, *command_line(tmp_path / "data", tmp_path / "run"), "--workers", "1")
    assert "more than 20 files cannot be used, the last: " in line or "20 clips in a row" in line
    assert "Traceback" not in line and "DataLoader" not in line


# --- what is written ----------------------------------------------------------------------------------------------


def test_rows_pictures_and_configuration(videos, tmp_path, capsys):
    from PIL import Image

    folder = run(
        videos, tmp_path, total_steps=5, log_every=2, picture_every=2, val_datasets=OPTIONS["datasets"], val_every=3,
        val_clips=2, accumulation=2, batch_size=2,
    )  # fmt: skip
    table = rows(folder)
    assert [row["step"] for row in table] == ["2", "3", "4", "5"]
    assert [bool(row["val_loss"]) for row in table] == [False, True, False, True]
    for row in table:
        assert float(row["loss"]) > 0 and 0 <= float(row["iou"]) <= 1 and float(row["grad_norm"]) > 0
    with open(folder / "metrics.csv", newline="") as file:
        assert all(float(row["samples_per_s"]) > 0 for row in csv.DictReader(file))
    assert len([line for line in capsys.readouterr().out.splitlines() if re.match(r"step \d/5 .* left$", line)]) == 4
    assert len(re.findall(r"step \d/5 ", (folder / "train.log").read_text())) == 4
    pictures = sorted((folder / "pictures").iterdir())
    assert [path.name for path in pictures] == ["step_000002.png", "step_000004.png"]
    assert Image.open(pictures[0]).size == (3 * 33, 33)  # the clips of the last pass
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (written["crop"], written["lr_min"], written["total_steps"]) == ([33, 33], 1e-5, 5)
    parsed = utils.cli._parse(train.main, ["--config", str(folder / "config.yaml")])
    assert parsed.pop("debug") is False and set(parsed) == set(written)


def test_learning_curve(straight, tmp_path):
    from PIL import Image

    from utils.plots import learning_curve

    learning_curve(straight, tmp_path / "curve.png")
    assert np.asarray(Image.open(tmp_path / "curve.png")).std() > 5
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    with pytest.raises(InputError, match="metrics.csv: no such file; RUN_DIR must be"):
        learning_curve(tmp_path, tmp_path / "other.png")


def test_wandb_offline_without_a_key(videos, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"total_steps": 4, "batch_size": 1, "log_every": 1, "picture_every": 4, "logger": "wandb"}
    folder = run(videos, tmp_path / "run", **options, stop_after=0.0)
    run(videos, folder, **options)
    offline = list((folder / "wandb").glob("offline-run-*"))
    identity = (folder / "wandb_id.txt").read_text()
    assert offline and all(path.name.endswith(identity) for path in offline)  # a resumed job is the same run
    assert len(rows(folder)) == 4


def test_wandb_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    from utils.wandb_run import WandbRun

    monkeypatch.setenv("WANDB_API_KEY", "no key of theirs")
    run = WandbRun(tmp_path, {})
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("wandb is off from here: ")]
    assert len(lines) == 1


def test_time_left_comes_from_recent_steps(monkeypatch):
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    progress = Progress(500, 1000, window=50, show=False)
    assert progress.eta() == "?"
    for seconds in [60, 60, 60, *[4] * 100, *[2] * 50]:  # three slow steps after a resume, then two paces
        clock += seconds
        progress.step()
        assert progress.eta() in ("?", *[f"0:{s // 60:02}:{s % 60:02}" for s in range(3600)])
    assert (progress.done, progress.eta()) == (653, "0:11:34")  # 347 steps of 2 s
    for _ in range(347):
        progress.step()
    assert progress.eta() == "0:00:00"
    progress.close()
