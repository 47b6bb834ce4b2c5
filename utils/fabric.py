"""The one place where a device, a number of processes or a precision is chosen."""

import os
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from utils.errors import InputError
from utils.heap import keep_freed_blocks

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch import nn

Devices = int | str | list[int]


def parse_devices(devices: Devices, accelerator: str = "auto") -> tuple[Devices, str]:
    """Read the two options that name devices; looks at nothing but its arguments.

    Args:
        devices: "auto", a count (2, "2"), indices ([0, 1], "[0,1]", "0,1", "1,"), or a kind alone or with indices
            ("cuda", "cuda:1", "cuda:0,1").
        accelerator: auto, cpu, cuda, mps, or gpu for whichever of the last two there is.

    Returns:
        (devices, accelerator), devices being "auto", a count or a list of indices; passed in again they come back
        unchanged.

    Raises:
        InputError: none of these forms, no device at all, an index twice, or a kind that is not the accelerator's.
    """
    if accelerator not in ("auto", "cpu", "cuda", "gpu", "mps"):
        raise InputError(f"--accelerator {accelerator}: must be auto, cpu, cuda (gpu) or mps")
    kind, text = re.fullmatch(r"(?:(cpu|cuda|mps)(?::|$))?(.*)", re.sub(r"\s", "", str(devices)).lower()).groups()
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if text == "auto" or (kind and not text):
        parsed = "auto"
    elif text.isdecimal() and not kind:
        parsed = numbers[0]
    else:
        parsed = numbers if re.fullmatch(r"\[\d+(,\d+)*\]|\d+(,\d+)*,?", text) else None
    if not parsed or len(set(numbers)) < len(numbers):
        raise InputError(f"--devices {devices}: must be auto, a count, indices such as 0,1 (each once) or cuda:1")
    if kind and accelerator not in ("auto", kind, "cpu" if kind == "cpu" else "gpu"):
        raise InputError(f"--devices {devices} contradicts --accelerator {accelerator}; leave one of them at auto")
    return parsed, kind or accelerator


def make_fabric(
    accelerator: str = "auto",
    devices: Devices = "auto",
    strategy: str = "auto",
    precision: str = "auto",
    num_nodes: int = 1,
    training: bool = False,
) -> "Fabric":
    """The Fabric object of a run, started by `python`, `torchrun`, `fabric run` or SLURM. Follow it with `launch`.

    Args:
        accelerator: see `parse_devices`; auto takes a GPU where there is one.
        devices: see `parse_devices`; per node. Auto means what a launcher started, else all GPUs, else one CPU process.
        strategy: one of Fabric's names (ddp, fsdp, dp, ...) or auto.
        precision: one of Fabric's names or auto: mixed on CUDA when `training` (bf16 where the device computes in it,
            else fp16), 32-true otherwise. Mixed precision off CUDA becomes 32-true, with a warning, and so does
            bf16-true on a CPU without instructions for it.
        num_nodes: number of machines; 1 takes the launcher's number.
        training: whether the run trains.

    Raises:
        InputError: a device that is not there, options that contradict each other or the launcher, an unknown name.
    """
    _ignore_leftovers(num_nodes)  # before the import, which takes RANK for the rank that prints
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.rank_zero import rank_zero_only

    options = {"accelerator": accelerator, "strategy": strategy, "devices": devices, "precision": precision}
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LT_CLI_USED") == "1":  # `fabric run` is torchrun + LT_*
        for name, value in options.items():
            given = os.environ.get(f"LT_{name.upper()}", str(value))
            if value == "auto":
                options[name] = given
            elif given != str(value) and name != "devices":  # its count of devices is the number it started
                raise InputError(f"--{name} {value} contradicts --{name} {given} of fabric run; give one of them")
    options["devices"], options["accelerator"] = parse_devices(options["devices"], options["accelerator"])
    options["num_nodes"] = num_nodes
    _agree_with_launcher(options)
    indices = _choose_device(options)
    asked = options["precision"]
    options["precision"] = _choose_precision(asked, options["accelerator"], indices, training)
    try:
        with _without("LT_"):  # these variables, read above, would win over the arguments
            fabric = Fabric(**options)
    except Exception as error:  # the constructor starts nothing: what fails is a combination of options
        raise InputError(" ".join(f"--{name} {value}" for name, value in options.items()) + f": {error}") from error
    rank_zero_only.rank = fabric.global_rank
    if fabric.device.type == "cpu":
        keep_freed_blocks()
    if fabric.global_rank == 0 and asked not in ("auto", options["precision"]):
        lacking = "this CPU has no instructions for it" if asked == "bf16-true" else "is for CUDA"
        warnings.warn(f"--precision {asked}: {lacking}; {options['accelerator']} computes in 32-true", stacklevel=2)
    return fabric


