"""From the names of data sets, or descriptions of your own, to one training data set.

A description is a mapping, as in `configs/data/*.yaml`:

    kind         video (default), still or synthetic
    root         folder, seen from the data root (default: the data root itself)
    images, annotations, sequences     as in `data.clips.VideoClips`; still: the two folders
    max_gap, min_reference, merge      as in `data.clips.VideoClips`
    sources      synthetic: folders, seen from `root`
    repeats      how often an epoch holds it (default 1); synthetic: `length` clips each time
    weight       instead of repeats: its share of the clips

`name: davis2017` starts from the description of that name; what else is given replaces its values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.clips import ClipDataset, Mixture, StillClips, VideoClips
from data.transforms import STRONG, WEAK, ClipTransform, StillTransform
from utils.errors import InputError

KNOWN = Path(__file__).resolve().parent.parent / "configs" / "data"
OPTIONS = {
    "video": {"images", "annotations", "sequences", "max_gap", "min_reference", "merge"},
    "still": {"images", "annotations", "merge"},
    "synthetic": {"sources", "length", "max_objects", "max_gap", "motion"},
}
NUMBERS = {  # least, most
    "max_gap": (1, 1e6),
    "min_reference": (0, 1e9),
    "merge": (0, 1),
    "length": (1, 1e9),
    "max_objects": (1, 10),
    "motion": (0, 100),
    "repeats": (0, 1e6),
    "weight": (0, 1e9),
}
WHOLE = {"max_gap", "length", "max_objects", "repeats"}
FOLDERS = (("images", "JPEGImages"), ("annotations", "Annotations"))


def open_training_data(
    datasets: Sequence[str | Mapping[str, Any]],
    data_root: str | Path,
    *,
    size: tuple[int, int] = (465, 465),
    short_edge: int = 480,
    scale: tuple[float, float] = (0.7, 1.3),
    frames: int = 5,
    strong_augmentation: bool = False,
    merge: float | None = None,
    min_pixels: int = 100,
    length: int | None = None,
    cache_megabytes: float = 0,
    max_broken: int = 20,
    seed: int = 0,
) -> Mixture:
    """Open data sets by name or description, as one mixture of training clips.

    Args:
        datasets: names in `configs/data`, or descriptions (see the module).
        data_root: folder that all of them lie in.
        size, short_edge, scale: crop (h, w), and the short edge of the frames with its random factor before cropping.
        frames: length of a clip.
        strong_augmentation: colour jitter, grey and blur of each frame, as DeAOT was trained ("v2"); else "v1".
        merge: replaces the probability of merging two clips (0.3 videos, 1.0 still images).
        min_pixels: an object counts with more pixels than that in the first frame.
        length: clips an epoch, only with weights.
        cache_megabytes: memory for decoded frames, shared out evenly.
        max_broken: unreadable files that are skipped before it is an error.
        seed: of all draws.

    Raises:
        InputError: an unknown name or option; a data set that is missing or empty, with the layout expected.
    """
    root = Path(data_root)
    if not root.is_dir():
        raise InputError(f"--data_root {root}: no such folder; it holds the folders of the data sets")
    if not datasets:
        raise InputError(f"datasets: none given; known by name: {', '.join(known_names())}")
    entries = [describe(entry) for entry in datasets]
    budget = cache_megabytes / len(entries)
    opened: list[ClipDataset] = []
    for number, entry in enumerate(entries):
        kind, place = entry["kind"], root / entry["root"]
        options = {key: entry[key] for key in OPTIONS[kind] & entry.keys()}
        if merge is not None and "merge" in OPTIONS[kind]:
            options["merge"] = merge
        # A seed of its own: equal items of two data sets would repeat each other's geometry otherwise.
        own_seed = seed * 1000 + number
        if kind == "synthetic":
            from data.synthetic import SyntheticClips

            sources = [place / source for source in options.pop("sources", ["."])]
            options |= {"size": size, "frames": frames, "min_pixels": min_pixels}
            opened.append(SyntheticClips(sources, max_broken=max_broken, seed=own_seed, **options))
            continue
        shared = {"cache_megabytes": budget, "max_broken": max_broken, "seed": own_seed}
        if kind == "still":
            color = STRONG if strong_augmentation else WEAK
            transform = StillTransform(size=size, frames=frames, color=color)
            images, masks = (place / options.pop(key, default) for key, default in FOLDERS)
            opened.append(StillClips(images, masks, transform=transform, min_pixels=min_pixels, **options, **shared))
        else:
            color = STRONG if strong_augmentation else None
            transform = ClipTransform(size, short_edge, scale, color=color, min_pixels=min_pixels)
            opened.append(VideoClips(place, transform=transform, frames=frames, **options, **shared))
    if any("weight" in entry for entry in entries):
        weights = [entry.get("weight", 0) for entry in entries]
        return Mixture(opened, weights=weights, length=length, seed=seed)
    return Mixture(opened, repeats=[entry.get("repeats", 1) for entry in entries], seed=seed)


def known_names() -> list[str]:
    """Data sets that can be asked for by name."""
    return sorted(path.stem for path in KNOWN.glob("*.yaml"))


def describe(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """The full description of a data set given by name or mapping. Raises InputError for what it does not know."""
    import yaml

    given = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = given.pop("name", None)
    found: dict[str, Any] = {"kind": "video", "root": "."}
    if name is not None:
        if name not in known_names():
            raise InputError(f"datasets: {name!r} is no known data set; choose one of {', '.join(known_names())}")
        found |= yaml.safe_load((KNOWN / f"{name}.yaml").read_text())
    found |= given
    if not isinstance(found["kind"], str) or found["kind"] not in OPTIONS:
        raise InputError(f"datasets: kind {found['kind']!r} is none of {', '.join(OPTIONS)}")
    allowed = OPTIONS[found["kind"]] | {"kind", "root", "repeats", "weight"}
    for key in found:
        if key not in allowed:
            known = ", ".join(sorted(allowed))
            raise InputError(f"datasets: a {found['kind']} data set has no option {key!r}; it has {known}")
    for key, value in found.items():
        if key in NUMBERS:
            (least, most), kinds = NUMBERS[key], (int,) if key in WHOLE else (int, float)
            right = f"a {'whole ' if key in WHOLE else ''}number from {least:g} to {most:g}"
            fits = type(value) in kinds and least <= value <= most
        elif key in ("sources", "sequences") and not isinstance(value, str):
            right = "a list of texts"
            fits = isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value)
        else:
            right, fits = "a text", isinstance(value, str) and key != "sources"
        if not fits and (key, value) != ("sequences", None):
            raise InputError(f"datasets: {key} {value!r} of a {found['kind']} data set must be {right}")
    return found
