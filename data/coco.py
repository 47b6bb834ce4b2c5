"""Masks of a video as COCO-style JSON with run-length encoding (RLE), in and out.

RLE runs down the columns and begins with background; `counts` is either the list of run lengths or COCO's text form of
it: every length as a signed difference to the one before the last, in groups of five bits with a sign and a
continuation bit, plus 48. An annotation has `category_id` and `track_id` = object id, so that tools for videos and for
images both find the objects.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from utils.errors import InputError


def encode_rle(mask: np.ndarray) -> dict:
    """A mask (H, W) of booleans as {"size": [h, w], "counts": text}."""
    runs = _runs(mask)
    text = bytearray()
    for i, run in enumerate(runs):
        value = run - runs[i - 2] if i > 2 else run
        while True:
            bits = value & 31
            value >>= 5
            more = value != (-1 if bits & 16 else 0)
            text.append(bits + 32 * more + 48)
            if not more:
                break
    return {"size": list(mask.shape), "counts": text.decode("ascii")}


def decode_rle(segmentation: Mapping, size: tuple[int, int]) -> np.ndarray:
    """The mask (H, W) of booleans of an RLE, with counts as text or as a list.

    Raises:
        InputError: not of this form, of another size than (h, w), or with runs that do not fill it exactly.
    """
    try:
        given, counts = [int(side) for side in segmentation["size"]], segmentation["counts"]
        runs = np.array(_read_counts(counts) if isinstance(counts, str) else counts, np.int64).reshape(-1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError("a segmentation is no RLE with size and counts") from error
    if given != list(size):
        raise InputError(f"an RLE is {given[1:]}x{given[:1]} pixels, the frames are {size[1]}x{size[0]}")
    if (runs < 0).any() or (runs > size[0] * size[1]).any() or runs.sum() != size[0] * size[1]:
        raise InputError("an RLE is damaged: its runs do not fill the picture")
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(size[1], size[0]).T


def write_coco(
    path: Path,
    size: tuple[int, int],
    objects: Iterable[Mapping],
    frames: Iterable[tuple[int, str, np.ndarray]],
    info: Mapping | None = None,
) -> None:
    """Write masks as they come; neither they nor the file are held in memory.

    Args:
        path: the file.
        size: (h, w).
        objects: {"id", "name", ...} of each; all of it is kept in `categories`.
        frames: number, file name and label map (H, W) of each.
        info: more to keep in the file.
    """
    height, width = size
    notes = path.with_name(f"{path.name}.annotations")
    try:
        with path.open("w") as file, notes.open("w+") as annotations:
            head = {"info": {"description": "masks of a video; a category for each object", **(info or {})}}
            file.write(json.dumps(head)[:-1] + ', "categories": ' + json.dumps([dict(item) for item in objects]))
            file.write(', "images": [')
            count = 0
            for place, (number, name, labels) in enumerate(frames):
                image = {"id": number, "file_name": name, "width": width, "height": height, "frame_index": number}
                file.write(("," if place else "") + "\n" + json.dumps(image))
                for object_id in np.unique(labels[labels > 0]).tolist():
                    mask = labels == object_id
                    rows, columns = np.flatnonzero(mask.any(1)).tolist(), np.flatnonzero(mask.any(0)).tolist()
                    count += 1
                    annotation = {
                        "id": count,
                        "image_id": number,
                        "category_id": object_id,
                        "track_id": object_id,
                        "segmentation": encode_rle(mask),
                        "area": int(mask.sum()),
                        "bbox": [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1],
                        "iscrowd": 0,
                    }
                    annotations.write(("," if count > 1 else "") + "\n" + json.dumps(annotation))
            file.write('],\n"annotations": [')
            annotations.seek(0)
            while block := annotations.read(1 << 20):
                file.write(block)
            file.write("]}\n")
    finally:
        notes.unlink(missing_ok=True)


def read_coco(
    path: Path, size: tuple[int, int], frame_names: Mapping[str, int]
) -> tuple[object, dict[int, dict], dict[int, list]]:
    """Read masks in COCO's form: RLE or polygons, by frame.

    Args:
        path: JSON file.
        size: (h, w) of the frames.
        frame_names: numbers of the frames by name; an image belongs to the frame of its file name without ending.

    Returns:
        Its info, {object id: category} and {frame: [(object id, segmentation), ...]}, of which `decode` makes masks.

    Raises:
        InputError: no such file, images of another size, or of frames that there are not.
    """
    try:
        content = json.loads(path.read_bytes())
        images = {image["id"]: image for image in content["images"]}
        categories = {int(item["id"]): dict(item) for item in content["categories"]}
        frames: dict[object, int] = {}
        for image in images.values():
            name = Path(str(image["file_name"])).stem
            if name not in frame_names:
                raise InputError(f"{path}: there is no frame {name} in this video")
            if [image["height"], image["width"]] != list(size):
                raise InputError(
                    f"{path}: its images are {image['width']}x{image['height']}, the frames {size[1]}x{size[0]}"
                )
            frames[image["id"]] = frame_names[name]
        found: dict[int, list] = {frame: [] for frame in frames.values()}
        used: set[int] = set()
        for annotation in content["annotations"]:
            object_id = int(annotation.get("track_id", annotation["category_id"]))
            if not 0 < object_id < 65536:
                raise InputError(f"{path}: object id {object_id}; ids are 1..65535")
            used.add(object_id)
            found[frames[annotation["image_id"]]].append((object_id, annotation["segmentation"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: no COCO JSON with images, annotations and categories") from error
    return content.get("info"), {object_id: categories.get(object_id, {}) for object_id in sorted(used)}, found


def decode(segmentations: Iterable[tuple[int, object]], size: tuple[int, int]) -> np.ndarray:
    """A label map (H, W) int32 of one frame of `read_coco`; later objects lie on top of earlier ones."""
    labels = np.zeros(size, np.int32)
    for object_id, segmentation in segmentations:
        if isinstance(segmentation, list):
            labels[_fill(segmentation, size)] = object_id
        else:
            labels[decode_rle(segmentation, size)] = object_id
    return labels


def _fill(polygons: list, size: tuple[int, int]) -> np.ndarray:
    import cv2

    mask = np.zeros(size, np.uint8)
    try:
        points = [np.array(polygon, np.float64).reshape(-1, 2) for polygon in polygons]
    except (ValueError, TypeError) as error:
        raise InputError("a polygon is no list of x and y in turn") from error
    if any(not np.isfinite(polygon).all() or np.abs(polygon).max(initial=0) > 1e5 for polygon in points):
        raise InputError("a polygon has points that are no places in a picture")
    cv2.fillPoly(mask, [np.rint(polygon).astype(np.int32) for polygon in points if len(polygon)], 1)
    return mask > 0


def _runs(mask: np.ndarray) -> list[int]:
    flat = np.asarray(mask, bool).T.reshape(-1)
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    runs = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return [0, *runs] if flat.size and flat[0] else runs


def _read_counts(text: str) -> list[int]:
    runs: list[int] = []
    value = shift = 0
    for character in text.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 40:
            raise ValueError("not COCO's text form")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("the text ends within a number")
    return runs
