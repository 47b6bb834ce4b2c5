"""Label maps of benchmarks, true and predicted: read strictly, as a score depends on every pixel.

`data.masks` reads what people draw and guesses ids from colours; here a value is an id, or the file is refused.
"""

import struct
import zlib
from pathlib import Path

import numpy as np

from data.images import MAX_PIXELS, read_bytes, read_image
from utils.errors import InputError


def read_label_png(path: Path) -> np.ndarray:
    """Reads a PNG whose pixel values are object ids: (H, W) of an integer type.

    Raises InputError for a file that is missing, damaged, no PNG or a colour picture.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; a mask for this frame is needed")
    labels = _decode_plain(read_bytes(path))
    return _decode_any(path) if labels is None else labels


def label_ids(labels: np.ndarray) -> set[int]:
    """The distinct values of a label map. It changes rarely along a row, which leaves little to sort."""
    flat = labels.reshape(-1)
    changes = flat[1:][flat[1:] != flat[:-1]]
    return set(np.unique(changes).tolist()) | set(flat[:1].tolist())


def _decode_plain(data: bytes) -> np.ndarray | None:
    """Pixels of a whole PNG of 8-bit values without interlace and row filters; None for every other file.

    That is how programs write masks, and its pixels are what zlib returns: PIL, which copies them twice more, needs
    double the time.
    """
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 33:
        return None
    width, height, depth, color, _, _, interlace = struct.unpack(">IIBBBBB", data[16:29])
    if depth != 8 or color not in (0, 3) or interlace or not 0 < width * height <= MAX_PIXELS:
        return None
    position, kind, packed = 8, b"", []
    while kind != b"IEND":
        length = int.from_bytes(data[position : position + 4], "big")
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        checksum = data[position + 8 + length : position + 12 + length]
        if kind == b"eXIf" or zlib.crc32(kind + body).to_bytes(4, "big") != checksum:
            return None
        if kind == b"IDAT":
            packed.append(body)
        position += 12 + length
    size, stream = height * (width + 1), zlib.decompressobj()
    try:
        pixels = stream.decompress(b"".join(packed), size + 1)  # no more, whatever is in there
    except zlib.error:
        return None
    if len(pixels) != size or not stream.eof:
        return None
    rows = np.frombuffer(pixels, np.uint8).reshape(height, width + 1)  # the first value of a row names its filter
    return None if rows[:, 0].any() else rows[:, 1:].copy()


def _decode_any(path: Path) -> np.ndarray:
    image = read_image(path)
    if image.format != "PNG" or image.mode not in ("P", "L", "1", "I", "I;16", "I;16B"):
        raise InputError(
            f"{path}: is a colour picture or no PNG ({image.format}, {image.mode}); "
            "an indexed or grey PNG of object ids is needed"
        )
    labels = np.asarray(image)
    if image.mode == "L":  # PIL stretches grey values of 2 and 4 bits to 0..255
        with path.open("rb") as file:
            labels = labels // {2: 85, 4: 17}.get(file.read(25)[24], 1)
    return labels.astype(np.uint8) if image.mode == "1" else labels