def device_choices() -> dict[str, str]:
    """What `devices` of `make_fabric` may name on this machine for a single device, with what a person calls it."""
    import torch

    gpus = {f"cuda:{i}": f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())}
    return {"cpu": "CPU"} | gpus | ({"mps": "Apple GPU"} if torch.backends.mps.is_available() else {})


def place(fabric: "Fabric", model: "nn.Module") -> "nn.Module":
    """The model on the run's device; a copy where the precision is one of the weights (bf16-true, 64-true, ...)."""
    precision = fabric.strategy.precision
    if precision.precision.endswith("-true") and precision.precision != "32-true":
        model = precision.convert_module(deepcopy(model))
    return fabric.to_device(model)


def launch(fabric: "Fabric", fn: Callable, *args: Any) -> Any:
    """Run `fn(fabric, *args)` in every process of the run and return its result; after it they no longer communicate.

    Processes that Fabric started end with this one: they are stopped when `fn` fails here, and waited for otherwise.

    Raises:
        RuntimeError: another process of this node failed.
    """
    import torch.distributed as dist

    others = getattr(fabric.strategy.launcher, "procs", [])
    try:
        with _without("LT_CLI_USED"):  # with it Fabric refuses to launch; torchrun's rules are the right ones here
            result = fabric.launch(_run, fn, args, dist.is_initialized())
    except BaseException:
        _stop(others)
        raise
    for rank, process in enumerate(others, start=1):
        if process.wait() != 0:
            raise RuntimeError(f"the process of local rank {rank} ended with status {process.returncode}")
    return result


def processes_to_start(
    accelerator: str = "auto", devices: Devices = "auto", strategy: str = "auto", num_nodes: int = 1, **_: Any
) -> int:
    """How many processes a call from Python has to start, for the options of `make_fabric`.

    1: none, the calling process does the work: for one device, and under a launcher, whose group it then joins.

    Raises:
        InputError: as `make_fabric` for devices; several machines without a launcher.
    """
    options: dict[str, Any] = {"num_nodes": num_nodes}
    options["devices"], options["accelerator"] = parse_devices(devices, accelerator)
    indices = _choose_device(options)
    if _launcher() or strategy == "dp":
        return 1
    if num_nodes > 1:
        raise InputError(f"--num_nodes {num_nodes}: several machines need a launcher, torchrun or srun")
    return len(indices) or (1 if options["devices"] == "auto" else options["devices"])


