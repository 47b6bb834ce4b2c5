"""Fixtures of all tests: the material beside the checkout, a clean environment, two processes that can talk."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported: threads that wait actively take the cores from each other as soon as tests share them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("steady", deadline=None, derandomize=True)  # no failure by a busy machine or by chance
settings.load_profile("steady")


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the reference material in {folder}")
    return folder


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test, or Fabric in it, did to the environment: later tests would take it for a launcher's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def gloo_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator["GlooPool"]:
    pool = GlooPool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.stop()


class GlooPool:
    """Two CPU processes that stay: each start costs seconds of imports.

    They share a gloo process group and have the variables of `torchrun --nproc_per_node 2`, so that `make_fabric()`
    in them returns a Fabric of two ranks.
    """

    world_size = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def run(self, fn: Callable, *args: Any, timeout: float = 120) -> list:
        """`[fn(rank, 2, *args) for rank in (0, 1)]`, each in its process; `fn` is a function at module level.

        Raises:
            RuntimeError: with the tracebacks of the ranks that failed, died or did not answer within `timeout` seconds.
        """
        if not self._workers:
            self._start()
        pipes = [pipe for _, pipe in self._workers]
        for pipe in pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        results, failures = {}, {}
        deadline = time.monotonic() + timeout
        while (waiting := [pipe for pipe in pipes if pipe not in results | failures]) and time.monotonic() < deadline:
            for pipe in wait(waiting, timeout=1):
                try:
                    result, error = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    result, error = None, "the process ended"
                (failures if error else results)[pipe] = error or result
                if error:  # the other rank may be waiting for this one
                    deadline = min(deadline, time.monotonic() + 5)
        failures |= dict.fromkeys(waiting, "no answer")
        if waiting or "the process ended" in failures.values():
            self.stop()  # the next run starts two new ones
        if failures:
            raise RuntimeError("\n".join(f"rank {pipes.index(pipe)}: {text}" for pipe, text in failures.items()))
        return [results[pipe] for pipe in pipes]

    def stop(self) -> None:
        for _, pipe in self._workers:
            pipe.close()  # an idle worker leaves its loop
        for process, _ in self._workers:
            process.join(timeout=5)
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        store = self._folder / f"store_{self._starts}"
        for rank in range(self.world_size):
            pipe, far_end = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world_size, store, far_end), daemon=True)
            process.start()
            far_end.close()
            self._workers.append((process, pipe))


def _work(rank: int, world_size: int, store: Path, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        try:
            fn, args = pickle.loads(message)
            answer = pickle.dumps((fn(rank, world_size, *args), None))  # tensors by value, not as shared memory
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
    dist.destroy_process_group()
