import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.errors import InputError
from utils.fabric import launch, make_fabric, parse_devices, place

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
FABRIC_RUN = [str(Path(sys.executable).with_name("fabric")), "run", "--devices", "2"]

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from utils.cli import run

def main(devices: int | str | list[int] = "auto", num_nodes: int = 1, fail: int = -1, debug: bool = False):
    from utils.fabric import launch, make_fabric
    launch(make_fabric("cpu", devices, num_nodes=num_nodes), work, fail)

def work(fabric, fail):
    import torch
    if fabric.global_rank == fail:
        raise ValueError("on purpose")
    total = fabric.all_reduce(torch.tensor(10.0 + fabric.global_rank), reduce_op="sum")
    with open(f"rank_{{fabric.global_rank}}", "x") as file:
        file.write(f"{{fabric.world_size}} {{total:.0f}}")

if __name__ == "__main__":
    run(main)
"""


def start(folder: Path, command: list[str], *options: str, **variables: str) -> tuple[int, str, dict[int, str]]:
    """Run the script above with `command`; its exit status, its stderr and what each rank wrote."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    done = subprocess.run(
        [*command, str(script), *options],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr, {int(p.name[5:]): p.read_text() for p in folder.glob("rank_*")}


@pytest.mark.parametrize(
    ("devices", "accelerator", "result"),
    [
        ("auto", "auto", ("auto", "auto")),
        ("1", "auto", (1, "auto")),
        (4, "cpu", (4, "cpu")),
        ("2,3", "auto", ([2, 3], "auto")),
        ("[0, 1]", "cuda", ([0, 1], "cuda")),
        ([0, 1], "gpu", ([0, 1], "gpu")),
        ("1,", "auto", ([1], "auto")),
        ("cuda:1", "auto", ([1], "cuda")),
        ("cuda:1", "gpu", ([1], "cuda")),
        ("cuda:2,0", "cuda", ([2, 0], "cuda")),
        ("cuda", "auto", ("auto", "cuda")),
        ("mps:0", "auto", ([0], "mps")),
        ("cpu", "auto", ("auto", "cpu")),
    ],
)
def test_forms_of_devices(devices, accelerator, result):
    assert parse_devices(devices, accelerator) == result


@pytest.mark.parametrize(
    ("devices", "accelerator"),
    [
        (0, "auto"),
        ("0", "cuda"),
        ([], "auto"),
        ("", "auto"),
        (-1, "auto"),
        ("-1", "auto"),
        (1.5, "auto"),
        (True, "auto"),
        (None, "auto"),
        ("two", "auto"),
        ("cuda:", "cpu"),
        ("cuda:1", "cpu"),
        ("cpu", "gpu"),
        ("cpu", "cuda"),
        ("mps", "cuda"),
        ("0,0", "auto"),
        ([1, 1], "cuda"),
        ("cuda:1,1", "auto"),
        ("cuda:x", "auto"),
        ("0,cuda:1", "auto"),
        ("1", "tpu"),
        ("1", ""),
    ],
)
def test_refused_devices(devices, accelerator):
    with pytest.raises(InputError, match="--devices|--accelerator"):
        parse_devices(devices, accelerator)


@given(
    st.integers() | st.text() | st.lists(st.integers(-1, 9), max_size=4) | st.from_regex(r"(cuda:)?[0-9,]{1,6}"),
    st.sampled_from(["auto", "cpu", "cuda", "gpu", "mps"]),
)
def test_parsed_devices_parse_to_themselves(devices, accelerator):
    try:
        parsed = parse_devices(devices, accelerator)
    except InputError:
        return
    assert parse_devices(*parsed) == parsed
    assert parsed[0] == "auto" or isinstance(parsed[0], int | list)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": "cuda:99"},
        {"devices": [0, 99]},
        {"devices": "99,"},
        {"accelerator": "cuda", "devices": 99},
        {"accelerator": "cpu", "devices": [0, 1]},
    ],
)
def test_absent_device_is_refused_with_those_there_are(options):
    with pytest.raises(InputError, match="this machine has only .*cpu"):
        make_fabric(**options)


