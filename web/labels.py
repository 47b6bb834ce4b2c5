"""The masks of a session's video: one file a frame, and what is known of each without reading it."""

from collections.abc import Iterable
from pathlib import Path
from threading import RLock

import numpy as np

from data.images import read_image
from data.masks import write_mask


class Labels:
    """Label maps of a video's frames, kept in a folder. Safe to use from several threads.

    A frame is "marked" where a person drew, and then holds which objects were drawn or erased there: those are the
    truth, the others a prediction, or not known yet.

    Args:
        folder: of this video alone.
        size: (h, w).
        length: number of frames.
    """

    def __init__(self, folder: Path, size: tuple[int, int], length: int):
        self.size, self.length = size, length
        self._folder = folder
        self._lock = RLock()
        self._present = np.zeros(length, bool)
        self._predicted = np.zeros(length, bool)
        self._marked: dict[int, set[int]] = {}
        # Objects are removed without rewriting the files: an id counts only in files newer than its removal.
        self._clock = 0
        self._written: dict[int, int] = {}
        self._removed: dict[int, int] = {}

    def read(self, frame: int) -> np.ndarray:
        """(H, W) int32; all background where nothing is known."""
        with self._lock:
            if not self._present[frame]:
                return np.zeros(self.size, np.int32)
            labels = np.array(read_image(self._path(frame)), np.int32)
            gone = [i for i, clock in self._removed.items() if clock > self._written[frame]]
        if gone:
            labels[np.isin(labels, gone)] = 0
        return labels

    def write(self, frame: int, labels: np.ndarray) -> None:
        """Keep a prediction."""
        with self._lock:
            self._write(frame, labels)
            self._predicted[frame] = True

    def draw(self, frame: int, labels: np.ndarray) -> set[int]:
        """Keep what a person made of a frame; the ids that differ from before are marked. Returns all marked ids."""
        with self._lock:
            before = self.read(frame)
            changed = before != labels
            ids = {*np.unique(before[changed]).tolist(), *np.unique(labels[changed]).tolist()} - {0}
            if ids:
                self._write(frame, labels)
                self._marked.setdefault(frame, set()).update(ids)
            if not labels.any() and not self._predicted[frame]:  # drawn, and taken back
                self.clear(frame)
            return self.marked(frame)

    def mark(self, frame: int, ids: Iterable[int]) -> None:
        """Count these ids of a frame as drawn, also where they are as predicted."""
        with self._lock:
            self._marked.setdefault(frame, set()).update(ids)

    def clear(self, frame: int) -> None:
        """Forget a frame's labels and marks."""
        with self._lock:
            self._marked.pop(frame, None)
            self._written.pop(frame, None)
            self._present[frame] = self._predicted[frame] = False
            self._path(frame).unlink(missing_ok=True)

    def marked(self, frame: int) -> set[int]:
        """Ids that a person drew or erased on a frame, without the removed ones."""
        with self._lock:
            return self._marked.get(frame, set()) - set(self._removed)

    def marked_frames(self) -> list[int]:
        """Frames with marks, in order."""
        with self._lock:
            return sorted(frame for frame, ids in self._marked.items() if ids - set(self._removed))

    def has(self, frame: int) -> bool:
        """Whether a frame has labels."""
        return bool(self._present[frame])

    def frames(self) -> list[int]:
        """Frames that have labels, in order."""
        with self._lock:
            return np.flatnonzero(self._present).tolist()

    def ranges(self) -> list[list[int]]:
        """First and last frame of every unbroken stretch of labels."""
        with self._lock:
            edges = np.flatnonzero(np.diff(self._present.astype(np.int8), prepend=0, append=0))
        return [[int(first), int(end) - 1] for first, end in edges.reshape(-1, 2)]

    def remove(self, object_id: int) -> None:
        """Take an object out of all frames."""
        with self._lock:
            self._clock += 1
            self._removed[object_id] = self._clock

    def restore(self, object_id: int) -> None:
        """Undo `remove`."""
        with self._lock:
            self._removed.pop(object_id, None)

    def readmit(self, object_id: int) -> None:
        """Let a removed id be used anew: what it was before is taken out of the files."""
        with self._lock:
            if object_id in self._removed:
                for frame in self.frames():
                    self._write(frame, self.read(frame))  # without the id
                for ids in self._marked.values():
                    ids.discard(object_id)
                del self._removed[object_id]

    def _write(self, frame: int, labels: np.ndarray) -> None:
        if self._removed:
            labels = np.where(np.isin(labels, list(self._removed)), 0, labels)
        write_mask(self._path(frame), labels)
        self._present[frame], self._written[frame] = True, self._clock

    def _path(self, frame: int) -> Path:
        return self._folder / f"{frame}.png"
