"""A piece of work in a thread of its own, with progress, that can be stopped."""

import logging
import time
from collections.abc import Callable
from threading import Event, Thread

from utils.errors import InputError

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The job was asked to stop."""


class Job:
    """Runs `work(job)` in a thread.

    Attributes:
        number: counts the jobs of a session.
        kind: what it is, for the page.
        state: running, done, stopped or failed.
        done, total: pieces of the work.
        rate: pieces a second, of the last seconds.
        message: for the person, at the end.
        notes: more for the page: the frame, the memory.
    """

    def __init__(self, number: int, kind: str, work: Callable[["Job"], object], changed: Callable[[], None]):
        self.number, self.kind, self.state, self.message = number, kind, "running", ""
        self.done = self.total = 0
        self.rate = 0.0
        self.notes: dict = {}
        self._work, self._changed = work, changed
        self._stop = Event()
        self._times: list[float] = []
        self._thread = Thread(target=self._run, name=f"job-{kind}", daemon=True)

    @property
    def running(self) -> bool:
        """Whether it works."""
        return self.state == "running"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wait: float = 30) -> None:
        """Ask it to stop, and wait so many seconds for it; it keeps what is done."""
        self._stop.set()
        self._thread.join(wait)

    def check(self) -> None:
        """Leave the work if it was asked to stop."""
        if self._stop.is_set():
            raise Stopped

    def progress(self, total: int, **notes: object) -> None:
        """One more piece is done of `total`; leaves the work if it was asked to stop."""
        self._times = [*self._times[-15:], time.perf_counter()]
        if len(self._times) > 1:
            self.rate = (len(self._times) - 1) / max(1e-6, self._times[-1] - self._times[0])
        self.done, self.total = self.done + 1, total
        self.notes = notes
        self._changed()
        self.check()

    def report(self) -> dict:
        """What the page shows of it."""
        names = ("number", "kind", "state", "done", "total", "rate", "message", "notes")
        return {name: getattr(self, name) for name in names}

    def _run(self) -> None:
        try:
            self.message = str(self._work(self) or "")
            self.state = "done"
        except Stopped:
            kept = f"What was done is kept: {self.done} of {self.total} frames."
            self.message = f"Stopped. {'No file was written.' if self.kind == 'export' else kept}"
            self.state = "stopped"
        except InputError as error:
            self.message, self.state = str(error), "failed"
        except MemoryError:
            self.message = "There is not enough memory. Choose a smaller resolution or memory."
            self.state = "failed"
        except Exception as error:
            if self._stop.is_set():  # the files may have gone already
                self.message = "Stopped."
            elif type(error).__name__ == "OutOfMemoryError":  # torch's, for a device
                self.message = "The device has not enough memory. Choose a smaller resolution or memory, or another."
            else:
                logger.exception("job %s", self.kind)
                self.message = f"This failed: {type(error).__name__}: {error}"
            self.state = "failed"
        self._changed()
