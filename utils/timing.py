"""How long the device works, and how much memory it took: the same question on every kind of device."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Measures pieces of work on a device.

    On CUDA two events enclose each piece, so that measuring never makes the program wait for the device; they are read
    together, after it has finished. Elsewhere `perf_counter` is read, on MPS after the device has finished.

        watch = Stopwatch(device)
        for frame in video:
            with watch.measure():
                tracker.step(frame)
        seconds = watch.seconds()
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pieces: list[tuple] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts what is done inside as one piece; a piece that raises is not counted."""
        begin = self._now()
        yield
        self._pieces.append((begin, self._now()))

    def seconds(self) -> list[float]:
        """Seconds of each piece so far, in order; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [begin.elapsed_time(end) / 1000 for begin, end in self._pieces]
        return [end - begin for begin, end in self._pieces]

    def _now(self) -> "torch.cuda.Event | float":
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: of CUDA's allocator on CUDA, elsewhere of the whole process (resident set)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    """What a person calls the device, e.g. "NVIDIA H200" or "cpu (8 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type
