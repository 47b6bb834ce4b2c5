"""Which clips of the past are kept: names of clips, chosen by a key that every process computes for itself."""

import hashlib
from collections.abc import Iterable

from utils.continual.stages import Clip


def key(seed: int, clip: Clip) -> bytes:
    """A number in 0..2^64 (8 bytes, to be compared) that depends on the seed and the clip's name alone."""
    return hashlib.blake2b(f"{seed} {clip[0]} {clip[1]}".encode(), digest_size=8).digest()


def reservoir(clips: Iterable[Clip], size: int, seed: int) -> list[Clip]:
    """The `size` clips with the largest keys, in order of their names: a uniform sample of all different clips.

    Reservoir sampling by keys (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006, with equal
    weights). reservoir(reservoir(a) + b) = reservoir(a + b): it does not matter in what order, how often or on how many
    processes clips are offered.
    """
    return sorted(sorted(set(clips), key=lambda clip: key(seed, clip), reverse=True)[:size])


def balanced(clips: Iterable[Clip], size: int, seed: int) -> list[Clip]:
    """The same share of every experience, the first ones one more where it does not come out even."""
    clips = set(clips)
    experiences = sorted({experience for experience, _ in clips})
    kept = []
    for place, experience in enumerate(experiences):
        share = size // len(experiences) + (place < size % len(experiences))
        kept += reservoir((clip for clip in clips if clip[0] == experience), share, seed)
    return sorted(kept)
