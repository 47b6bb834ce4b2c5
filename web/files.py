"""Results as files to take away, and such files taken in again."""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from data.alpha import AlphaWriter, read_alpha
from data.coco import decode, read_coco, write_coco
from data.images import IMAGE_SUFFIXES
from data.masks import overlay, read_mask, write_mask
from data.reader import FrameReader
from data.video import VideoWriter
from utils.errors import InputError
from web.jobs import Job
from web.sessions import FORMATS, Session

KINDS = {"masks": "_masks.zip", "coco": "_coco.json", "overlay": "_overlay.mp4", "webm": ".webm", "mov": ".mov"}
NOTES = "objects.json"


def export(job: Job, session: Session, kind: str, object_id: int | None = None, opacity: float = 0.5) -> str:
    """Write a file of results into the session's folder.

    Args:
        kind: masks (zip of indexed PNGs), coco (JSON), overlay (mp4 of all frames), or webm and mov: one object on
            transparency, for the frames from the first to the last that have labels.
        object_id: the object of webm and mov.
        opacity: of the tint in the overlay, 0 for outlines alone.

    Returns:
        What was done, for the person; job.notes holds the file's name.
    """
    reader, labels = session.reader.twin(), session.labels
    frames = labels.frames()
    if not frames:
        raise InputError("no frame has a mask yet; draw one, or track, then export")
    stem = re.sub(r"[^\w-]+", "_", Path(session.title).stem).strip("_")[:60] or "video"
    ending = KINDS[kind]
    if kind in ("webm", "mov"):
        if object_id not in session.objects:
            raise InputError("choose the object to cut out")
        ending = "_" + (re.sub(r"[^\w-]+", "_", session.objects[object_id]["name"]).strip("_") or "object") + ending
    path = session.results / "exports" / f"{stem}{ending}"
    path.unlink(missing_ok=True)
    with closing(reader):
        if kind == "masks":
            _write_zip(job, session, path, frames)
        elif kind == "coco":
            _write_coco(job, session, path, frames)
        elif kind == "overlay":
            hidden = [i for i, item in session.objects.items() if item["hidden"]]
            with VideoWriter(path, reader.size, reader.time_base, reader.rate) as video:
                for frame in range(reader.length):
                    picture = reader.read(frame)
                    shown = labels.read(frame)
                    shown[np.isin(shown, hidden)] = 0
                    video.write(overlay(picture.image, shown, opacity, session.colors()), picture.time)
                    job.progress(reader.length)
        else:
            span = range(frames[0], frames[-1] + 1)
            with AlphaWriter(path, reader.size, reader.time_base, reader.rate) as video:
                for frame in span:
                    picture = reader.read(frame)
                    video.write(picture.image, labels.read(frame) == object_id, picture.time - reader.time(frames[0]))
                    job.progress(len(span))
    job.notes = {"file": path.name, "bytes": path.stat().st_size}
    return f"{path.name} is ready."


def take_in(job: Job, session: Session, path: Path, frame: int, object_id: int | None, snap_colors: bool) -> str:
    """Masks of many frames from a file: a zip of images, COCO JSON, or a video with transparency.

    Frames that were drawn and not tracked are known from what an export from here notes; in a file that notes nothing,
    every mask counts as drawn.

    Args:
        frame: where a video with transparency begins.
        object_id: the object that such a video shows, None: a new one.
    """
    suffix, reader, labels = path.suffix.lower(), session.reader, session.labels
    try:
        if suffix in (".mov", ".webm"):
            item = session.objects.get(object_id) or session.add_object()
            count = _take_alpha(job, session, path, frame, item["id"])
        else:
            names = frame_numbers(reader)
            read = _read_zip if suffix == ".zip" else _read_json
            notes, masks = read(session, path, names, snap_colors)
            drawn = notes.get("drawn")
            count = 0
            for number, mask in masks:
                ids = set(np.unique(mask).tolist()) - {0}
                for new in sorted(ids - set(session.objects)):
                    session.add_object(new, **_described(notes, new))
                labels.write(number, mask)
                marks = ids if drawn is None else {int(i) for i in drawn.get(str(number), [])}
                if marks:
                    labels.mark(number, marks)
                count += 1
                job.progress(notes["count"], frame=number)
    finally:
        session.discard(path)
    return f"{count} masks were taken in from {path.name}."


def frame_numbers(reader: FrameReader) -> dict[str, int]:
    """Frames by name."""
    return {reader.name(i): i for i in range(reader.length)}


def _notes(session: Session) -> dict:
    labels = session.labels
    return {
        "objects": [{key: item[key] for key in ("id", "name", "color")} for item in session.objects.values()],
        "drawn": {str(frame): sorted(labels.marked(frame)) for frame in labels.marked_frames()},
    }


