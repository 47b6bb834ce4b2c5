"""How a run is asked to stop, and how all its processes come to the same answer."""

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_fabric import Fabric

# SIGUSR1 is what SLURM sends ahead of a time limit or a pre-emption with `--signal=USR1@60`.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopRequest:
    """Within `with`, the signals above no longer end the process: they ask the run to save and stop after its step.

    Args:
        fabric: of the run; a signal to any of its processes stops all of them.
        deadline: time.monotonic() from which on the run is asked to stop, None: never.
    """

    def __init__(self, fabric: "Fabric", deadline: float | None = None):
        self.fabric, self.deadline = fabric, deadline
        self.reason: str | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._handlers = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether any process of the run was asked to stop; a collective, with the same answer on all of them."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.reason = "the time is up"
        if self.fabric.world_size == 1:
            return self.reason is not None
        asked = self.fabric.all_reduce(torch.tensor(float(self.reason is not None)), reduce_op="sum")
        return bool(asked > 0)

    def _note(self, number: int, _: object) -> None:
        self.reason = signal.Signals(number).name


def leave_stopping_to_parent() -> None:
    """For loader processes: nobody but the training process ends them, once it has what it waits for.

    A signal to the whole group or job (Ctrl-C, SLURM) reaches them too, and a run whose loader dies cannot save. Until
    this call they have the training process's handlers, which do no harm in a copy, but for a moment also PyTorch's
    own for SIGTERM, which ends them.
    """
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # it tells who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_wait_for_parent, name="wait-for-parent", daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