@pytest.mark.parametrize("options", [{"strategy": "dpp"}, {"precision": "8-mixed"}, {"num_nodes": 0}])
def test_values_that_fabric_does_not_know(options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"--{name} {value}.*: "):
        make_fabric("cpu", **options)


def test_single_cpu_run():
    fabric = make_fabric("cpu")
    assert (fabric.world_size, fabric.device.type, fabric.strategy.precision.precision) == (1, "cpu", "32-true")
    assert launch(fabric, lambda fabric, x: (type(fabric.global_rank), x), 5) == (int, 5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_off_cuda_is_32_true_with_one_warning(precision):
    with pytest.warns(UserWarning) as caught:
        fabric = make_fabric("cpu", precision=precision, training=True)
    assert fabric.strategy.precision.precision == "32-true"
    assert [precision in str(warning.message) for warning in caught] == [True]


def test_bf16_weights_on_a_cpu_that_lacks_the_instructions():
    has = any(there for name, there in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    with warnings.catch_warnings(record=True) as caught:
        fabric = make_fabric("cpu", precision="bf16-true")
    model = place(fabric, torch.nn.Linear(2, 2))
    assert model.weight.dtype == (torch.bfloat16 if has else torch.float32)
    assert has or ["no instructions" in str(warning.message) for warning in caught] == [True]


def test_place_leaves_the_given_model_as_it_is():
    model = torch.nn.Linear(2, 2)
    assert place(make_fabric("cpu", precision="64-true"), model).weight.dtype == torch.float64
    assert model.weight.dtype == torch.float32
    assert place(make_fabric("cpu"), model) is model


def test_other_precisions_stay_as_asked():
    assert make_fabric("cpu", precision="64-true").strategy.precision.precision == "64-true"


@pytest.mark.gpu
def test_automatic_precision_on_cuda():
    mixed = "bf16-mixed" if torch.cuda.get_device_capability(0) >= (8, 0) else "16-mixed"
    assert make_fabric(devices="cuda:0", training=True).strategy.precision.precision == mixed
    assert make_fabric(devices="cuda:0").strategy.precision.precision == "32-true"


def rank_and_world(fabric) -> tuple[int, int]:
    return fabric.global_rank, fabric.world_size


@pytest.mark.filterwarnings("error")
def test_runs_after_each_other_in_one_process():
    for devices in (2, 1, 2):
        fabric = make_fabric("cpu", devices, strategy="ddp_fork" if devices == 2 else "auto")
        assert launch(fabric, rank_and_world) == (0, devices)


def test_leftovers_of_a_launcher_change_nothing(monkeypatch):
    monkeypatch.delenv("VOS_PARENT_PID", raising=False)  # set by whatever made a Fabric here before
    leftovers = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    for name, value in (leftovers | {"LT_DEVICES": "3", "LT_CLI_USED": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        fabric = make_fabric("cpu")
    assert (fabric.world_size, fabric.global_rank) == (1, 0)
    assert launch(fabric, lambda fabric: "done") == "done"


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 3}, {"devices": 2, "num_nodes": 2}])
def test_slurm_that_started_another_number(monkeypatch, options):
    for name, value in {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    with pytest.raises(InputError, match="SLURM started"):
        make_fabric("cpu", **options)
    assert make_fabric("cpu").world_size == make_fabric("cpu", devices=2).world_size == 2
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert make_fabric("cpu").world_size == 1


def two_ranks(rank: int, world_size: int) -> tuple:
    fabric = make_fabric("cpu")

    def work(fabric):
        return fabric.global_rank, fabric.world_size, fabric.all_reduce(torch.ones(3) * rank, reduce_op="sum")

    return launch(fabric, work)


def test_launcher_gives_the_number_of_processes(gloo_pool):
    for _ in range(2):  # the group is the launcher's and stays after a run
        for rank, (global_rank, world_size, total) in enumerate(gloo_pool.run(two_ranks)):
            assert (global_rank, world_size) == (rank, 2) and total.tolist() == [1, 1, 1]


def with_options_of_fabric_run(rank: int, world_size: int, own: dict, given: dict) -> tuple:
    os.environ |= {"LT_CLI_USED": "1"} | given
    try:
        fabric = make_fabric(**own)
        return launch(fabric, lambda fabric: (fabric.world_size, fabric.strategy.precision.precision))
    finally:
        for name in ("LT_CLI_USED", *given):
            del os.environ[name]


def test_options_of_fabric_run_count_as_own(gloo_pool):
    given = {"LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_PRECISION": "64-true"}
    for own in ({}, {"devices": 2}, {"accelerator": "cpu", "precision": "64-true"}):
        assert gloo_pool.run(with_options_of_fabric_run, own, given) == [(2, "64-true")] * 2
    for own in ({"devices": 3}, {"precision": "32-true"}, {"accelerator": "cuda"}):
        with pytest.raises(RuntimeError, match="InputError: --"):
            gloo_pool.run(with_options_of_fabric_run, own, given)


def rank_one_dies(rank: int, world_size: int) -> None:
    if rank:
        os._exit(3)
    torch.distributed.barrier()


def test_pool_survives_a_process_that_dies(gloo_pool):
    with pytest.raises(RuntimeError, match="rank 1: the process ended"):
        gloo_pool.run(rank_one_dies)
    assert [world_size for _, world_size, _ in gloo_pool.run(two_ranks)] == [2, 2]


def test_python_starts_two_ranks_among_leftovers(tmp_path):
    status, err, ranks = start(
        tmp_path,
        PYTHON,
        "--devices",
        "2",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        MASTER_ADDR="192.0.2.1",
        MASTER_PORT="1",
    )
    assert (status, ranks) == (0, {0: "2 21", 1: "2 21"}), err


def test_torchrun_starts_two_ranks(tmp_path):
    status, err, ranks = start(tmp_path, TORCHRUN)
    assert (status, ranks) == (0, {0: "2 21", 1: "2 21"}), err


def test_fabric_run_starts_two_ranks(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # the command's own port is the same for everybody
    status, err, ranks = start(tmp_path, [*FABRIC_RUN, "--main-port", str(port)])
    assert (status, ranks) == (0, {0: "2 21", 1: "2 21"}), err


def test_torchrun_against_devices_is_an_error_and_no_run(tmp_path):
    status, err, ranks = start(tmp_path, TORCHRUN, "--devices", "1")
    assert status != 0 and ranks == {}
    assert "error: --devices 1 is 1 process(es), but torchrun started 2" in err


def test_rank_that_fails_fails_the_run(tmp_path):
    status, err, ranks = start(tmp_path, PYTHON, "--devices", "2", "--fail", "1")
    assert status != 0 and ranks == {}
    assert "ValueError: on purpose" in err


def test_no_other_file_chooses_a_device():
    choice = re.compile(
        r"""\.cuda\(|torch\.cuda\.set_device|torch\.device\(\s*f?["']cuda|["']cuda:["'{]|\brank\b[^=,(]*=\s*None"""
        r"""|environ.*["'](RANK|LOCAL_RANK|WORLD_SIZE|LT_\w+|CUDA_VISIBLE_DEVICES)"""
    )
    files = [path for path in ROOT.rglob("*.py") if "site-packages" not in path.parts]
    home = ROOT / "utils/fabric.py"
    assert home in files and all(
        choice.search(line)
        for line in (
            "x.cuda()",
            "torch.cuda.set_device(0)",
            'torch.device("cuda")',
            'f"cuda:{i}"',
            "def f(rank=None):",
            "rank: int | None = None",
            'os.environ["LOCAL_RANK"]',
            "os.environ.get('WORLD_SIZE')",
        )
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in set(files) - {home, Path(__file__), ROOT / "tests/conftest.py"}
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if choice.search(line)
    ]
    assert not found
