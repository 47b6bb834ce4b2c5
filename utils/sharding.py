"""Work shared out over the processes of a run, without any collective operation between them.

Evaluation has no step that all processes take together: a collective would make the fast ones wait, and hang all when
one dies. Here each process draws its next piece from a counter in the process group's store and only rank 0 waits, at
the end, for what the others still hold.
"""

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed import Store

BEAT_SECONDS = 1.0
log = logging.getLogger(__name__)


class WorkQueue:
    """Named pieces of work, each given to one process of the run.

    A process that dies silently is known by its missing heartbeat; rank 0 does its piece again. (Should it be alive
    after all, a piece is done twice, so pieces must be harmless to repeat.) A process that fails tells rank 0, which
    raises the same error, and ends quietly: the launchers kill rank 0 when another process ends with an error status.
    A process that has lost rank 0 fails at its next `check`.

    Args:
        names: of the pieces, in the order in which they are given out.
        rank, world_size, store: of the process group; without a store this process does everything.
        stale_after: seconds without a heartbeat after which a process counts as dead.
    """

    _made = 0  # queues of this process: every process makes the same ones, in the same order

    def __init__(self, names: Sequence[str], rank: int = 0, store: "Store | None" = None, stale_after: float = 15.0):
        self.names, self.rank, self.stale_after = names, rank, stale_after
        self._store = store
        self._problem: Exception | None = None
        self._finished = threading.Event()

    @classmethod
    def of(cls, fabric: "Fabric", names: Sequence[str]) -> "WorkQueue":
        """A queue of a launched Fabric; made by every process of the run."""
        if fabric.world_size == 1:
            return cls(names)
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        _outlive_processes(fabric)
        cls._made += 1
        return cls(names, fabric.global_rank, PrefixStore(f"work/{cls._made}", _get_default_store()))

    def run(self, work: Callable[[int], None]) -> None:
        """Calls `work` with the places in `names` that this process draws; on rank 0 returns when all are done.

        Raises what `work` raises, on rank 0 also what it raised elsewhere (InputError, or RuntimeError).
        """
        if self._store is None:
            for number in range(len(self.names)):
                work(number)
            return
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        try:
            while (number := self._store.add("next", 1) - 1) < len(self.names):
                self._store.set(f"owner/{number}", str(self.rank))
                self._do(work, number)
            if self.rank == 0:
                self._wait_for_others(work)
        except Exception as error:
            if self.rank == 0 or error is self._problem:
                raise
            log.debug("%s", traceback.format_exc())
            problem = {"input": isinstance(error, InputError), "text": f"{type(error).__name__}: {error}"}
            if problem["input"]:
                problem["text"] = str(error)
            self._store.set("failure", json.dumps(problem))
        finally:
            self._finished.set()
            beat.join()

    def check(self) -> None:
        """To be called between steps of a piece: raises when the run has failed elsewhere."""
        if self._problem is not None:
            raise self._problem

    def _do(self, work: Callable[[int], None], number: int) -> None:
        self.check()
        work(number)
        self._store.set(f"done/{number}", "1")

    def _wait_for_others(self, work: Callable[[int], None]) -> None:
        waiting = list(range(len(self.names)))
        seen: dict[str, tuple[int, float]] = {}
        while waiting := [n for n in waiting if not self._store.check([f"done/{n}"])]:
            self.check()
            for number in waiting:
                # Between drawing a number and saying so lies a moment in which a process can die, too.
                owner = f"owner/{number}"
                beat = "beat/" + self._store.get(owner).decode() if self._store.check([owner]) else owner
                count = self._store.add(beat, 0) if beat != owner else 0
                if seen.get(beat, (None, 0.0))[0] != count:
                    seen[beat] = (count, time.monotonic())
                elif time.monotonic() - seen[beat][1] > self.stale_after:
                    log.warning("the process of %s has died; rank 0 begins it again", self.names[number])
                    self._do(work, number)
            time.sleep(0.1)

    def _beat(self) -> None:
        while not self._finished.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                if self.rank == 0 and self._store.check(["failure"]):
                    problem = json.loads(self._store.get("failure"))
                    self._problem = (InputError if problem["input"] else RuntimeError)(problem["text"])
                    return
            except Exception as error:
                self._problem = RuntimeError(f"the main process of the run has ended ({error})")
                return


def _outlive_processes(fabric: "Fabric") -> None:
    """Stops Fabric's observer, which kills rank 0 within seconds of the death of a process that it launched."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._child_processes = []


def forget_dead_processes(fabric: "Fabric") -> None:
    """Takes processes that died out of the list whose exit status the run waits for: their work has been done."""
    launched = getattr(getattr(fabric.strategy, "launcher", None), "procs", [])
    launched[:] = [process for process in launched if process.poll() in (None, 0)]
