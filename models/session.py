"""State of one video at one network input size: groups of objects, each group with memory of its own."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from models.aot import Entry
from models.memory import LongTermMemory
from models.network import Features, VOSNetwork

_LEAST = 1e-5  # probabilities of several groups are kept this far from 0 and 1 (the published evaluation's rule)
_LIMIT = math.log((1 - _LEAST) / _LEAST)


@dataclass
class Group:
    """Objects that share an identity bank. `live` are their slots, 1..10."""

    long_term: LongTermMemory
    live: list[int] = field(default_factory=list)
    short_term: list[Entry] = field(default_factory=list)
    pending: list[tuple[Tensor, ...]] = field(default_factory=list)
    clock: int = 0  # frames since the group began
    memorised_at: int = 0


class Session:
    """Reads and writes the memory of one video.

    Slots are numbered through: slot s (from 0) lies in group s // network.group_size. Label maps hold slot + 1, 0 the
    background.

    Args:
        network: shared by any number of sessions, never changed.
        gap: every how many frames one enters the long-term memory, None: reference frames only.
        max_memory_frames: bound of the long-term memory of each group.
    """

    def __init__(self, network: VOSNetwork, gap: int | None, max_memory_frames: int | None):
        self.network, self.gap, self.max_memory_frames = network, gap, max_memory_frames
        self.group_size = network.group_size
        self.groups: dict[int, Group] = {}

    def read(self, features: Features) -> dict[int, Tensor]:
        """Logits (1, 11, h/4, w/4) of every group that has memory."""
        logits = {}
        seen = self.network.transformer.look(features.tokens, features.position)
        for number, group in self.groups.items():
            tokens, group.pending = self.network.transformer(
                features.tokens,
                features.position,
                features.size,
                None,
                group.long_term.read(),
                group.short_term,
                seen,
            )
            group.clock += 1
            logits[number] = self.network.decode(tokens, features)
        return logits

    def write(self, features: Features, label: Tensor) -> None:
        """Remember the frame that was read last with its label map (1, h, w) at the network's size."""
        for number, group in self.groups.items():
            if not group.pending:
                continue
            local = self._local(label, number, group)
            group.short_term = self.network.transformer.complete(group.pending, self._embed(local, group))
            if group.long_term.max_frames is not None and group.long_term.frames > 1:
                # A quarter of the tokens is a fair sample of where the attention goes.
                query = group.pending[0][0][:, :, ::4]
                objects = F.adaptive_avg_pool2d((local > 0)[None].float(), features.size).flatten()[::4]
                group.long_term.note_use(query, objects)
            if self.gap is not None and group.clock - group.memorised_at >= self.gap:
                group.long_term.add(group.short_term, reference=False)
                group.memorised_at = group.clock
            group.pending = []

    def write_reference(self, features: Features, label: Tensor, slots: list[int]) -> None:
        """Remember a frame whose label map (1, h, w) is given: it attends to itself and is never forgotten.

        Args:
            slots: all slots that hold an object from now on.
        """
        seen = self.network.transformer.look(features.tokens, features.position)
        for number in sorted({slot // self.group_size for slot in slots}):
            if number not in self.groups:
                self.groups[number] = Group(LongTermMemory(self.max_memory_frames))
            group = self.groups[number]
            group.live = [slot % self.group_size + 1 for slot in slots if slot // self.group_size == number]
            identity = self._embed(self._local(label, number, group), group)
            _, pending = self.network.transformer(
                features.tokens, features.position, features.size, identity, seen=seen
            )
            group.short_term = self.network.transformer.complete(pending, identity)
            group.long_term.add(group.short_term, reference=True)
            group.memorised_at = group.clock
            group.pending = []

    def remove(self, slots: list[int]) -> None:
        """Forget objects; a group without objects gives its memory back."""
        for slot in slots:
            group = self.groups.get(slot // self.group_size)
            if group is not None and slot % self.group_size + 1 in group.live:
                group.live.remove(slot % self.group_size + 1)
        self.groups = {number: group for number, group in self.groups.items() if group.live}

    @property
    def memory_frames(self) -> int:
        """Frames in the largest long-term memory."""
        return max((group.long_term.frames for group in self.groups.values()), default=0)

    def merge(self, logits: dict[int, Tensor], size: tuple[int, int]) -> Tensor:
        """Logits of all groups -> logits (1, 1 + objects, *size), background first, objects by slot.

        One group: its own logits. More: the background is where every group sees background, the objects keep their
        probability in their group (golden rule of the published evaluation: clamped to 1e-5, as a logit).
        """
        if len(logits) == 1:
            ((number, only),) = logits.items()
            return self.network.resize(self._live(only, number), size)
        background, objects = None, []
        for number in sorted(logits):
            live = self._live(logits[number], number)
            if live.shape[1] == 2:  # one object: its probability's logit is a difference, one plane to resize
                logit = self.network.resize(live[:, 1:] - live[:, :1], size)
                own_background = torch.sigmoid(-logit)
                objects.append(logit.clamp_(-_LIMIT, _LIMIT))
            else:
                probabilities = self.network.resize(live, size).softmax(1)
                own_background = probabilities[:, :1]
                objects.append(torch.logit(probabilities[:, 1:].clamp(_LEAST, 1 - _LEAST)))
            background = own_background if background is None else background * own_background
        return torch.cat([torch.logit(background.clamp(_LEAST, 1 - _LEAST)), *objects], dim=1)

    def _live(self, logits: Tensor, number: int) -> Tensor:
        """The planes of background and live objects, in at least float32.

        Channels last: a resize or an argmax then reads the values of a pixel together, two to ten times faster.
        """
        live = logits[:, [0, *self.groups[number].live]].contiguous(memory_format=torch.channels_last)
        return live.to(torch.promote_types(live.dtype, torch.float32))

    def _local(self, label: Tensor, number: int, group: Group) -> Tensor:
        """Label map (1, h, w) of all slots -> (h, w) uint8 places in the group: 0 background, then live slots."""
        table = torch.zeros(int(label.max()) + 1, dtype=torch.uint8, device=label.device)
        for position, slot in enumerate(group.live, start=1):
            if number * self.group_size + slot < len(table):
                table[number * self.group_size + slot] = position
        return table[label[0].long()]

    def _embed(self, local: Tensor, group: Group) -> Tensor:
        return self.network.embed_label(local, [0, *group.live])
