"""What is done to the frames of a training clip: scale, crop, flip, pad, colours, merging.

The order and the default values are those of the published AOT / DeAOT training. Every function takes the random
generator it draws from. Images are (h, w, 3) uint8 RGB, label maps (h, w) uint8 with 255 = ignore; cv2 does the pixel
work, because it is several times faster on uint8 images than tensor code, and a loader has to keep up with a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

FILL = (124, 116, 104)  # the ImageNet mean colour
IGNORE = 255


@dataclass(frozen=True)
class ColorJitter:
    """Strengths of a random change of colours, and how often each change is made.

    Factors of brightness, contrast and saturation are uniform in 1 - x .. 1 + x, the hue turns by up to `hue` of the
    circle, in random order. `blur` is a Gaussian with a radius (sigma) uniform in `blur_radius` pixels.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    jitter: float = 0.8
    grey: float = 0.2
    blur: float = 0.3
    blur_radius: tuple[float, float] = (0.1, 2.0)

    def __call__(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        """Change one image (h, w, 3)."""
        return self.soften(rng, self.shift(rng, image))

    def shift(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        """The jitter of brightness, contrast, saturation and hue."""
        if rng.random() >= self.jitter:
            return image
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [rng.uniform(max(0.0, 1 - x), 1 + x) for x in strengths]
        hue = rng.uniform(-self.hue, self.hue)
        changes = (adjust_brightness, adjust_contrast, adjust_saturation)
        for which in rng.permutation(4):
            image = adjust_hue(image, hue) if which == 3 else changes[which](image, factors[which])
        return image

    def soften(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
        """Grey and blur."""
        if rng.random() < self.grey:
            image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        if rng.random() < self.blur:
            image = cv2.GaussianBlur(image, (0, 0), rng.uniform(*self.blur_radius))
        return image


# What DeAOT trains with (augmentation "v2"), and the weaker jitter of AOT's static images ("v1").
STRONG = ColorJitter()
WEAK = ColorJitter(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.03, jitter=1.0, grey=0.0, blur=0.0)


def adjust_brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Multiply all values by `factor`, clipped to 0..255."""
    return cv2.convertScaleAbs(image, alpha=factor)


def adjust_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean grey of the image; factor 0 is a flat grey image, 1 the image itself."""
    mean = np.floor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean())
    table = np.clip(np.arange(256) * factor + mean * (1 - factor), 0, 255).astype(np.uint8)
    return cv2.LUT(image, table)


def adjust_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey version of the image; factor 0 is grey, 1 the image itself."""
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, grey, 1 - factor, 0)


def adjust_hue(image: np.ndarray, turn: float) -> np.ndarray:
    """Turn all hues by `turn` of the full circle (-0.5..0.5)."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    table = ((np.arange(256) + round(turn * 256)) % 256).astype(np.uint8)
    keep = np.arange(256, dtype=np.uint8)
    return cv2.cvtColor(cv2.LUT(hsv, np.dstack([table, keep, keep])), cv2.COLOR_HSV2RGB_FULL)


@dataclass(frozen=True)
class ClipTransform:
    """Random scale, balanced crop, colours, flip and pad, with one geometry for all frames of a clip.

    The short edge becomes `short_edge` times a factor uniform in `scale`; a crop of `size` (h, w) is tried
    `crop_tries` times, until the reference (frame 0) shows an object with more than `min_pixels` pixels; those objects
    stay, at most `max_objects` of them. Clips smaller than `size` are put at a random place on a plain ground.
    """

    size: tuple[int, int] = (465, 465)
    short_edge: int = 480
    scale: tuple[float, float] = (0.7, 1.3)
    flip: float = 0.5
    color: ColorJitter | None = None
    crop_tries: int = 5
    min_pixels: int = 100
    max_objects: int = 10

    def __call__(
        self, rng: np.random.Generator, images: Sequence[np.ndarray], labels: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return frames (t, h, w, 3), label maps (t, h, w) with ids 1..n, and n (0 when no object is left)."""
        height, width = images[0].shape[:2]
        factor = self.short_edge * rng.uniform(*self.scale) / min(height, width)
        scaled = max(round(height * factor), 1), max(round(width * factor), 1)
        h, w = min(scaled[0], self.size[0]), min(scaled[1], self.size[1])
        reference = cv2.resize(labels[0], scaled[::-1], interpolation=cv2.INTER_NEAREST)
        for _ in range(self.crop_tries):
            y, x = int(rng.integers(0, scaled[0] - h + 1)), int(rng.integers(0, scaled[1] - w + 1))
            counts = count_labels(reference[y : y + h, x : x + w])
            if counts[1:IGNORE].max() > self.min_pixels:
                break
        renumber, kept = choose_objects(rng, counts, self.min_pixels, self.max_objects)

        mirror = rng.random() < self.flip
        top, left = int(rng.integers(0, self.size[0] - h + 1)), int(rng.integers(0, self.size[1] - w + 1))
        frames = np.empty((len(images), *self.size, 3), np.uint8)
        if (h, w) != self.size:
            frames[:] = FILL
        maps = np.zeros((len(images), *self.size), np.uint8)
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            window = resize_window(image, scaled, (y, x, h, w))
            small = cv2.resize(label, scaled[::-1], interpolation=cv2.INTER_NEAREST)[y : y + h, x : x + w]
            small = cv2.LUT(np.ascontiguousarray(small), renumber)
            if self.color is not None:
                window = self.color(rng, window)
            if mirror:
                window, small = window[:, ::-1], small[:, ::-1]
            frames[i, top : top + h, left : left + w] = window
            maps[i, top : top + h, left : left + w] = small
        return frames, maps, kept


def resize_window(image: np.ndarray, size: tuple[int, int], window: tuple[int, int, int, int]) -> np.ndarray:
    """Resize an image to `size` (h, w) and cut the window (top, left, h, w) out, without computing the rest.

    Bicubic; shrinking to less than 0.7 averages areas instead, which the few taps of a bicubic filter would alias.
    """
    y, x, h, w = window
    fy, fx = image.shape[0] / size[0], image.shape[1] / size[1]
    if max(fy, fx) > 1 / 0.7:
        return cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA)[y : y + h, x : x + w]
    if (fy, fx) == (1.0, 1.0):
        return image[y : y + h, x : x + w]
    matrix = np.array([[fx, 0, (x + 0.5) * fx - 0.5], [0, fy, (y + 0.5) * fy - 0.5]])
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(image, matrix, (w, h), flags=flags, borderMode=cv2.BORDER_REPLICATE)


@dataclass(frozen=True)
class StillTransform:
    """Make a clip of `frames` frames from one image: the published recipe of pre-training on static images.

    The image is mirrored with probability `flip`; then each frame but the first is mirrored with probability
    `frame_flip` and moved by a random affine map (rotation and shear in degrees, translation as part of the image,
    scale), every frame gets its own colours, and its own crop of `crop_area` of the image, with an aspect ratio within
    `crop_ratio` of that of `size` (h, w), is resized to `size`. The ids of frame 0, in random order, at most
    `max_objects`, become 1..n.
    """

    size: tuple[int, int] = (465, 465)
    frames: int = 5
    flip: float = 0.5
    frame_flip: float = 0.3
    rotation: float = 20.0
    translation: float = 0.1
    scale: tuple[float, float] = (0.9, 1.1)
    shear: float = 10.0
    crop_area: tuple[float, float] = (0.8, 1.0)
    crop_ratio: float = 4 / 3
    color: ColorJitter = WEAK
    max_objects: int = 10

    def __call__(
        self, rng: np.random.Generator, image: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return frames (t, h, w, 3), label maps (t, h, w) with ids 1..n, and n (0 when frame 0 shows no object)."""
        if rng.random() < self.flip:
            image, labels = np.ascontiguousarray(image[:, ::-1]), np.ascontiguousarray(labels[:, ::-1])
        height, width = image.shape[:2]
        source, to_source = image, np.eye(3)
        shrink = min(height / self.size[0], width / self.size[1])
        if shrink > 1 / 0.7:
            # The warp reads single pixels: an image much finer than the frames is averaged down first.
            source = cv2.resize(image, None, fx=1 / shrink, fy=1 / shrink, interpolation=cv2.INTER_AREA)
            finer = np.diag([source.shape[1] / width, source.shape[0] / height, 1.0])
            to_source = _shift(-0.5, -0.5) @ finer @ _shift(0.5, 0.5)
        frames = np.empty((self.frames, *self.size, 3), np.uint8)
        maps = np.empty((self.frames, *self.size), np.uint8)
        for i in range(self.frames):
            moved = np.eye(3) if i == 0 else self._move(rng, height, width)
            # Output pixel -> image pixel; the colours of the ground that comes into view are jittered as well.
            matrix = np.linalg.inv(moved) @ self._crop(rng, height, width)
            frame = cv2.warpAffine(
                source,
                (to_source @ matrix)[:2],
                self.size[::-1],
                flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
                borderMode=cv2.BORDER_CONSTANT,
                borderValue=FILL,
            )
            frames[i] = self.color(rng, frame)
            maps[i] = cv2.warpAffine(
                labels, matrix[:2], self.size[::-1], flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP, borderValue=0
            )
        renumber, kept = choose_objects(rng, count_labels(maps[0]), 0, self.max_objects, shuffle=True)
        return frames, cv2.LUT(maps.reshape(-1, self.size[1]), renumber).reshape(maps.shape), kept

    def _move(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
        """A random affine map about the centre of the image, perhaps after mirroring it: (3, 3), image -> image."""
        mirror = np.diag([-1.0, 1, 1]) if rng.random() < self.frame_flip else np.eye(3)
        angle, shear = np.deg2rad(rng.uniform(-self.rotation, self.rotation)), rng.uniform(-self.shear, self.shear)
        x, y = rng.uniform(-1, 1, 2) * self.translation * (width, height)
        c, s = np.cos(angle), np.sin(angle)
        linear = np.eye(3)
        lean = np.array([[1, np.tan(np.deg2rad(shear))], [0, 1]])
        linear[:2, :2] = np.array([[c, -s], [s, c]]) @ lean * rng.uniform(*self.scale)
        cx, cy = (width - 1) / 2, (height - 1) / 2
        return _shift(cx + x, cy + y) @ linear @ mirror @ _shift(-cx, -cy)

    def _crop(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
        """A random crop, stretched to `size`: (3, 3), output pixel -> image pixel."""
        target = self.size[1] / self.size[0]
        for _ in range(10):
            area = rng.uniform(*self.crop_area) * height * width
            ratio = target * np.exp(rng.uniform(-1, 1) * np.log(self.crop_ratio))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                y, x = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
                break
        else:
            # The image is too long or too tall: the largest centred crop of an allowed ratio.
            ratio = np.clip(width / height, target / self.crop_ratio, target * self.crop_ratio)
            w, h = min(width, max(round(height * ratio), 1)), min(height, max(round(width / ratio), 1))
            y, x = (height - h) // 2, (width - w) // 2
        fy, fx = h / self.size[0], w / self.size[1]
        return np.array([[fx, 0, x + 0.5 * fx - 0.5], [0, fy, y + 0.5 * fy - 0.5], [0, 0, 1.0]])


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0, x], [0, 1.0, y], [0, 0, 1.0]])


# --- objects ------------------------------------------------------------------------------------------------------


def count_labels(labels: np.ndarray) -> np.ndarray:
    """Pixels of each value of a uint8 label map: (256,)."""
    return np.bincount(labels.ravel(), minlength=256)


def choose_objects(
    rng: np.random.Generator, counts: np.ndarray, min_pixels: int, max_objects: int, shuffle: bool = False
) -> tuple[np.ndarray, int]:
    """Choose the objects with more than `min_pixels` pixels, at most `max_objects` at random, and number them 1..n.

    Returns a table (256,) uint8 from old to new ids (0 for what is dropped, 255 stays) and n. Ids keep their order
    unless `shuffle`.
    """
    ids = np.flatnonzero(counts[:IGNORE] > min_pixels)
    ids = rng.permutation(ids[ids > 0])[:max_objects]
    if not shuffle:
        ids = np.sort(ids)
    table = np.zeros(256, np.uint8)
    table[ids] = np.arange(1, len(ids) + 1)
    table[IGNORE] = IGNORE
    return table, len(ids)


def merge_clips(
    rng: np.random.Generator,
    frames: np.ndarray,
    labels: np.ndarray,
    other_frames: np.ndarray,
    other_labels: np.ndarray,
    *,
    min_pixels: int = 100,
    max_objects: int = 10,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Paste the objects of another clip over a clip, frame by frame.

    Frames (t, h, w, 3) and label maps (t, h, w) uint8 of equal size. Objects with more than `min_pixels` pixels in
    the merged frame 0 stay, at most `max_objects` at random, numbered 1..n; the rest becomes background. Returns
    new frames, new label maps and n.
    """
    frames, labels = frames.copy(), labels.copy()
    # Numbers above 254 cannot occur: each clip holds a few objects.
    offset = int(labels[labels != IGNORE].max(initial=0))
    for i, other in enumerate(other_labels):
        pasted = ((other > 0) & (other != IGNORE)).astype(np.uint8)
        cv2.copyTo(other_frames[i], pasted, frames[i])
        cv2.copyTo(cv2.add(other, offset), pasted, labels[i])
    table, kept = choose_objects(rng, count_labels(labels[0]), min_pixels, max_objects)
    return frames, cv2.LUT(labels.reshape(-1, labels.shape[-1]), table).reshape(labels.shape), kept