def worker_variables(rank: int, processes: int) -> dict[str, str]:
    """The environment of one of several processes on this machine, as torchrun would make it, whatever is in here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LT_", "SLURM_NTASKS", "MASTER"))}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0}
    return (
        # Threads that wait actively would take the cores from each other as soon as they are shared.
        {"OMP_NUM_THREADS": str(max(1, cores // processes)), "OMP_WAIT_POLICY": "PASSIVE"}
        | kept
        | {"TORCHELASTIC_RUN_ID": "vos"}
        | {name: str(value) for name, value in own.items()}
    )


def _run(fabric: "Fabric", fn: Callable, args: tuple, group_is_borrowed: bool) -> Any:
    import torch.distributed as dist

    try:
        result = fn(fabric, *args)
    except Exception as error:
        if fabric.world_size > 1 and not isinstance(error, InputError):  # which rank failed first, and where
            text = "".join(traceback.format_exception(error))
            sys.stderr.write("".join(f"[rank {fabric.global_rank}] {line}\n" for line in text.splitlines()))
        raise
    if dist.is_initialized() and not group_is_borrowed:  # the threads of a group left open can abort the exit
        dist.destroy_process_group()
    return result


def end_together(fabric: "Fabric") -> None:
    """Of work in step: when a process that Fabric started ends with an error or is killed, all end within seconds.

    Those that torchrun or SLURM started are left to them. Without this a process that waits for a dead one could hang;
    Fabric's own observer kills the main process, whose exit status then is not 1.
    """
    others = getattr(fabric.strategy.launcher, "procs", [])
    if others:
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":
                thread._child_processes = []
        threading.Thread(target=_end_with_children, args=(others,), name="end-with-children", daemon=True).start()


def _end_with_children(others: list[subprocess.Popen]) -> None:
    while not (failed := [process for process in others if process.poll()]):
        time.sleep(0.5)
    time.sleep(10)  # this process usually fails by itself, with a message, where it waits for the dead one
    _stop(others)
    sys.stderr.write(f"error: the process {failed[0].pid} of this run ended with status {failed[0].returncode}\n")
    os._exit(1)


def _end_with_parent(parent: int) -> None:
    """From here on this rank ends when the process that started it does, also while it waits to meet it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if not any(thread.name == "end-with-parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _stop(processes: list[subprocess.Popen]) -> None:
    """Terminate processes, and kill those that wait for something that will not come."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()


def _launcher() -> tuple[str, int, int] | None:
    """(name, processes on this node, nodes) of what started this process as one of several, None without it."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        local = int(env["LOCAL_WORLD_SIZE"])
        return "torchrun", local, int(env["WORLD_SIZE"]) // local
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        tasks, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", 1))
        return "SLURM", int(env.get("SLURM_NTASKS_PER_NODE", tasks // nodes)), nodes
    return None


def _ignore_leftovers(num_nodes: int) -> None:
    """Drop what another run's launcher left in this shell: Fabric would wait for ranks that nobody starts."""
    env = os.environ
    is_rank, parent = env.get("LOCAL_RANK", "0") != "0", env.get("VOS_PARENT_PID", "")
    if _launcher():
        return
    if is_rank and parent == str(os.getppid()):
        _end_with_parent(os.getppid())
        return
    # Who takes over orphans need not be process 1; but they stay in the group of a parent that led one.
    orphan = parent.isdecimal() and int(parent) > 0 and (os.getppid() == 1 or os.getpgrp() == int(parent))
    if is_rank and orphan and not os.path.exists(f"/proc/{parent}"):
        # Killed while this one was still importing: alone it would take itself for a run and start ranks of its own.
        raise InputError("the process that started this one as a part of its run has ended")
    stale = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    if num_nodes == 1:  # several machines without a launcher are joined by these
        stale += ["NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    dropped = [name for name in stale if env.pop(name, None) is not None]
    if dropped and env.get("VOS_PARENT_PID") != str(os.getpid()):  # else they are from an earlier launch in here
        warnings.warn(f"no launcher started this process: its {', '.join(dropped)} are ignored", stacklevel=3)
    env["VOS_PARENT_PID"] = str(os.getpid())  # tells the ranks that Fabric starts from here that they are its own


def _agree_with_launcher(options: dict[str, Any]) -> None:
    """Fill in the processes a launcher has started; two counts would be two runs that write the same files."""
    if (launcher := _launcher()) is None:
        return
    name, local, nodes = launcher
    devices, num_nodes = options["devices"], options["num_nodes"]
    if options["strategy"] == "dp":  # one process drives all its devices
        processes = 1
    elif devices == "auto":
        processes = options["devices"] = local
    else:
        processes = devices if isinstance(devices, int) else len(devices)
    if processes != local:
        raise InputError(
            f"--devices {devices} is {processes} process(es), but {name} started {local} on this node; "
            f"leave --devices at auto, or start as many"
        )
    if num_nodes not in (1, nodes):
        raise InputError(f"--num_nodes {num_nodes}: {name} started this run on {nodes}; leave it out, or use as many")
    options["num_nodes"] = nodes


def _choose_device(options: dict[str, Any]) -> list[int]:
    """Settle the accelerator, see that its devices are there and return their indices (none for the CPU)."""
    from lightning_fabric.accelerators import CUDAAccelerator, MPSAccelerator

    present = {"cuda": CUDAAccelerator.auto_device_count(), "mps": int(MPSAccelerator.is_available())}
    asked, devices = options["accelerator"], options["devices"]
    if asked in ("auto", "gpu"):
        options["accelerator"] = next((kind for kind in present if present[kind]), "cpu" if asked == "auto" else "gpu")
    count = present.get(options["accelerator"], 0)
    if options["accelerator"] == "cpu":
        indices, there = [], not isinstance(devices, list)
    else:
        indices = devices if isinstance(devices, list) else list(range(count if devices == "auto" else devices))
        there = indices and max(indices) < count
    if not there:
        here = [f"{kind}:{index}" for kind in present for index in range(present[kind])] + ["cpu (takes a count)"]
        raise InputError(f"--accelerator {asked} --devices {devices}: this machine has only {', '.join(here)}")
    return indices


def _choose_precision(precision: str, accelerator: str, indices: list[int], training: bool) -> str:
    if accelerator == "cpu" and precision == "bf16-true" and not _cpu_computes_bf16():
        return "32-true"
    if accelerator != "cuda":
        return "32-true" if precision in ("auto", "16", "bf16", "16-mixed", "bf16-mixed") else precision
    if precision != "auto":
        return precision
    if not training:
        return "32-true"
    import torch

    computes_bf16 = all(torch.cuda.get_device_capability(index) >= (8, 0) for index in indices)
    return "bf16-mixed" if computes_bf16 else "16-mixed"


def _cpu_computes_bf16() -> bool:
    """Whether the CPU multiplies in bf16 itself; others imitate it, at a fraction of the speed of float32."""
    import torch

    return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


@contextmanager
def _without(prefix: str) -> Iterator[None]:
    """The environment without the variables whose names start with `prefix`."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefix)}
    try:
        yield
    finally:
        os.environ.update(hidden)
