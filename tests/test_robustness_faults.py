"""Runs that are hit while they go: killed, interrupted, out of disk, out of data. What is left, and whether it goes on.

Every run is a process of its own, forked from a server that has everything imported, in a group of its own. It must end
within a minute, leave no process, nothing that looks complete and is not, and a state from which the same command goes
on to the same result.
"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from robustness import count
from safetensors.torch import load_file
from test_robustness_data import write_data
from training_cases import OPTIONS, command_line, write_videos

from data.labels import read_label_png
from data.video import open_frames
from models import build_model
from utils.checkpoint import save_weights
from utils.cli import run

SECONDS = 60  # for a run to end that was hit
PATIENCE = 300  # for one that goes to its own end, on a machine with other work
ROOT = Path(__file__).resolve().parents[1]


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A campaign of few cases always, and of many among the slow tests."""
    return pytest.mark.parametrize("cases", [short, pytest.param(long, marks=pytest.mark.slow)])


# --- runs ---------------------------------------------------------------------------------------------------------


def work(script: str, words: list[str], output: Connection, file_size: int | None) -> None:
    import importlib

    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    torch.set_num_threads(1)
    run(importlib.import_module(script).main, words)


class Run:
    """A script in a process of its own."""

    def __init__(self, context, script: str, words: list[str], file_size: int | None = None):
        self.start, self._printed = time.monotonic(), bytearray()
        self._pipe, output = context.Pipe(duplex=False)  # a file would be limited like all others
        words = [str(word) for word in words]
        self.process = context.Process(target=work, args=(script, words, output, file_size))
        self.process.start()
        output.close()
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while data := os.read(self._pipe.fileno(), 2**16):
            self._printed += data
        self._pipe.close()

    def log(self) -> str:
        """What it has printed."""
        return self._printed.decode(errors="replace")

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition() and self.process.is_alive():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def end(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Exit status and what was printed, of a run that must end in time with its whole group."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.log()[-2000:]}"
        deadline = time.monotonic() + SECONDS
        while group := members(self.pid):
            assert time.monotonic() < deadline, f"left behind: {group}"
            time.sleep(0.02)
        self._reader.join()
        return self.process.exitcode, self.log()

    def kill(self) -> None:
        for pid in members(self.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.join()


def members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
        except OSError:
            pass
    return found


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Run]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))  # the server looks nowhere else
        ready = context.Process(target=os.getpid)  # returns when the imports are done
        ready.start()
    ready.join()

    def start(script: str, words: list[str], file_size: int | None = None) -> Run:
        runs.append(Run(context, script, words, file_size))
        return runs[-1]

    yield start
    for one in runs:
        one.kill()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos to train on, a benchmark, a clip of 40 frames and weights."""
    folder = tmp_path_factory.mktemp("place")
    write_videos(folder / "videos")
    write_data(folder / "benchmark", "folder")
    (folder / "clip").mkdir()
    frames = sorted((folder / "benchmark/JPEGImages/cat").iterdir())
    for t in range(40):
        shutil.copy(frames[t % 4], folder / f"clip/{t:05}.png")
    torch.manual_seed(0)
    save_weights(build_model("aott", encoder=OPTIONS["encoder"]), folder / "w.safetensors")
    return folder


def words(script: str, place: Path, out: Path) -> list[str]:
    if script == "train":
        return command_line(place / "videos", out, save_every=2)
    common = ["--checkpoint", place / "w.safetensors", "--output_dir", out, "--accelerator", "cpu"]
    if script == "eval":
        return [*common, "--data_root", place / "benchmark", "--dataset", "folder", "--threads", 1]
    return [*common, "--input", place / "clip", "--mask", place / "benchmark/Annotations/cat/00000.png"]


def results(script: str, out: Path) -> dict[str, object]:
    """What a finished run came to."""
    if script == "train":
        weights = load_file(out / "checkpoints/ema_6.safetensors")
        return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
    if script == "eval":
        return {name: (out / name).read_bytes() for name in ("scores.json", "per_object.csv", "submission.zip")}
    summary = json.loads((out / "summary.json").read_text())
    masks = {path.name: read_label_png(path).tobytes() for path in (out / "masks").iterdir()}
    return {"frames": summary["frames"], "video": sum(1 for _ in open_frames(out / "overlay.mp4"))} | masks


@pytest.fixture(scope="module")
def expected(start, place, tmp_path_factory) -> dict[str, tuple[dict, float]]:
    """Results of runs that nothing hits, and the seconds they took."""
    found = {}
    for script in ("train", "eval", "demo"):
        out = tmp_path_factory.mktemp(script) / "out"
        undisturbed = start(script, words(script, place, out))
        assert undisturbed.end(PATIENCE)[0] == 0, undisturbed.log()
        found[script] = results(script, out), time.monotonic() - undisturbed.start
    return found


def check_left(script: str, out: Path, finished: bool) -> None:
    """That everything under its final name is whole, and nothing says that an unfinished run is done."""
    from utils.run_folder import _is_whole

    for path in out.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(out).parts):
            continue
        if path.suffix == ".png":
            read_label_png(path)
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix in (".ckpt", ".zip"):
            assert _is_whole(path), path
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.name == "overlay.mp4":
            assert sum(1 for _ in open_frames(path)) == 40
    last = {"train": "checkpoints/step_6.ckpt", "eval": "scores.json", "demo": "summary.json"}[script]
    assert (out / last).exists() or not finished


def check_message(log: str, status: int) -> None:
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in log, log[-3000:]
    assert len(lines) == 1 and len(lines[0]) < 1000, (status, log[-3000:])


# --- signals ------------------------------------------------------------------------------------------------------


@sizes(1, 8)
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("script", ["train", "eval", "demo"])
def test_signals_at_any_moment(start, place, expected, tmp_path, script, number, cases) -> None:
    """To the whole group, as Ctrl-C and schedulers send them; the folder is used again after each."""
    rng, out = np.random.default_rng([number, cases]), tmp_path / "out"
    result, seconds = expected[script]
    for case in range(cases):
        moment = float(rng.uniform(0, seconds))
        one = start(script, words(script, place, out) + (["--workers", "1"] if script == "train" and case % 2 else []))
        one.process.join(moment)
        for pid in members(one.pid):
            os.kill(pid, number)
        status, log = one.end()
        assert status in (0, 130 if number == signal.SIGINT else -number), log
        assert "Traceback" not in log, log
        check_left(script, out, finished=status == 0 and script != "train")
        count(f"{number.name} at any moment, {script}", moment, {0: "finished or saved"}.get(status, "stopped"))
    again = start(script, words(script, place, out))
    assert again.end(PATIENCE)[0] == 0, again.log()
    assert results(script, out) == result
    assert not [path for path in out.rglob("*") if path.name.endswith(".partial")]


# --- disk ---------------------------------------------------------------------------------------------------------


@sizes(2, 6)
@pytest.mark.parametrize("script", [pytest.param("train", marks=pytest.mark.slow), "eval", "demo"])
def test_files_cannot_grow(start, place, expected, tmp_path, script, cases) -> None:
    """Writing fails at some size of a file, from the first byte on to the largest file."""
    largest = {"train": 3_000_000, "eval": 5000, "demo": 20_000}[script]
    out = tmp_path / "out"
    for limit in np.unique(np.geomspace(150, largest, cases).astype(int)).tolist():
        one = start(script, words(script, place, out), file_size=limit)
        status, log = one.end(PATIENCE)
        assert status in (0, 1, 2), log
        if status:
            check_message(log, status)
        check_left(script, out, finished=status == 0)
        count(f"file size limit, {script}", limit, "finished" if status == 0 else "one line")
    again = start(script, words(script, place, out))
    assert again.end(PATIENCE)[0] == 0, again.log()
    assert results(script, out) == expected[script][0]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory, of a size or read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", folder], capture_output=True)


@sizes(2, 6)
@pytest.mark.parametrize("script", ["train", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eval", "demo"))])
def test_full_disk(start, place, expected, small_disk, script, cases) -> None:
    """A disk that fills at some moment, and is given room afterwards."""
    largest = {"train": 24_000, "eval": 60, "demo": 250}[script]
    disk = small_disk("size=4k")
    for kilobytes in np.unique(np.geomspace(8, largest, cases).astype(int)).tolist():
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)
        one = start(script, words(script, place, disk / "out"))
        status, log = one.end(PATIENCE)
        assert status in (0, 1, 2), log
        if status:
            check_message(log, status)
        check_left(script, disk / "out", finished=status == 0)
        count(f"full disk, {script}", kilobytes, "finished" if status == 0 else "one line")
    subprocess.run(["mount", "-o", "remount,size=400m", disk], check=True)
    again = start(script, words(script, place, disk / "out"))
    assert again.end(PATIENCE)[0] == 0, again.log()
    assert results(script, disk / "out") == expected[script][0]


@pytest.mark.parametrize("script", ["train", "eval", "demo"])
def test_output_folder_that_cannot_be_written(start, place, small_disk, tmp_path, script) -> None:
    (tmp_path / "file").write_text("mine")
    folders = {"below a file": tmp_path / "file/out", "a file": tmp_path / "file", "of the kernel": Path("/proc/out")}
    folders["read-only"] = small_disk("ro,size=1m") / "out"
    for name, out in folders.items():
        status, log = start(script, words(script, place, out)).end(PATIENCE)
        assert status == 2, log
        check_message(log, status)
        assert str(out) in log
        count(f"output folder, {script}", name, "one line")
    assert (tmp_path / "file").read_text() == "mine"


# --- data and helpers that go away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["eval", "demo"])
def test_frames_that_vanish(start, place, tmp_path, script) -> None:
    data = tmp_path / "data"
    shutil.copytree(place, data)
    command, out = words(script, data, tmp_path / "out"), tmp_path / "out"
    victim = data / ("clip/00035.png" if script == "demo" else "benchmark/JPEGImages/dog/00003.png")
    one = start(script, command)
    one.wait_for(lambda: any(out.rglob("*.png")))
    victim.unlink()
    status, log = one.end()
    if status:  # else it had been read
        assert status == 2 and str(victim) in log
        check_message(log, status)
        check_left(script, out, finished=False)
        assert not (out / "summary.json").exists() and not (out / "scores.json").exists()
    count(f"frames that vanish, {script}", victim.name, "one line" if status else "finished")


def test_videos_that_vanish_in_training(start, place, tmp_path) -> None:
    shutil.copytree(place / "videos", tmp_path / "videos")
    command = command_line(tmp_path / "videos", tmp_path / "out", total_steps=10**6, log_every=1)
    one = start("train", command)
    one.wait_for((tmp_path / "out/metrics.csv").exists)
    shutil.rmtree(tmp_path / "videos")
    status, log = one.end()
    assert status == 2 and f"{tmp_path / 'videos'}" in log
    assert "more than 20 files cannot be used" in log or "no such file" in log.lower()
    count("data that vanish, train", "videos", "one line")


@sizes(1, 4)
def test_loader_that_is_killed(start, place, tmp_path, cases) -> None:
    for case in range(cases):
        out = tmp_path / str(case)
        one = start("train", [*command_line(place / "videos", out, total_steps=10**6, log_every=1), "--workers", "2"])
        one.wait_for(lambda out=out: (out / "metrics.csv").exists())
        victim = one.children()[case % 2]
        os.kill(victim, signal.SIGKILL)
        status, log = one.end()
        assert status == 1
        check_message(log, status)
        check_left("train", out, finished=False)
        count("killed loader, train", case, "one line")


@sizes(1, 3)
@pytest.mark.parametrize("script", [pytest.param("train", marks=pytest.mark.slow), "eval"])
def test_main_process_killed_while_others_start(place, tmp_path, script, cases) -> None:
    """The other ranks import for seconds: they must not take themselves for a run of their own, and not stay."""
    rng = np.random.default_rng(0)
    for case in range(cases):
        command = [*words(script, place, tmp_path / str(case)), "--devices", "2"]
        process = subprocess.Popen(
            [sys.executable, f"{script}.py", *map(str, command)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 2 * SECONDS
            while len(members(process.pid)) < 2 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 1)) if case else 0)
            process.kill()
            process.wait()
            deadline = time.monotonic() + SECONDS
            while members(process.pid):
                assert time.monotonic() < deadline, "the other rank stays"
                time.sleep(0.05)
        finally:
            for pid in members(process.pid):
                os.kill(pid, signal.SIGKILL)
        assert not list((tmp_path / str(case)).rglob("scores.json"))
        count(f"main process killed at the start, {script}", case, "all ended")
