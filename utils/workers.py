"""Several processes for one call from Python, started, heard and ended by the process that calls.

`run_workers` puts a specification into a temporary folder of its own and starts `python -m utils.workers` on it, once
for each process; the program that calls is not run again, so it may be a script, a notebook or a prompt. The workers
meet through a file in that folder, hence no port has to be free. Each has a socket to the caller: events, the result or
an error come up on it, and when the caller's end closes, the caller is gone and the worker ends too.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

from utils.errors import InputError
from utils.fabric import make_fabric, worker_variables
from utils.stop import STOP_SIGNALS
from utils.wandb_run import without_wandb

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2
SECONDS_TO_STOP = 60.0  # for a checkpoint after a request to stop; a second request does not wait for it
Report = Callable[[str, dict], None]


class WorkerError(Exception):
    """Cause of an error that a worker raised: which rank, and its traceback as text."""


def run_workers(
    function: Callable,
    arguments: dict[str, Any],
    processes: int,
    fabric_options: dict[str, Any],
    on_event: Report,
) -> tuple[Any, int | None]:
    """Call `function(fabric, report, **arguments)` in new processes of this machine.

    Args:
        function: at the top level of a module that can be imported.
        arguments: by name; pickled.
        processes: how many.
        fabric_options: keyword arguments of `make_fabric`, in each of them.
        on_event: called here as `on_event(name, data)` for every `report(name, data)` of rank 0.

    Returns:
        What rank 0 returned (None if it was stopped before), and the stop signal that came here meanwhile: the workers
        were asked to stop, and it is for the caller to let the signal have its effect.

    Raises:
        InputError: an argument that the workers could not read, by its name; before anything is started.
        Exception: the first error of a worker, as it was raised there, with a WorkerError as its cause. The others have
            ended by then.
    """
    content = {"function": function, "arguments": _pack(arguments), "fabric": fabric_options, "processes": processes}
    specification = pickle.dumps(content)
    folder = Path(tempfile.mkdtemp(prefix="vos_"))
    workers: list[_Worker] = []
    try:
        (folder / "specification").write_bytes(specification)
        with _noted_signals() as noted:
            for rank in range(processes):
                workers.append(_Worker(folder, rank, processes))
            result = _listen(workers, on_event, noted)
        return result, next(iter(noted), None)
    finally:
        for worker in workers:
            worker.end()
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------ in the caller


class _Worker:
    """A process, in a session of its own: a Ctrl-C in the terminal is the caller's to pass on."""

    def __init__(self, folder: Path, rank: int, processes: int):
        self.rank, self.result = rank, None
        self.pipe, theirs = Pipe()
        # Modules are looked for where the caller finds them, not first in the working directory (-P). Temporary files
        # of the worker and its libraries go where the caller removes them.
        path = os.pathsep.join([str(ROOT), *(entry or os.getcwd() for entry in sys.path)])
        variables = worker_variables(rank, processes) | {"PYTHONPATH": path, "TMPDIR": str(folder)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "utils.workers", str(folder), str(rank), str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def receive(self) -> tuple:
        """The next message; ("ended", status) after the last. Waits for it: call it when there is something."""
        try:
            if self.process.poll() is None or self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):  # what comes after the last message of a process that ended
            pass
        return "ended", self.process.wait()

    def end(self) -> None:
        """Kill the process and those that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.pipe.close()


def _listen(workers: list[_Worker], on_event: Report, noted: list[int]) -> Any:
    """Hear the workers until all have ended, one has failed, or they took too long to stop; rank 0's result."""
    running, failures, deadline = list(workers), [], None
    while running and not failures:
        if noted and deadline is None:
            deadline = time.monotonic() + SECONDS_TO_STOP
            for worker in running:
                worker.process.terminate()
        if deadline is not None and time.monotonic() > deadline:
            break
        ready = wait([worker.pipe for worker in running], timeout=POLL_SECONDS)
        for worker in list(running):
            if worker.pipe not in ready and worker.process.poll() is None:
                continue
            kind, *content = worker.receive()
            if kind == "event":
                on_event(*content)
            elif kind == "result":
                worker.result = content
            elif kind == "failure":
                failures.append((*content, worker.rank))
            else:
                running.remove(worker)
                if worker.result is None:  # killed; others may have failed for that reason
                    failures.append((0, None, f"its process ended with status {content[0]}", "", worker.rank))
    if failures and not noted:
        _, pickled, text, lines, rank = min(failures, key=lambda failure: failure[0])
        error = RuntimeError(f"rank {rank}: {text}") if pickled is None else pickle.loads(pickled)
        raise error from WorkerError(f"on rank {rank} of {len(workers)}\n\n{lines or text}")
    return workers[0].result and workers[0].result[0]


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Stop signals are put into a list, in place of their effect; a second one is KeyboardInterrupt."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        noted.append(number)
        if len(noted) > 1:
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Pickler(pickle.Pickler):
    """Refuses what pickle takes, but a process of another program cannot find."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type | FunctionType) and (
            value.__module__ in ("__main__", "__mp_main__") or "<" in value.__qualname__
        ):
            kind = "class" if isinstance(value, type) else "function"
            raise pickle.PicklingError(f"the {kind} {value.__qualname__} of {value.__module__}")
        return NotImplemented


def _pack(arguments: dict[str, Any]) -> dict[str, bytes]:
    packed = {}
    for name, value in arguments.items():
        buffer = BytesIO()
        try:
            _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception as error:
            raise InputError(
                f"{name}: cannot be handed to other processes ({error}); what it consists of must be defined at the "
                "top level of a module that they can import, or the run take one device"
            ) from error
        packed[name] = buffer.getvalue()
    return packed


# ------------------------------------------------------------------------------------------------------ in the worker


def _work(folder: Path, rank: int, pipe: Connection) -> None:
    threading.Thread(target=_end_with_caller, args=(pipe, folder), name="end-with-caller", daemon=True).start()
    try:
        import torch.distributed as dist

        content = pickle.loads((folder / "specification").read_bytes())
        fabric = make_fabric(**content["fabric"])
        dist.init_process_group(
            "nccl" if fabric.device.type == "cuda" else "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=content["processes"],
        )
        with without_wandb():  # where a model brings its modules along
            arguments = {name: pickle.loads(value) for name, value in content["arguments"].items()}
        result = fabric.launch(content["function"], _reporter(pipe, rank), **arguments)
        pipe.send(("result", result))
    except BaseException as error:
        text, lines = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        pipe.send(("failure", time.time_ns(), _pickled(error), text, lines))
        _end_group()  # at once: the threads of the process group could hold up the exit
    dist.destroy_process_group()


def _reporter(pipe: Connection, rank: int) -> Report:
    return (lambda name, data: pipe.send(("event", name, data))) if rank == 0 else (lambda name, data: None)


def _pickled(error: BaseException) -> bytes | None:
    """None for an error that does not survive the way; its text does."""
    try:
        pickled = pickle.dumps(error)
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except Exception:
        return None


def _end_with_caller(pipe: Connection, folder: Path) -> None:
    try:
        pipe.recv_bytes()  # nothing is ever sent this way
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        _end_group()


def _end_group() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # this process and its loader processes


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[3])))
