"""Image files that a person hands in: found in natural order, checked, decoded upright.

Shared by frame folders (`data.video`) and masks (`data.masks`).
"""

import io
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from utils.errors import InputError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

# What the content may be: PIL knows formats for which it starts other programs (EPS) or that no person means.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")

# A few kilobytes of PNG can ask for gigabytes of memory. An 8K frame has 33 million pixels.
MAX_PIXELS = int(os.environ.get("VOS_MAX_PIXELS", 2**26))


def natural_key(name: str) -> list:
    """Sorting key under which 2 comes before 10, and upper and lower case are one."""
    return [int(part) if i % 2 else part.lower() for i, part in enumerate(re.split(r"(\d+)", name))]


def list_images(folder: str | Path) -> tuple[list[Path], int]:
    """The image files of a folder in natural order, and how many other entries it holds.

    Hidden files (`.DS_Store`, `._00000.jpg`) and files that are no images count as other entries.

    Raises:
        InputError: the folder is missing, unreadable, holds no image, or holds two images of one stem.
    """
    folder = Path(folder)
    try:
        entries = sorted(os.listdir(folder), key=lambda name: (natural_key(name), name))
    except OSError as error:
        raise InputError(f"{folder}: cannot list the folder ({error.strerror}); give a readable folder") from error
    files = [
        folder / name for name in entries if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES
    ]
    if not files:
        raise InputError(f"{folder}: the folder holds no image ({', '.join(IMAGE_SUFFIXES)})")
    first: dict[str, Path] = {}
    for file in files:
        if file.stem in first:
            raise InputError(f"{file}: {first[file.stem].name} has the same stem; keep one image per name")
        first[file.stem] = file
    return files, len(entries) - len(files)


def read_image(path: str | Path) -> Image.Image:
    """Decode an image file, whole or not at all, turned upright by its EXIF orientation.

    Raises:
        InputError: missing, not a file, empty, truncated, damaged, no image, or more than `MAX_PIXELS` pixels.
    """
    return _decode(Path(path), read_bytes(Path(path)))


def read_rgb(path: str | Path) -> np.ndarray:
    """Decode an image file to (H, W, 3) uint8 RGB, upright.

    Grey is repeated, 16 bit keeps its upper byte, transparency is dropped.

    Raises:
        InputError: as `read_image`, and for floating-point images.
    """
    data = read_bytes(Path(path))
    if data.startswith(b"\xff\xd8"):
        image = _decode_jpeg(Path(path), data)
        if image is not None:
            return image
    image = _decode(Path(path), data)
    if image.mode == "F":
        raise InputError(f"{path}: floating-point pixels have no fixed white; save 8 or 16 bit")
    if image.mode.startswith("I"):
        grey = (np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _decode(path: Path, data: bytes) -> Image.Image:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(path, data)
    with _decoding(path):
        image = _open(path, data)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return image


def _decode_jpeg(path: Path, data: bytes) -> np.ndarray | None:
    """JPEG through OpenCV, twice as fast as PIL with the same pixels; None where PIL has to look at the file."""
    import cv2

    # OpenCV fills what a cut file lacks with grey and says nothing: only whole files (end marker present) go there.
    if b"\xff\xd9" not in data[-64:]:
        return None
    with _decoding(path):
        if _open(path, data).mode not in ("L", "RGB"):
            return None
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


def _open(path: Path, data: bytes) -> Image.Image:
    """Read the header; refuse what would need too much memory."""
    # MAX_PIXELS takes the place of PIL's own limit, which only warns up to twice its value.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # about damage: the error says it
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < MAX_PIXELS:
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InputError(f"{path}: more pixels than the limit of {MAX_PIXELS} (VOS_MAX_PIXELS raises it)") from error
    check_pixels(path, image.height, image.width)
    return image


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Decoders raise nearly anything on damaged files; the user gets one kind of error."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, UnidentifiedImageError):
            reason = "unknown format"
        raise InputError(f"{path}: the image cannot be decoded ({reason}); give a whole image file") from error


def picture_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of an image file when upright, from its header. Raises InputError as `read_image`."""
    path = Path(path)
    with _decoding(path):
        image = _open(path, read_bytes(path))
        lies = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
    return (image.width, image.height) if lies else (image.height, image.width)


def check_pixels(path: str | Path, height: int, width: int) -> None:
    """Refuse a picture of more than `MAX_PIXELS` pixels before memory is taken for it."""
    if height * width > MAX_PIXELS:
        raise InputError(
            f"{path}: {width}x{height} pixels are more than the limit of {MAX_PIXELS} (VOS_MAX_PIXELS raises it)"
        )


def read_bytes(path: Path) -> bytes:
    """The content of an image file. Raises InputError when it is missing, empty, no file, or larger than any image."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give an image file")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is no regular file; give an image file")
    try:
        if path.stat().st_size > 8 * MAX_PIXELS:  # 16-bit RGBA, not compressed
            raise InputError(f"{path}: the file is larger than any image of {MAX_PIXELS} pixels, the limit")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give an existing image file") from error
    if not data:
        raise InputError(f"{path}: the file is empty; give a whole image")
    return data


def _check_png(path: Path, data: bytes) -> None:
    """Compare the checksum of every chunk; PIL skips those of the pixels and would return wrong ids."""
    position = 8
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        body = data[position + 4 : position + 8 + length]
        checksum = data[position + 8 + length : position + 12 + length]
        if len(checksum) < 4:
            break
        if zlib.crc32(body) != int.from_bytes(checksum, "big"):
            raise InputError(f"{path}: the PNG is damaged near byte {position}; give a whole image")
        if body[:4] == b"IEND":
            return
        position += 12 + length
    raise InputError(f"{path}: the PNG is truncated after {len(data)} bytes; give a whole image")
