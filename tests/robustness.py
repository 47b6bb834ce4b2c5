"""What the tests of bad inputs and faults share: damage to files, a judge of outcomes, and the count of all cases.

Every case is counted once, by its kind and content. `VOS_ROBUSTNESS_TABLE=FILE pytest ...` writes the counts of that
run, from which docs/ROBUSTNESS.md takes its figures.
"""

import faulthandler
import hashlib
import json
import os
import resource
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from utils.cli import PATH_ERRORS, run
from utils.errors import InputError

SECONDS = 60  # of computing; a case that takes longer counts as hanging
MEMORY = 3 * 2**30  # so much more than before may a case take

_outcomes: dict[str, Counter] = defaultdict(Counter)
_known: dict[str, set[bytes]] = defaultdict(set)


def count(kind: str, content: object, outcome: str) -> None:
    """Count a case; one of the same kind and content counts once."""
    data = content if isinstance(content, bytes) else repr(content).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(data).digest()
    if digest not in _known[kind]:
        _known[kind].add(digest)
        _outcomes[kind][outcome] += 1
        if table := os.environ.get("VOS_ROBUSTNESS_TABLE"):
            rows = {kind: dict(outcomes) for kind, outcomes in sorted(_outcomes.items())}
            Path(table).write_text(json.dumps(rows, indent=1))


@contextmanager
def bounded() -> Iterator[None]:
    """Within it an allocation of gigabytes fails, and what takes a minute is interrupted."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s of computing")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, late)
    faulthandler.dump_traceback_later(10 * SECONDS, exit=True)  # for one that waits, or that no handler can interrupt
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, handler)


def attempt(kind: str, content: object, use: Callable[[], object]) -> object:
    """Use an input: what `use` returns, or None for one that was refused with one line. Anything else fails."""
    with bounded():
        try:
            result = use()
        except InputError as error:
            assert 10 < len(str(error)) < 2000, str(error)
            count(kind, content, "refused")
            return None
        except OSError as error:
            assert error.errno in PATH_ERRORS and error.filename is not None, error  # what the scripts refuse as well
            count(kind, content, "refused")
            return None
    count(kind, content, "used")
    return result


def command(kind: str, main: Callable, words: Sequence[object], capfd: pytest.CaptureFixture) -> tuple[int, str]:
    """Run a script in this process: exit status 0 or 2 and, with the latter, its one line."""
    words = [str(word) for word in words]
    capfd.readouterr()
    status = 0
    with bounded():
        try:
            run(main, words)
        except SystemExit as ended:
            status = ended.code or 0
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status in (0, 2), (words, err[-2000:])
    assert len(lines) == (status == 2) and "Traceback" not in err, (words, err[-2000:])
    count(kind, words, "refused" if status else "used")
    return status, "".join(lines)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """A file with one kind of damage: cut, bits flipped, a stretch lost, zeroed, doubled or swapped for noise."""
    data = data or b"\n"
    kind = rng.integers(7)
    place = int(rng.integers(len(data)))
    length = int(min(rng.integers(1, 64), len(data) - place))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[place + length :]
    if kind == 2:
        return data[:place] + bytes(length) + data[place + length :]
    if kind == 3:
        return data[:place] + data[place : place + length] + data[place:]
    if kind == 4:
        return data[:place] + rng.bytes(length) + data[place + length :]
    out = bytearray(data)
    head = min(len(data), 64) if kind == 5 else len(data)  # headers hold what does most harm
    for bit in rng.integers(8 * head, size=int(rng.integers(1, 9))):
        out[bit // 8] ^= 1 << (bit % 8)
    return bytes(out)
