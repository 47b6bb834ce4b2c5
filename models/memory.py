"""Long-term memory of one group of objects: storage without copies and the rule that keeps it bounded."""

import math

import torch
from torch import Tensor

from models.aot import Entry


class LongTermMemory:
    """Keys and values of the memorised frames, all layers.

    Storage is preallocated and grows by doubling, so that adding a frame copies that frame only. With `max_frames` it
    never holds more: reference frames stay for ever, and the frame that is little used and has stayed long makes room
    (RMem, CVPR 2024, section 3.3; constants of its released code). Ties go to the frame that came first, so that the
    result does not depend on anything but the video.

    Args:
        max_frames: most frames to hold, None for all. Reference frames are kept even beyond it.
    """

    def __init__(self, max_frames: int | None = None):
        self.max_frames = max_frames
        self.frames = 0
        self._store: list[Entry] = []
        self._tokens = 0  # of one frame
        self._reference: list[bool] = []
        self._stay: list[int] = []  # additions since the frame came
        self._use: list[float] = []  # moving mean of the attention it receives
        self._newest = 0

    @property
    def full(self) -> bool:
        return self.max_frames is not None and self.frames >= self.max_frames

    def add(self, entries: list[Entry], reference: bool) -> None:
        """Add a frame: one (key, value) a layer, each (1, heads, tokens of a frame, d)."""
        self._tokens = entries[0][0].shape[2]
        self._stay = [stay + 1 for stay in self._stay]
        place = self.frames
        if self.full and not (reference and self._victim() is None):
            victim = self._victim()
            if victim is None:
                return  # nothing but reference frames: there is no room for another one
            place = victim
        self._reserve(entries, place + 1)
        span = slice(place * self._tokens, (place + 1) * self._tokens)
        for (keys, values), (key, value) in zip(self._store, entries, strict=True):
            keys[:, :, span] = key
            values[:, :, span] = value
        if place == self.frames:
            self.frames += 1
            for column, start in ((self._reference, False), (self._stay, 0), (self._use, 0.0)):
                column.append(start)
        self._reference[place], self._stay[place], self._use[place] = reference, 0, 0.0
        self._newest = place

    def read(self) -> list[Entry]:
        """Keys (1, heads, frames * tokens, d) and values of each layer, as views of the storage."""
        n = self.frames * self._tokens
        return [(keys[:, :, :n], values[:, :, :n]) for keys, values in self._store]

    def note_use(self, query: Tensor, weight: Tensor) -> None:
        """Update how much each frame is used by the present one.

        Args:
            query: (1, heads, n, d) of the first layer.
            weight: (n,) how much the attention of each token counts, e.g. 1 on objects.
        """
        keys = self._store[0][0][:, :, : self.frames * self._tokens]
        attention = torch.softmax((query * query.shape[-1] ** -0.5) @ keys.transpose(-2, -1), dim=-1)
        mass = attention.unflatten(-1, (self.frames, self._tokens)).sum(-1).mean(1)[0]  # (n, frames)
        share = (weight[:, None] * mass).sum(0) / weight.sum().clamp(min=1e-6)
        self._use = [0.8 * new + 0.2 * old for new, old in zip(share.tolist(), self._use, strict=True)]

    def _victim(self) -> int | None:
        """The frame to drop: least of use + 1.5 sqrt(log(sum of stays) / (stay + 8))."""
        candidates = [i for i in range(self.frames) if not self._reference[i] and i != self._newest]
        if not candidates:  # a bank of one frame beside the references
            candidates = [i for i in range(self.frames) if not self._reference[i]]
        total = math.log(max(sum(self._stay), 2))
        return min(
            candidates,
            key=lambda i: (self._use[i] + 1.5 * math.sqrt(total / (self._stay[i] + 8)), -self._stay[i]),
            default=None,
        )

    def _reserve(self, entries: list[Entry], frames: int) -> None:
        held = self._store[0][0].shape[2] // self._tokens if self._store else 0
        if frames <= held:
            return
        capacity = max(frames, 2 * held)
        if self.max_frames is not None and frames <= self.max_frames:
            capacity = min(capacity, self.max_frames)

        def grown(new: Tensor, old: Tensor | None) -> Tensor:
            storage = new.new_empty(*new.shape[:2], capacity * self._tokens, new.shape[3])
            if old is not None:
                storage[:, :, : old.shape[2]] = old
            return storage

        old = self._store or [(None, None)] * len(entries)
        self._store = [
            (grown(key, keys), grown(value, values)) for (key, value), (keys, values) in zip(entries, old, strict=True)
        ]
