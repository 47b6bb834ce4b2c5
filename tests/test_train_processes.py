"""train.py as several processes: every way to start them, to stop them, and what is left when one dies."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_cases import command_line, run, write_videos

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
FABRIC_RUN = [str(Path(sys.executable).with_name("fabric")), "run", "--accelerator", "cpu", "--devices", "2"]
STEPS = {"total_steps": 2, "save_every": 2}
ENDLESS = {"total_steps": 100000, "save_every": 100000, "log_every": 1, "batch_size": 2}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def start(tmp_path: Path):
    """Starts train.py in a process group of its own; whatever is left of it at the end is killed."""
    started: list[subprocess.Popen] = []

    def start(prefix: list[str], words: list[str], **variables: str) -> subprocess.Popen:
        separate = ["--"] if prefix and prefix[0] == FABRIC_RUN[0] else []
        command = [*(prefix or [sys.executable]), "train.py", *separate, *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | variables
        with open(tmp_path / f"stderr_{len(started)}", "w") as stderr:
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr, start_new_session=True)
            )
        started[-1].stderr_file = tmp_path / f"stderr_{len(started) - 1}"
        return started[-1]

    yield start
    for process in started:
        if group(process):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def group(process: subprocess.Popen) -> dict[int, int]:
    """The processes that `process` started and that are alive, itself among them, each with its parent."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, pgid, stat in rows if int(pgid) == process.pid and stat[0] != "Z"}


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for_steps(process: subprocess.Popen, folder: Path, count: int = 2) -> None:
    table = folder / "metrics.csv"

    def there() -> bool:
        assert process.poll() is None, process.stderr_file.read_text()[-3000:]
        return table.exists() and len(table.read_text().splitlines()) > count

    wait_for(there, 200)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


# --- starting -----------------------------------------------------------------------------------------------------


def two_ranks(rank: int, world_size: int, videos: Path, folder: Path) -> None:
    run(videos, folder, **STEPS)


@pytest.fixture(scope="module")
def expected(gloo_pool, videos, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of two ranks after two steps."""
    folder = tmp_path_factory.mktemp("expected")
    gloo_pool.run(two_ranks, videos, folder, timeout=600)
    return weights(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "ema_2.safetensors")


def assert_result(expected: dict[str, torch.Tensor], folder: Path, *processes: subprocess.Popen) -> None:
    for process in processes:
        assert process.wait(timeout=300) == 0, process.stderr_file.read_text()[-3000:]
    result = weights(folder)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[key], expected[key]) for key in expected)
    assert "on 2 x cpu" in (folder / "train.log").read_text()
    assert len((folder / "metrics.csv").read_text().splitlines()) == 2  # one row, of one run


@pytest.mark.slow
def test_torchrun(start, expected, videos, tmp_path):
    assert_result(expected, tmp_path, start([*TORCHRUN, "2"], command_line(videos, tmp_path, **STEPS)))


def test_torchrun_on_two_hosts(start, expected, videos, tmp_path):
    """Two agents at two addresses of the loopback device, one process each, and a folder they share."""
    words = [*command_line(videos, tmp_path, **STEPS), "--num_nodes", "2"]
    meeting = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    hosts = [
        start([*TORCHRUN, "1", *meeting, "--rdzv_id", "hosts", "--local_addr", address], words)
        for address in ("127.0.0.1", "127.0.0.2")
    ]
    assert_result(expected, tmp_path, *hosts)


@pytest.mark.slow
def test_fabric_run(start, expected, videos, tmp_path):
    prefix = [*FABRIC_RUN, "--main-port", free_port()]
    assert_result(expected, tmp_path, start(prefix, command_line(videos, tmp_path, **STEPS)))


@pytest.mark.slow
def test_slurm(start, expected, videos, tmp_path):
    common = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0", "NODELIST": "localhost"}
    common |= {"JOB_NAME": "train", "JOB_ID": "1"}
    tasks = [
        start(
            [],
            command_line(videos, tmp_path, **STEPS),
            MASTER_PORT=port,
            **{f"SLURM_{name}": value for name, value in (common | {"PROCID": rank, "LOCALID": rank}).items()},
        )
        for port in [free_port()]
        for rank in ("0", "1")
    ]
    assert_result(expected, tmp_path, *tasks)


@pytest.mark.parametrize("devices", ["99,", "0", "two", "cuda:99"])
def test_devices_that_are_not_there(devices, capsys, videos, tmp_path):
    import train
    import utils.cli

    with pytest.raises(SystemExit) as ended:
        utils.cli.run(train.main, [*command_line(videos, tmp_path), "--accelerator", "auto", "--devices", devices])
    lines = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(lines)) == (2, 1) and lines[0].startswith("error: ") and "--devices" in lines[0]


# --- ending -------------------------------------------------------------------------------------------------------


def test_two_runs_of_the_same_second(start, videos, tmp_path):
    """Two runs of two ranks each, among the variables of a launcher long gone, do not meet; both end without a rest.

    One gets a signal as from Ctrl-C in a terminal or from SLURM: ranks and loader processes get it at once. Of the
    other the main process is killed.
    """
    leftovers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    folders = [tmp_path / "stopped", tmp_path / "killed"]
    runs = [
        start([], [*command_line(videos, folder, **ENDLESS), "--devices", "2", "--workers", "1"], **leftovers)
        for folder in folders
    ]
    for process, folder in zip(runs, folders, strict=True):
        wait_for_steps(process, folder)
        assert "on 2 x cpu" in (folder / "train.log").read_text()
        assert len(group(process)) == 4
    assert steps(folders[0]) == steps(folders[1])

    stopped, killed = runs
    os.killpg(stopped.pid, signal.SIGTERM)
    killed.kill()
    assert stopped.wait(timeout=60) == 0, stopped.stderr_file.read_text()[-3000:]
    killed.wait()
    wait_for(lambda: not group(stopped) and not group(killed), 60)
    (saved,) = (folders[0] / "checkpoints").glob("step_*.ckpt")
    line = f"stopped after step {saved.stem.removeprefix('step_')} (SIGTERM); resume to go on"
    assert line in (folders[0] / "train.log").read_text()
    assert "Traceback" not in stopped.stderr_file.read_text()


def steps(folder: Path) -> list[dict[str, str]]:
    """What the first two steps came to, without the times."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "samples_per_s"} for row in csv.DictReader(file)][:2]


def test_rank_that_is_killed_ends_the_run(start, videos, tmp_path):
    process = start([], [*command_line(videos, tmp_path, **ENDLESS), "--devices", "2"])
    wait_for_steps(process, tmp_path)
    (other,) = [pid for pid, parent in group(process).items() if parent == process.pid]
    os.kill(other, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    assert not group(process)
    error = process.stderr_file.read_text()
    assert "[rank 0] " in error and "Traceback" in error and error.splitlines()[-1].startswith("error: ")
