"""Masks in and out: whatever file a person draws objects in becomes a label map, and comes back as an indexed PNG.

What a pixel's value means, by kind of file:

- indexed PNG (also GIF, BMP): the index is the object id, whatever its colour. Only where an editor sorted the palette,
  so that black is in use but not index 0, the colours count, as below.
- 16-bit grey PNG: the value is the id, up to 65535.
- 8-bit or 1-bit grey: the value is the id; a mask of 0 and 255 holds the one object 255.
- colours: black and fully transparent are background. If all other colours are colours of the DAVIS or VOC palette, the
  id is the palette index; else the ids are 1..n in the order of the colours (red, then green, then blue).

A mask holds one flat value per object. Soft edges and JPEG put hundreds of values between them; such a file is refused,
or on request snapped to its main values. Only ground truth of a benchmark knows a void label; here 255 is an object.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from data.images import list_images, read_image
from utils.errors import InputError

MAX_ID = 65535
MAX_COLORS = 256  # more distinct colours than this are no hand-made mask

_BLOCK = np.ones((3, 3), np.uint8)
_SNAP_TOLERANCE = 40  # largest distance per channel (of 255) at which a value may still belong to a main value
_OUR_16_BIT = "pixel value = object id"  # comment in the 16-bit files written here

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mask:
    """A label map and what was done to get it.

    Attributes:
        labels: (H, W) int32, 0 = background, else the object id.
        colors: id -> (r, g, b) for a mask that was drawn in colours, else None.
        changed_pixels: how many pixels `snap_colors` changed.
    """

    labels: np.ndarray
    colors: dict[int, tuple[int, int, int]] | None = None
    changed_pixels: int = 0


@cache
def _voc_colors() -> np.ndarray:
    """(65536, 3) uint8: the bits of an id dealt out to red, green and blue, highest bit first (PASCAL VOC)."""
    ids = np.arange(MAX_ID + 1)
    colors = np.zeros((MAX_ID + 1, 3), np.uint8)
    for bit in range(16):
        colors[:, bit % 3] |= ((ids >> bit & 1) << (7 - bit // 3)).astype(np.uint8)
    return colors


def palette() -> list[int]:
    """The 256 colours of DAVIS result files as 768 values: 22 VOC colours (191 for 192), then greys."""
    greys = np.repeat(np.arange(256)[:, None], 3, axis=1)
    greys[:22] = np.where(_voc_colors()[:22] == 192, 191, _voc_colors()[:22])
    return greys.ravel().tolist()


@cache
def _palette_bytes() -> bytes:
    return bytes(palette())


def read_mask(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    snap_colors: bool = False,
    known_colors: dict[int, tuple[int, int, int]] | None = None,
) -> Mask:
    """Read a mask file; the module's docstring says which value becomes which id.

    Args:
        path: image file.
        size: (h, w) that the mask must have.
        snap_colors: turn soft edges and compression noise into the main values instead of refusing the file.
        known_colors: colours of earlier masks of the same video; they keep their ids.

    Raises:
        InputError: unreadable, of another size, with soft edges or too many colours.
    """
    path = Path(path)
    image = read_image(path)
    if size is not None and (image.height, image.width) != tuple(size):
        raise InputError(
            f"{path}: the mask is {image.width}x{image.height} pixels, the frames are {size[1]}x{size[0]}; give a mask"
            " of the frames' size"
        )
    codes, trusted, kind = _codes(path, image)
    if trusted:
        return Mask(codes.astype(np.int32))

    values = _distinct(codes)
    if kind != "index" and values[0] > 0:
        values = np.append(values[:1] * 0, values)  # black is background, also where compression left it out
    features = _features(values, kind, image)
    lossy = image.format in ("JPEG", "MPO") and len(values) > 2
    changed = 0
    picture = _is_picture(codes, values)
    if picture or lossy or (kind == "color" and len(values) > MAX_COLORS) or _has_soft_edges(codes, values, features):
        problem = f"{path}: {len(values)} distinct values"
        if picture:
            raise InputError(f"{problem} and hardly a flat area; this is a picture, give a mask")
        if not snap_colors:
            raise InputError(
                f"{problem}, most of them from soft edges or lossy compression; save a PNG with one flat value per"
                " object, or snap to the main values (snap_colors)"
            )
        snapped = _snap(codes, values, features)
        if snapped is None:
            raise InputError(f"{problem} and none that fills an area; this is a picture, give a mask")
        changed = int(np.count_nonzero(snapped != codes))
        codes, values = snapped, _distinct(snapped)
    if kind != "color":
        return Mask(codes.astype(np.int32), changed_pixels=changed)

    colors = _color_ids([tuple(rgb) for rgb in _unpack(values[values > 0])[:, :3].tolist()], known_colors or {})
    ids = np.array([0 if code == 0 else colors[tuple(_unpack(code)[:3].tolist())] for code in values], np.int32)
    labels = ids[np.searchsorted(values, codes)]
    return Mask(labels, {i: rgb for rgb, i in sorted(colors.items(), key=lambda item: item[1])}, changed)


def write_mask(path: str | Path, labels: np.ndarray) -> None:
    """Write a label map as indexed PNG with the DAVIS palette; with ids above 255 as 16-bit grey PNG.

    Args:
        path: file that appears at once and whole.
        labels: (H, W) integers 0..65535.
    """
    labels = np.asarray(labels)
    top = int(labels.max(initial=0))
    if labels.ndim != 2 or top > MAX_ID or labels.min(initial=0) < 0:
        raise ValueError(f"a label map is (H, W) with ids 0..{MAX_ID}, not {labels.shape} with {labels.min()}..{top}")
    comment = None
    if top < 256:
        image = Image.fromarray(np.ascontiguousarray(labels, np.uint8))
        image.putpalette(_palette_bytes())
    else:
        image = Image.fromarray(np.ascontiguousarray(labels, np.uint16))
        comment = PngImagePlugin.PngInfo()
        comment.add_text("Comment", _OUR_16_BIT)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        image.save(temporary, format="PNG", compress_level=3, pnginfo=comment)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_mask_folder(folder: str | Path, frame_names: list[str] | None) -> dict[str, Path]:
    """The masks of a folder by the name of the frame that they belong to.

    Args:
        folder: masks named like the frames, of any image type: `00012.png` belongs to `00012.jpg`.
        frame_names: names of all frames, or None for a video, whose frames are numbered from 00000 with five digits.

    Raises:
        InputError: no mask in the folder, or one that no frame can have: a wrong name would lose a correction silently.
    """
    files, ignored = list_images(folder)
    if ignored:
        logger.warning("%s: %d entries are no images and were ignored", folder, ignored)
    if frame_names is None:
        strays = [file for file in files if not (file.stem.isdecimal() and file.stem == f"{int(file.stem):05d}")]
        right = "frames of a video are named 00000, 00001, ..."
    else:
        known = set(frame_names)
        strays = [file for file in files if file.stem not in known]
        right = f"frames are named {frame_names[0]} .. {frame_names[-1]}"
    if strays:
        raise InputError(f"{strays[0]}: no frame of that name ({len(strays)} of {len(files)} masks like this); {right}")
    return {file.stem: file for file in files}


def overlay(
    image: np.ndarray,
    labels: np.ndarray,
    alpha: float = 0.5,
    colors: Mapping[int, tuple[int, int, int]] | None = None,
) -> np.ndarray:
    """Paint objects over a picture: a tint of strength `alpha` inside, the full colour along the outline.

    Every id has a colour of its own (the VOC colours, of which the DAVIS palette keeps the first 21).

    Args:
        image: (H, W, 3) uint8 RGB.
        labels: (H, W) integers.
        colors: (r, g, b) of ids that get another colour.

    Returns:
        A new (H, W, 3) uint8 picture.
    """
    import cv2

    table = _voc_colors()
    if colors:
        table = table.copy()
        table[list(colors)] = list(colors.values())
    if labels.max(initial=0) < 256:
        labels = np.ascontiguousarray(labels, np.uint8)
        color = cv2.LUT(cv2.cvtColor(labels, cv2.COLOR_GRAY2RGB), table[:256, None])
    else:
        labels = np.ascontiguousarray(labels, np.uint16)
        color = table[labels]
    out = image.copy()
    cv2.copyTo(cv2.addWeighted(image, 1 - alpha, color, alpha, 0), cv2.compare(labels, 0, cv2.CMP_NE), out)
    return cv2.copyTo(color, cv2.compare(cv2.erode(labels, _BLOCK), labels, cv2.CMP_NE), out)


def _codes(path: Path, image: Image.Image) -> tuple[np.ndarray, bool, str]:
    """(H, W) unsigned pixel values with 0 as background; whether they are ids for sure; index, grey or color."""
    mode = image.mode
    if mode == "P":
        index = np.asarray(image)
        used = np.flatnonzero(np.bincount(index.ravel(), minlength=1))
        colors = np.asarray(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
        if used[-1] >= len(colors):
            raise InputError(f"{path}: the mask uses index {used[-1]} but its palette ends at {len(colors) - 1}")
        black = ~colors.any(axis=1)
        if black[0] or not black[used].any():
            return index, any(np.array_equal(colors[used], known[used]) for known in _palettes()), "index"
    elif mode == "1":
        return np.asarray(image).astype(np.uint8), True, "grey"
    if mode == "L":
        # PIL stretches PNGs of 2 and 4 bits to 0..255; the value in the file is meant.
        return np.asarray(image) // {2: 85, 4: 17}.get(_png_depth(path), 1), False, "grey"
    if mode == "LA":
        grey, opacity = np.moveaxis(np.asarray(image).astype(np.uint16), 2, 0)
        return (grey * opacity // 255).astype(np.uint8), False, "grey"
    if mode.startswith("I"):
        values = np.asarray(image)
        if values.max(initial=0) > MAX_ID or values.min(initial=0) < 0:
            raise InputError(f"{path}: values {values.min()}..{values.max()}; object ids lie in 1..{MAX_ID}")
        return values.astype(np.uint16), image.info.get("Comment") == _OUR_16_BIT, "grey"
    if mode == "F":
        raise InputError(f"{path}: floating-point pixels; object ids are whole numbers, save an indexed or grey PNG")
    rgba = np.asarray(image.convert("RGBA")).astype(np.uint32)
    codes = rgba[..., 0] << 24 | rgba[..., 1] << 16 | rgba[..., 2] << 8 | rgba[..., 3]
    codes[(codes < 256) | (rgba[..., 3] == 0)] = 0
    return codes, False, "color"


def _png_depth(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(25)
    return head[24] if head.startswith(b"\x89PNG") else 8


def _palettes() -> list[np.ndarray]:
    """The palettes, (256, 3), in which object masks are drawn: DAVIS results, and VOC as in DAVIS ground truth."""
    return [np.array(palette(), np.uint8).reshape(256, 3), _voc_colors()[:256]]


def _unpack(codes: np.ndarray) -> np.ndarray:
    """(..., 4) r, g, b, a of packed colours."""
    return np.stack([np.asarray(codes) >> shift & 255 for shift in (24, 16, 8, 0)], axis=-1)


def _distinct(codes: np.ndarray) -> np.ndarray:
    """Sorted distinct values; a label map changes rarely along a row, which leaves little to sort."""
    flat = codes.ravel()
    return np.unique(np.append(flat[:1], flat[1:][flat[1:] != flat[:-1]]))


def _features(values: np.ndarray, kind: str, image: Image.Image) -> np.ndarray:
    """(n, c) float32 in 0..255: how each distinct value looks, to tell which lie close together."""
    if kind == "index":
        return np.asarray(image.getpalette("RGB"), np.float32).reshape(-1, 3)[values]
    if kind == "grey":
        return (values / max(1.0, values.max(initial=0) / 255))[:, None].astype(np.float32)
    rgba = _unpack(values).astype(np.float32)
    return rgba[:, :3] * rgba[:, 3:] / 255


def _is_picture(codes: np.ndarray, values: np.ndarray) -> bool:
    """Whether hardly a pixel equals its neighbours: up to 0.2 in photographs, 0.33 and more in masks from JPEG."""
    flat = (codes[:-1, :-1] == codes[1:, :-1]) & (codes[:-1, :-1] == codes[:-1, 1:])
    return len(values) > 16 and flat.mean() < 0.25


def _has_soft_edges(codes: np.ndarray, values: np.ndarray, features: np.ndarray) -> bool:
    """Whether many values are not objects but lie on the edges between them.

    Such a value never fills a block of 3x3 pixels and lies between its neighbours in brightness; an object as small as
    that is the brightest or darkest spot of its surroundings.
    """
    import cv2

    if len(values) < 5:
        return False
    index = np.searchsorted(values, codes).astype(np.uint16)
    flat = cv2.erode(index, _BLOCK) == cv2.dilate(index, _BLOCK)
    if len(values) > 16 and flat.mean() < 0.2:  # a dark photograph; 0.6 and more in masks, also of 44 objects
        return True
    solid = np.bincount(index[flat], minlength=len(values)) > 0
    light = features.sum(axis=1)[index]
    between = (cv2.erode(light, _BLOCK) < light) & (light < cv2.dilate(light, _BLOCK))
    counts = np.bincount(index.ravel(), minlength=len(values))
    bridging = np.bincount(index.ravel(), between.ravel(), minlength=len(values)) > 0.5 * counts
    soft = np.count_nonzero(bridging & ~solid)
    return soft >= 3 and soft >= np.count_nonzero(solid)


def _snap(codes: np.ndarray, values: np.ndarray, features: np.ndarray) -> np.ndarray | None:
    """Replace every value by a main one: the close ones by value, those of soft edges by the nearest pixel.

    A main value is a frequent one that, together with the values close to it, fills a block of 3x3 pixels.
    None where much of the image is close to no main value.
    """
    import cv2

    index = np.searchsorted(values, codes)
    counts = np.bincount(index.ravel(), minlength=len(values))
    main = np.full(len(values), -1)  # position of the main value that each value belongs to
    open_values = np.ones(len(values), bool)
    order = np.argsort(-counts, kind="stable")
    if values[0] == 0:  # background is 0 itself, not the most frequent value near it
        order = np.append(0, order[order != 0])
    for position in order:
        if not open_values[position]:
            continue
        distance = np.abs(features - features[position]).max(axis=1)
        near = open_values & (distance <= _SNAP_TOLERANCE)
        open_values &= ~near
        # In a soft gradient no value stands out from its surroundings.
        stands_out = counts[near & (distance <= _SNAP_TOLERANCE // 5)].sum() > 0.4 * counts[near].sum()
        if stands_out and cv2.erode(near[index].astype(np.uint8), _BLOCK, borderValue=0).any():
            main[near] = position
    nearest = main[index]
    unsure = nearest < 0
    if unsure.mean() > 0.3:
        return None
    _, sites = cv2.distanceTransformWithLabels(
        unsure.astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5, labelType=cv2.DIST_LABEL_PIXEL
    )
    site_main = np.zeros(sites.max() + 1, nearest.dtype)
    site_main[sites[~unsure]] = nearest[~unsure]
    return values[site_main[sites]]


def _color_ids(
    colors: list[tuple[int, int, int]], known: dict[int, tuple[int, int, int]]
) -> dict[tuple[int, int, int], int]:
    """Ids of colours, see the module's docstring; `known` ones keep theirs, and the table then holds these too."""
    table = {tuple(rgb): i for i, rgb in known.items()}
    every = {*colors, *table}
    for known_palette in _palettes():
        indices = {rgb: i for i, rgb in reversed(list(enumerate(map(tuple, known_palette.tolist()))))}
        if all(rgb in indices for rgb in every) and all(indices[rgb] == i for rgb, i in table.items()):
            return {rgb: indices[rgb] for rgb in sorted(every)}
    for rgb in sorted(set(colors) - set(table)):
        table[rgb] = max(table.values(), default=0) + 1
    return table
