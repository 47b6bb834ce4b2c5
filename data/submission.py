"""The archive of masks that a benchmark's server takes."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np

from data.benchmarks import Benchmark, Video, given_mask
from data.images import picture_size
from data.labels import label_ids


def pack_submission(benchmark: Benchmark, masks: Path, archive: Path) -> None:
    """Packs `<masks>/<video>/<frame>.png` of the frames that the benchmark asks for, and checks what was packed.

    The archive appears under its name only after `check_submission` has passed. Equal masks give equal bytes.

    Raises FileNotFoundError for a mask that is not there, ValueError as `check_submission`.
    """
    temporary = archive.with_name(f".{archive.name}.partial")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:  # PNGs do not get smaller
            for video in benchmark.videos:
                for frame in video.asked:
                    entry = zipfile.ZipInfo(f"{benchmark.archive_root}{video.name}/{frame}.png", (1980, 1, 1, 0, 0, 0))
                    entry.external_attr = 0o644 << 16
                    file.writestr(entry, (masks / video.name / f"{frame}.png").read_bytes())
        check_submission(benchmark, temporary)
        os.replace(temporary, archive)
    finally:
        temporary.unlink(missing_ok=True)


def check_submission(benchmark: Benchmark, archive: Path) -> None:
    """Checks an archive as its server will: names, picture type and size, object ids.

    Raises ValueError that names the first entry that is missing, not asked for, no indexed 8-bit PNG, of a wrong size
    or holds an id that no given mask has. 16-bit masks pass for `folder` alone, which has no server.
    """
    wanted = {
        f"{benchmark.archive_root}{video.name}/{frame}.png": video
        for video in benchmark.videos
        for frame in video.asked
    }
    with zipfile.ZipFile(archive) as file:
        names = file.namelist()
        if lost := [name for name in wanted if name not in set(names)]:
            raise ValueError(f"{archive}: lacks {lost[0]} and {len(lost) - 1} more masks")
        if extra := [name for name in names if name not in wanted]:
            raise ValueError(f"{archive}: {extra[0]} is not asked for, nor are {len(extra) - 1} more entries")
        if len(names) != len(wanted):
            raise ValueError(f"{archive}: holds an entry twice")
        allowed: dict[str, tuple[tuple[int, int], set[int]]] = {}
        for name, video in wanted.items():
            if video.name not in allowed:
                allowed[video.name] = video.output_size or picture_size(video.frames[0]), _given_ids(video)
            _check_mask(f"{archive}: {name}", file.read(name), *allowed[video.name], benchmark.dataset == "folder")


def _check_mask(name: str, data: bytes, size: tuple[int, int], ids: set[int], wide: bool) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.mode != "P" and not (wide and image.mode.startswith("I;16")):
            raise ValueError(f"{name}: is no indexed 8-bit PNG ({image.mode})")
        if (image.height, image.width) != size:
            raise ValueError(f"{name}: is {image.width} x {image.height} pixels instead of {size[1]} x {size[0]}")
        if strange := label_ids(np.asarray(image)) - {0} - ids:
            raise ValueError(f"{name}: holds the unknown object id {min(strange)}; known are {sorted(ids)}")


def _given_ids(video: Video) -> set[int]:
    known: set[int] = set()
    for frame in video.frames:
        mask = given_mask(video, frame.stem, known)
        if mask is not None:
            known |= label_ids(mask) - {0}
        if video.first_only:
            break
    return known