def _described(notes: dict, object_id: int) -> dict:
    """Name and colour that notes hold for an object."""
    items = notes.get("objects")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("id") == object_id:
            return {key: str(item.get(key, "")) for key in ("name", "color")}
    return {}


def _write_zip(job: Job, session: Session, path: Path, frames: list[int]) -> None:
    partial, mask = path.with_suffix(".partial"), path.with_name("mask.png")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:  # PNGs do not shrink further
            archive.writestr(NOTES, json.dumps(_notes(session), indent=1))
            for frame in frames:
                write_mask(mask, session.labels.read(frame))
                archive.write(mask, f"masks/{session.reader.name(frame)}.png")
                job.progress(len(frames))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        mask.unlink(missing_ok=True)


def _write_coco(job: Job, session: Session, path: Path, frames: list[int]) -> None:
    def each() -> Iterator[tuple[int, str, np.ndarray]]:
        for frame in frames:
            yield frame, f"{session.reader.name(frame)}.png", session.labels.read(frame)
            job.progress(len(frames))

    notes = _notes(session)
    partial = path.with_suffix(".partial")
    try:
        write_coco(partial, session.reader.size, notes["objects"], each(), {"drawn": notes["drawn"]})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_json(session: Session, path: Path, names: dict[str, int], snap_colors: bool) -> tuple[dict, Iterator]:
    info, categories, found = read_coco(path, session.reader.size, names)
    objects = [
        {"id": i, "name": item.get("name", ""), "color": item.get("color", "")} for i, item in categories.items()
    ]
    notes = {"objects": objects, "drawn": _drawn(info), "count": len(found)}
    return notes, ((frame, decode(items, session.reader.size)) for frame, items in sorted(found.items()))


def _read_zip(session: Session, path: Path, names: dict[str, int], snap_colors: bool) -> tuple[dict, Iterator]:
    size = session.reader.size
    limit = 8 * size[0] * size[1] + 2**20
    try:
        archive = zipfile.ZipFile(path)
        entries = archive.infolist()
        if len(entries) > 2 * len(names) + 16:
            raise InputError(f"{path.name}: {len(entries)} entries are more than the video has frames")
        masks, notes = {}, {}
        for entry in entries:
            name = Path(entry.filename)
            if entry.is_dir() or name.name.startswith(".") or "__MACOSX" in name.parts:
                continue
            if name.name == NOTES:
                notes = json.loads(_member(archive, entry, 64 * 2**20, path))
                notes = notes if isinstance(notes, dict) else {}
            elif name.suffix.lower() in IMAGE_SUFFIXES:
                if name.stem not in names:
                    raise InputError(f"{path.name}: {entry.filename}: there is no frame {name.stem} in this video")
                masks[names[name.stem]] = entry
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path.name}: is no whole zip file ({error})") from error
    if not masks:
        raise InputError(f"{path.name}: holds no image; give a zip of masks named like the frames")

    def each() -> Iterator[tuple[int, np.ndarray]]:
        colors: dict[int, tuple[int, int, int]] = {}
        with archive:
            for frame, entry in sorted(masks.items()):
                file = path.with_name("mask" + Path(entry.filename).suffix.lower())
                file.write_bytes(_member(archive, entry, limit, path))
                mask = read_mask(file, size=size, snap_colors=snap_colors, known_colors=colors)
                colors.update(mask.colors or {})
                yield frame, mask.labels

    return notes | {"drawn": _drawn(notes), "count": len(masks)}, each()


def _drawn(notes: object) -> dict | None:
    drawn = notes.get("drawn") if isinstance(notes, dict) else None
    if not isinstance(drawn, dict) or not all(
        isinstance(ids, list) and all(isinstance(i, int) for i in ids) for ids in drawn.values()
    ):
        return None
    return drawn


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int, path: Path) -> bytes:
    """The bytes of an entry; one that unpacks to more than `limit` is refused before it does."""
    try:
        with archive.open(entry) as file:
            data = file.read(limit + 1)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{path.name}: {entry.filename} cannot be unpacked ({error})") from error
    if len(data) > limit:
        raise InputError(f"{path.name}: {entry.filename} unpacks to more than a mask of this video can have")
    return data


def _take_alpha(job: Job, session: Session, path: Path, frame: int, object_id: int) -> int:
    labels, count = session.labels, 0
    with closing(read_alpha(path, session.reader.size, FORMATS)) as masks:
        for number, mask in zip(range(frame, session.reader.length), masks, strict=False):
            now = labels.read(number)
            now[now == object_id] = 0
            now[mask] = object_id
            labels.write(number, now)
            count += 1
            job.progress(session.reader.length - frame, frame=number)
    if not count:
        raise InputError(f"{path.name}: not one frame can be decoded")
    return count
