"""The same mathematics without care for the machine, as a baseline that runs beside the real thing.

Window attention by unfolding the keys and the values (one shifted copy a window position), explicit softmax over all
scores, a long-term memory that is concatenated anew for each frame, and batch norms as passes of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from models.attention import WINDOW


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Long-term and self attention with all scores in memory; arguments as models.attention.attend."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], position_logits: Tensor, position_values: Tensor | None
) -> Tensor:
    """Short-term attention from unfolded keys and values; arguments as models.attention.attend_window."""
    b, heads = q.shape[:2]

    def unfold(x: Tensor) -> Tensor:
        maps = rearrange(x, "b h (y x) d -> (b h) d y x", y=size[0])
        shifted = F.unfold(maps, WINDOW, padding=WINDOW // 2)
        return rearrange(shifted, "(b h) (d p) n -> b h n p d", b=b, p=WINDOW**2)

    inside = unfold(torch.ones_like(q[..., :1]))[..., 0] > 0
    logits = (q[..., None, :] * unfold(k)).sum(-1) * q.shape[-1] ** -0.5 + position_logits
    weights = torch.softmax(logits.masked_fill(~inside, -torch.inf), dim=-1)
    out = (weights[..., None] * unfold(v)).sum(-2)
    if position_values is not None:
        out = out + weights @ position_values.transpose(-2, -1)
    return out


class GrowingMemory:
    """Long-term memory that copies everything for each new frame; arguments as models.memory.LongTermMemory."""

    def __init__(self, max_frames: int | None = None):
        self.max_frames, self.frames, self._entries = max_frames, 0, []

    def add(self, entries: list, reference: bool) -> None:
        old = self._entries or [(key[:, :, :0], value[:, :, :0]) for key, value in entries]
        self._entries = [
            (torch.cat((key, keys), dim=2), torch.cat((value, values), dim=2))
            for (key, value), (keys, values) in zip(entries, old, strict=True)
        ]
        self.frames += 1

    def read(self) -> list:
        return self._entries


@contextmanager
def naive_attention() -> Iterator[None]:
    """Within it the models compute with this file's attention."""
    with (
        patch("models.aot.attend", attend),
        patch("models.aot.attend_window", attend_window),
        patch("models.deaot.attend", attend),
        patch("models.deaot.attend_window", attend_window),
    ):
        yield


@contextmanager
def naive_tracking() -> Iterator[None]:
    """Within it trackers are built and run without this project's care for the machine."""
    with (
        naive_attention(),
        patch("models.session.LongTermMemory", GrowingMemory),
        patch("models.network.VOSNetwork.folded_encoder", lambda network: network.encoder),
        patch("models.tracker._argmax", lambda scores: scores.argmax(0)),
    ):
        yield
