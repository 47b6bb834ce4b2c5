"""How far a run is, and when it will be done."""

import time
from collections import deque

UNSETTLED = 3  # the first steps after a start wait for loader processes and for kernels to be chosen


class Progress:
    """A bar on a terminal, and an estimate of the time left that looks at recent steps alone.

    Args:
        first: steps done before this start.
        total: steps of the whole run.
        window: steps that the estimate looks back over; with a whole cycle of validations and checkpoints in it, their
            time counts with its share.
        show: whether this process shows the bar; it never does where stderr is no terminal.
    """

    def __init__(self, first: int, total: int, window: int, show: bool):
        from tqdm import tqdm

        self.done, self.total = first, total
        self._times: deque[float] = deque(maxlen=max(2, window + 1))
        self._unsettled = UNSETTLED
        self._bar = tqdm(
            initial=first,
            total=total,
            disable=None if show else True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            dynamic_ncols=True,
        )

    def step(self) -> None:
        """One more step is done."""
        self.done += 1
        if self._unsettled:
            self._unsettled -= 1
        else:
            self._times.append(time.perf_counter())
        self._bar.set_postfix_str(f"{self.eta()} left", refresh=False)
        self._bar.update()

    def eta(self) -> str:
        """Time left as h:mm:ss, "?" as long as nothing can be said."""
        if self.done >= self.total:
            return "0:00:00"
        if len(self._times) < 2:
            return "?"
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        minutes, seconds = divmod(round(pace * (self.total - self.done)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line)

    def close(self) -> None:
        self._bar.close()
