"""Training clips without labelled video: cut-outs that move over backgrounds.

`python -m data.synthetic --sources DIR,DIR --output sheet.png` writes a contact sheet to look at.

A source folder holds one of
* cut-outs: images with an alpha channel,
* photographs with instance masks: `images/` and `masks/` (or `JPEGImages/` and `Annotations/`), an indexed PNG of the
  same name for every photograph, each value above 0 one instance,
* photographs alone, which serve as backgrounds.

A clip is drawn as a small 2.5-D scene: a camera that pans, zooms, rolls and shakes over a photograph, and layers in
depth order, each with its own smooth path and an evolving displacement field. Time is counted in video frames, and the
frames of a clip lie `gap` of them apart, so that motion between neighbours ranges from hardly any to large.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from data.clips import ClipDataset, Sample, make_sample, read_labels
from data.images import IMAGE_SUFFIXES, read_image, read_rgb
from utils.errors import InputError

LAYOUTS = (("images", "masks"), ("JPEGImages", "Annotations"))
# Alpha from which on a pixel belongs to an object: more than half of its light comes from it.
SOLID = 128


@dataclass(frozen=True)
class Cutout:
    """An object to paste: premultiplied RGBA (h, w, 4) uint8 with a transparent rim.

    `corner` is where its top left pixel lies in the photograph it was cut from (x, y); `whole` is False when the
    photograph's border cuts through it, so that it must not be moved away from there.
    """

    rgba: np.ndarray
    corner: tuple[int, int] = (0, 0)
    whole: bool = True


@dataclass(frozen=True)
class Photo:
    """A background (h, w, 3) uint8 RGB, with the instances cut from it."""

    image: np.ndarray
    cutouts: tuple[Cutout, ...] = ()


@dataclass
class Layer:
    """One moving thing of a scene, over n moments.

    `matrices` (n, 2, 3) maps cut-out pixels to frame pixels; `bends` (n, gy, gx, 2) displaces the cut-out, in its own
    pixels; `shift` (n, 2) is how far it moves while the shutter is open; `label` 0 is a thing without a label.
    """

    rgba: np.ndarray
    matrices: np.ndarray
    bends: np.ndarray | None
    shift: np.ndarray
    label: int
    shadow: float


class SyntheticClips(ClipDataset):
    """Clips of `frames` frames of `size` (h, w) made from the material in `sources`.

    Everything is decoded once, here, so that loader processes that are forked later share it. `max_objects` (1..10)
    bounds the labelled objects, `max_gap` the video frames between two frames of a clip, `motion` scales all speeds.
    An object counts when more than `min_pixels` of it show in the first frame, and every clip has at least one.
    Of each source at most `max_photos` images are kept, evenly spread. Raises InputError for a folder without material.
    """

    def __init__(
        self,
        sources: Sequence[str | Path],
        *,
        size: tuple[int, int] = (241, 241),
        frames: int = 5,
        length: int = 10000,
        max_objects: int = 10,
        max_gap: int = 12,
        motion: float = 1.0,
        min_pixels: int = 100,
        max_photos: int = 2000,
        max_broken: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if not 1 <= max_objects <= 10:
            raise InputError(f"max_objects {max_objects}: a clip holds 1 to 10 objects")
        self.size, self.frames, self.length = (int(size[0]), int(size[1])), frames, length
        self.max_objects, self.max_gap, self.motion, self.min_pixels = max_objects, max_gap, motion, min_pixels
        self.cutouts: list[Cutout] = []
        self.photos: list[Photo] = []
        for source in sources:
            cutouts, photos = load_source(Path(source), max_photos, max_broken)
            self.cutouts += cutouts
            self.photos += photos
        # Two pools with an equal share, or a hundred photographs would drown the cleaner cut-outs (or the reverse).
        from_photos = [cutout for photo in self.photos for cutout in photo.cutouts if cutout.whole]
        self.pools = [pool for pool in (self.cutouts, from_photos) if pool]
        self.scenes = [photo for photo in self.photos if photo.cutouts]
        if not self.pools:
            named = ", ".join(map(str, sources)) or "sources: (none)"
            raise InputError(f"{named}: no object to cut out; needs images with alpha, or images/ with instance masks/")
        noise = np.random.default_rng(0).standard_normal((self.size[0] + 64, self.size[1] + 64, 3))
        self.noise = noise.astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        rng = self.generator(index)
        for _ in range(6):
            moments, shutter = self._moments(rng)
            background, place, layers, blur = self._scene(rng, np.concatenate([moments, moments + shutter]))
            first = np.zeros(self.size, np.uint8)
            paint(None, first, layers, 0, blur)
            counts = np.bincount(first.ravel(), minlength=len(layers) + 1)
            seen = [layer.label for layer in layers if layer.label and counts[layer.label] > self.min_pixels]
            if seen:
                break
        else:
            # Six scenes without a visible object: the last one, with one of its things put in front of all, unmoved.
            layers.append(self._portrait(rng, len(moments), layers))
            seen = [layers[-1].label]
        seen = [int(label) for label in rng.permutation(seen)[: self.max_objects]]
        renumber = {label: number for number, label in enumerate(seen, 1)}
        for layer in layers:
            layer.label = renumber.get(layer.label, 0)
        frames, labels = self._render(rng, background, place, layers, blur)
        return make_sample(frames, labels, len(seen), f"synthetic/{index}")

    # --- what happens -------------------------------------------------------------------------------------------

    def _moments(self, rng: np.random.Generator) -> tuple[np.ndarray, float]:
        """Times of the frames in video frames, and how long the shutter is open."""
        gaps = rng.integers(1, self.max_gap + 1, self.frames - 1)
        return np.concatenate([[0.0], np.cumsum(gaps)]), float(rng.uniform(0.1, 0.7))

    def _scene(self, rng: np.random.Generator, times: np.ndarray) -> tuple:
        """Draw a scene: background image, its matrices (2t, 2, 3), layers from back to front, and whether it blurs.

        `times` holds first the opening, then the closing moments of the shutter.
        """
        h, w = self.size
        side = np.sqrt(h * w)
        count = min(int(rng.choice(10, p=_COUNT_ODDS)) + 1, self.max_objects)
        style = rng.choice(["tripod", "handheld", "pan", "follow"], p=[0.15, 0.35, 0.25, 0.25])
        speed = {"tripod": 0.0, "handheld": 0.0008, "pan": 0.005, "follow": 0.006}[style] * self.motion
        camera = {
            "pan": _path(rng, times, speed * side, 0.0 if style == "tripod" else 0.006 * side, 2),
            "zoom": np.exp(
                np.clip(_path(rng, times, 0.0 if style == "tripod" else 0.004 * self.motion, 0.01), -0.5, 0.5)
            ),
            "roll": _path(rng, times, 0.0 if style == "tripod" else 0.0015 * self.motion, 0.006),
        }

        own = bool(self.scenes) and rng.random() < 0.4
        photo = self.scenes[rng.integers(len(self.scenes))] if own else self._background(rng)
        image, base = self._place_background(rng, photo)
        layers: list[Layer] = []
        if own:
            # Things start where they stand in their own photograph, in their natural order, size and company.
            chosen = rng.permutation(len(photo.cutouts))[: max(count, 1)]
            image = _without(rng, photo, [photo.cutouts[i] for i in chosen], image)
            for number, i in enumerate(chosen, 1):
                cutout = photo.cutouts[i]
                start = _compose(base, _translate(*cutout.corner))
                still = not cutout.whole or rng.random() < 0.15
                layers.append(self._layer(rng, times, camera, cutout.rgba, start, number, style, still))
            count = int(rng.integers(0, 2))
        made = len(layers)
        twins: list[np.ndarray] = []
        look = self._look(rng, image)
        for number in range(made + 1, made + count + 1):
            rgba = self._thing(rng, photo)
            if twins and rng.random() < 0.3:
                rgba = _vary(rng, twins[rng.integers(len(twins))])
            else:
                rgba = _recolor(rng, rgba, look)
            twins.append(rgba)
            layers.append(self._free_layer(rng, times, camera, rgba, number, style, made + count))
        # Things without a label: some look like a labelled one, some are just in the way.
        for _ in range(int(rng.choice(4, p=[0.5, 0.28, 0.15, 0.07]))):
            similar = twins and rng.random() < 0.6
            rgba = (
                _vary(rng, twins[rng.integers(len(twins))]) if similar else _recolor(rng, self._thing(rng, photo), look)
            )
            layers.append(self._free_layer(rng, times, camera, rgba, 0, style, made + count + 1))
        order = rng.permutation(len(layers))
        place = np.stack([_compose(_view(self.size, camera, i, 1.0), base) for i in range(len(times))])
        return image, place, [layers[i] for i in order], bool(rng.random() < 0.7)

    def _background(self, rng: np.random.Generator) -> Photo:
        if self.photos:
            return self.photos[rng.integers(len(self.photos))]
        # No photographs: smooth colour noise, coarse and fine, is better than one flat colour.
        image = np.zeros((256, 256, 3), np.float32)
        for cells in (3, 8, 32):
            coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
            image += cv2.resize(coarse, (256, 256), interpolation=cv2.INTER_CUBIC) * (80 / np.sqrt(cells))
        return Photo(np.clip(image + rng.uniform(60, 190, 3), 0, 255).astype(np.uint8))

    def _place_background(self, rng: np.random.Generator, photo: Photo) -> tuple[np.ndarray, np.ndarray]:
        """Choose the part of the photograph that the camera sees at first: the image and the matrix photo -> frame."""
        (h, w), (ph, pw) = self.size, photo.image.shape[:2]
        scale = max(h / ph, w / pw) * np.exp(rng.uniform(0.0, 0.7))
        # An affine warp reads single pixels: an image much finer than the frame must be shrunk first.
        matrix = np.array([[scale, 0, -rng.uniform(0, max(pw * scale - w, 0))], [0, scale, 0]])
        matrix[1, 2] = -rng.uniform(0, max(ph * scale - h, 0))
        if rng.random() < 0.5:
            matrix = _compose(np.array([[-1.0, 0, w - 1], [0, 1.0, 0]]), matrix)
        return photo.image, matrix

    def _thing(self, rng: np.random.Generator, photo: Photo) -> np.ndarray:
        """A cut-out, or (sometimes) a random shape that shows a piece of a photograph."""
        if self.photos and rng.random() < 0.12:
            source = self.photos[rng.integers(len(self.photos))].image if rng.random() < 0.7 else photo.image
            return _blob(rng, source)
        pool = self.pools[rng.integers(len(self.pools))]
        return pool[rng.integers(len(pool))].rgba

    def _look(self, rng: np.random.Generator, image: np.ndarray) -> np.ndarray | None:
        """Mean colour of the background, towards which things are tinted in half of the scenes."""
        return image[::8, ::8].reshape(-1, 3).mean(0) if rng.random() < 0.5 else None

    def _free_layer(self, rng, times, camera, rgba, label, style, crowd) -> Layer:
        """A thing of random size at a random place."""
        h, w = self.size
        solid = max(int((rgba[..., 3] >= SOLID).sum()), 1)
        size = np.clip(np.exp(rng.normal(np.log(0.30 / crowd**0.25), 0.5)), 0.07, 0.85) * np.sqrt(h * w)
        scale = size / np.sqrt(solid)
        center = rng.uniform(0.05, 0.95, 2) * (w, h)
        angle = rng.normal(0, 0.15) if rng.random() < 0.8 else rng.uniform(-np.pi, np.pi)
        mirror = -1.0 if rng.random() < 0.5 else 1.0
        c, s = np.cos(angle) * scale, np.sin(angle) * scale
        linear = np.array([[c * mirror, -s], [s * mirror, c]])
        middle = np.array([rgba.shape[1] - 1, rgba.shape[0] - 1]) / 2
        start = np.hstack([linear, (center - linear @ middle)[:, None]])
        return self._layer(rng, times, camera, rgba, start, label, style, still=rng.random() < 0.12)

    def _layer(self, rng, times, camera, rgba, start, label, style, still) -> Layer:
        """Give the thing that lies at `start` (cut-out -> frame, at time 0) its path, turning and bending."""
        h, w = self.size
        side = np.sqrt(h * w)
        scale = np.sqrt(abs(np.linalg.det(start[:, :2])))
        if scale < 0.67:
            # Sampling a much larger cut-out pixel by pixel would flicker: shrink it once for the whole clip.
            small = (max(int(rgba.shape[1] * scale * 1.2), 4), max(int(rgba.shape[0] * scale * 1.2), 4))
            if small[0] < rgba.shape[1] and small[1] < rgba.shape[0]:
                fx, fy = rgba.shape[1] / small[0], rgba.shape[0] / small[1]
                start = _compose(start, np.array([[fx, 0, (fx - 1) / 2], [0, fy, (fy - 1) / 2]]))
                rgba = cv2.resize(rgba, small, interpolation=cv2.INTER_AREA)
        ch, cw = rgba.shape[:2]
        middle = np.array([cw - 1, ch - 1]) / 2
        center = start[:, :2] @ middle + start[:, 2]
        size = np.sqrt(abs(np.linalg.det(start[:, :2])) * ch * cw)
        n = len(times)
        if still:
            move, turn, grow, squeeze, lean = np.zeros((n, 2)), np.zeros(n), np.ones(n), np.ones(n), np.zeros(n)
            parallax, bends = 1.0, None
        else:
            pace = np.exp(rng.normal(np.log(0.0035), 0.9)) * self.motion
            move = _path(rng, times, pace * side, 0.12 * size * min(self.motion, 1) * rng.random(), 2)
            if rng.random() < 0.12:
                move = move + self._excursion(rng, times, center, size)
            turn = _path(rng, times, 0.006 * self.motion, 0.08 * rng.random())
            grow = np.exp(np.clip(_path(rng, times, 0.006 * self.motion, 0.04 * rng.random()), -0.8, 0.8))
            # A turn about the upright axis, as a camera sees it: the width shrinks with the cosine.
            squeeze = np.cos(np.clip(_path(rng, times, 0.010 * self.motion, 0.2 * rng.random()), -1.1, 1.1))
            lean = np.clip(_path(rng, times, 0.004 * self.motion, 0.06 * rng.random()), -0.4, 0.4)
            parallax = rng.uniform(0.0, 0.25) if style == "follow" else rng.uniform(0.8, 1.3)
            bends = _bends(rng, times, ch, cw) if rng.random() < 0.75 else None
        matrices = np.empty((n, 2, 3))
        for i in range(n):
            c, s = np.cos(turn[i]) * grow[i], np.sin(turn[i]) * grow[i]
            shape = np.array([[c, -s], [s, c]]) @ np.array([[squeeze[i], lean[i]], [0.0, 1.0]]) @ start[:, :2]
            placed = np.hstack([shape, (center + move[i] - shape @ middle)[:, None]])
            matrices[i] = _compose(_view(self.size, camera, i, parallax), placed)
        half = n // 2
        points = matrices[:, :, :2] @ middle + matrices[:, :, 2]
        shadow = rng.uniform(0.15, 0.5) if rng.random() < 0.35 else 0.0
        return Layer(
            rgba=rgba,
            matrices=matrices[:half],
            bends=None if bends is None else bends[:half],
            shift=points[half:] - points[:half],
            label=label,
            shadow=shadow,
        )

    def _excursion(self, rng, times, center, size) -> np.ndarray:
        """A way out of the picture over the nearest border and back again: (n, 2) offsets."""
        h, w = self.size
        exits = np.array(
            [[-center[0] - size, 0], [w - center[0] + size, 0], [0, -center[1] - size], [0, h - center[1] + size]]
        )
        way = exits[np.argmin(np.abs(exits).sum(1))]
        length = max(times[-1], 4.0)
        begin = rng.uniform(0.1, 0.4) * length
        phase = np.clip((times - begin) / (length * rng.uniform(0.35, 0.7)), 0, 1)
        return np.sin(np.pi * phase)[:, None] ** 2 * way * 1.1

    def _portrait(self, rng, count: int, layers: list[Layer]) -> Layer:
        h, w = self.size
        pool = self.pools[0]
        rgba = max(
            (pool[rng.integers(len(pool))].rgba for _ in range(4)), key=lambda image: (image[..., 3] >= SOLID).mean()
        )
        scale = 0.7 * min(h / rgba.shape[0], w / rgba.shape[1])
        matrix = np.array([[scale, 0, (w - scale * rgba.shape[1]) / 2], [0, scale, (h - scale * rgba.shape[0]) / 2]])
        label = max((layer.label for layer in layers), default=0) + 1
        return Layer(rgba, np.repeat(matrix[None], count, 0), None, np.zeros((count, 2)), label, 0.0)

    # --- how it looks -------------------------------------------------------------------------------------------

    def _render(self, rng, background, place, layers, blur) -> tuple[np.ndarray, np.ndarray]:
        h, w = self.size
        frames = np.empty((self.frames, h, w, 3), np.uint8)
        labels = np.zeros((self.frames, h, w), np.uint8)
        background, place = _shrink(background, place)
        middle = np.array([background.shape[1], background.shape[0]]) / 2
        points = place[:, :, :2] @ middle + place[:, :, 2]
        sway = points[self.frames :] - points[: self.frames]
        sun = rng.normal(0, 0.12, 2)
        times = np.linspace(0, 1, self.frames)
        light = self._light(rng, times)
        spot = _spot(rng, self.size, times) if rng.random() < 0.25 else None
        grain = None
        if rng.random() < 0.6:
            grain = (self.noise * np.exp(rng.uniform(np.log(0.8), np.log(9)))).astype(np.int16)
        soft = rng.uniform(0.4, 1.3) if rng.random() < 0.3 else 0.0
        quality = int(rng.uniform(25, 90)) if rng.random() < 0.5 else None
        for i in range(self.frames):
            image = cv2.warpAffine(
                background, place[i], (w, h), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101
            )
            if blur:
                image = _motion_blur(image, sway[i])
            paint(image, labels[i], layers, i, blur, sun)
            image = cv2.transform(image, light[i])
            if spot is not None:
                image = cv2.multiply(image, spot[i], scale=1 / 128)
            if soft:
                image = cv2.GaussianBlur(image, (0, 0), soft)
            if grain is not None:
                y, x = rng.integers(0, 64, 2)
                image = cv2.add(image, grain[y : y + h, x : x + w], dtype=cv2.CV_8U)
            if quality is not None:
                image = cv2.imdecode(
                    cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], cv2.IMREAD_COLOR
                )
            frames[i] = image
        return frames, labels

    def _light(self, rng: np.random.Generator, times: np.ndarray) -> list[np.ndarray]:
        """A colour matrix (3, 4) per frame: the exposure and white balance of the clip, and how they drift."""
        base = _color_matrix(rng, 0.11)[:3, :4]
        drift = rng.normal(0, 0.10) * (rng.random() < 0.5) * times
        tint = rng.normal(0, 0.03, 3)
        jump = np.cumsum(rng.normal(0, 0.12, len(times)) * (rng.random(len(times)) < 0.05))
        return [base * np.exp(drift[i] + jump[i] + tint * times[i])[:, None] for i in range(len(times))]


_COUNT_ODDS = np.array([0.28, 0.27, 0.19, 0.11, 0.05, 0.03, 0.025, 0.02, 0.015, 0.01])


# --- loading ------------------------------------------------------------------------------------------------------


def load_source(folder: Path, max_photos: int = 2000, max_broken: int = 20) -> tuple[list[Cutout], list[Photo]]:
    """Decode one source folder into cut-outs and photographs.

    Files that cannot be used are skipped with a warning. Raises InputError when there are more than `max_broken` of
    them, or when the folder holds nothing usable.
    """
    wanted = "a source holds images with alpha, or images/ and masks/, or photographs"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; {wanted}")
    masks = None
    for layout in LAYOUTS:
        if (folder / layout[0]).is_dir():
            folder, masks = folder / layout[0], folder / layout[1]
            if not masks.is_dir():
                raise InputError(f"{masks}: no such folder; beside {layout[0]}/ it holds a PNG for every image")
            break
    cutouts, photos, broken = [], [], 0
    for path in _spread(_images(folder), max_photos):
        try:
            if masks is not None:
                mask = (masks / path.relative_to(folder)).with_suffix(".png")
                if mask.is_file():
                    photos.append(make_photo(read_rgb(path), read_labels(mask), path))
                continue
            image = read_image(path)
            # An alpha channel that is opaque everywhere makes no cut-out.
            if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < SOLID:
                cutout = make_cutout(np.asarray(image.convert("RGBA")))
                cutouts += [cutout] if cutout else []
            else:
                photos.append(Photo(_bound(read_rgb(path), cv2.INTER_AREA)))
        except InputError as error:
            broken += 1
            warnings.warn(f"skipped: {error}", stacklevel=2)
            if broken > max_broken:
                raise InputError(f"{folder}: more than {max_broken} files cannot be used, the last: {error}") from error
    if not cutouts and not photos:
        names = f"image with a mask of the same name in {masks}" if masks else "usable image"
        raise InputError(f"{folder}: no {names}; {wanted}")
    return cutouts, photos


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def _spread(paths: list[Path], most: int) -> list[Path]:
    if len(paths) <= most:
        return paths
    return [paths[i * len(paths) // most] for i in range(most)]


def _bound(image: np.ndarray, interpolation: int, short_edge: int = 512) -> np.ndarray:
    """Shrink a large photograph, or its mask, to keep the memory of a source bounded."""
    factor = short_edge / min(image.shape[:2])
    if factor >= 1:
        return image
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=interpolation)


def make_cutout(rgba: np.ndarray, rim: int = 2, min_area: int = 600) -> Cutout | None:
    """Crop, premultiply and rim an RGBA image (h, w, 4) uint8; None when it is too small or mostly translucent."""
    alpha = rgba[..., 3]
    solid = int((alpha >= SOLID).sum())
    if solid < min_area or solid < 0.6 * int((alpha > 8).sum()):
        return None
    x, y, w, h = cv2.boundingRect((alpha > 8).astype(np.uint8))
    rgba = rgba[y : y + h, x : x + w].astype(np.uint16)
    rgba[..., :3] = (rgba[..., :3] * rgba[..., 3:] + 127) // 255
    rgba = cv2.copyMakeBorder(rgba.astype(np.uint8), rim, rim, rim, rim, cv2.BORDER_CONSTANT, value=(0, 0, 0, 0))
    return Cutout(rgba, (x - rim, y - rim))


def make_photo(image: np.ndarray, labels: np.ndarray, name: object = "photograph") -> Photo:
    """Cut every instance out of a photograph, with a soft edge one pixel inside its mask, where halos are rare.

    Raises InputError when the label map (h, w) is not as large as the image (h, w, 3).
    """
    if labels.shape != image.shape[:2]:
        raise InputError(f"{name}: the image is {image.shape[:2]}, its mask {labels.shape}; they must be equal")
    image, labels = _bound(image, cv2.INTER_AREA), _bound(labels, cv2.INTER_NEAREST)
    cutouts = []
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    for value in np.unique(labels):
        if value in (0, 255):
            continue
        mask = (labels == value).astype(np.uint8) * 255
        if np.count_nonzero(mask) > 0.6 * mask.size:
            continue
        alpha = cv2.GaussianBlur(cv2.erode(mask, cross), (5, 5), 0.9)
        cutout = make_cutout(np.dstack([image, alpha]))
        if cutout:
            border = int((mask[0] > 0).sum() + (mask[-1] > 0).sum() + (mask[:, 0] > 0).sum() + (mask[:, -1] > 0).sum())
            cutouts.append(Cutout(cutout.rgba, cutout.corner, whole=border < 0.05 * 2 * sum(cutout.rgba.shape[:2])))
    return Photo(image, tuple(cutouts))


# --- geometry and motion ------------------------------------------------------------------------------------------


def _path(rng: np.random.Generator, times: np.ndarray, pace: float, wave: float, dims: int | None = None) -> np.ndarray:
    """A smooth path from 0 at time 0: `pace` a frame in a random direction, bent, and a sway of size `wave`."""
    shape = (1,) if dims is None else (dims,)
    velocity = rng.normal(0, 1, shape) * pace
    acceleration = rng.normal(0, 1, shape) * pace / 40
    t = times[:, None]
    phase, period = rng.uniform(0, 2 * np.pi, shape), np.exp(rng.uniform(np.log(14), np.log(80), shape))
    sway = np.sin(2 * np.pi * t / period + phase) - np.sin(phase)
    path = velocity * t + acceleration * t**2 / 2 + wave * sway
    return path[:, 0] if dims is None else path


def _bends(rng: np.random.Generator, times: np.ndarray, h: int, w: int, nodes: int = 9) -> np.ndarray:
    """Displacement fields (n, nodes, nodes, 2) in cut-out pixels: a few travelling waves, like limbs, cloth or gait."""
    y, x = np.mgrid[0 : 1 : nodes * 1j, 0 : 1 : nodes * 1j]
    field = np.zeros((len(times), nodes, nodes, 2))
    strength = np.exp(rng.normal(np.log(0.02), 0.6))
    for _ in range(3):
        kx, ky = rng.normal(0, 3.5, 2)
        period = np.exp(rng.uniform(np.log(14), np.log(90)))
        amplitude = rng.normal(0, 1, 2) * strength * np.sqrt(h * w)
        phase = kx * x + ky * y + rng.uniform(0, 2 * np.pi)
        wave = np.sin(phase[None] + (2 * np.pi * times / period)[:, None, None]) - np.sin(phase)[None]
        field += wave[..., None] * amplitude
    return np.clip(field, -0.2 * min(h, w), 0.2 * min(h, w)).astype(np.float32)


def _view(size: tuple[int, int], camera: dict[str, np.ndarray], i: int, parallax: float) -> np.ndarray:
    """World -> frame at moment i (2, 3): zoom and roll about the centre of the frame, pan scaled by the parallax."""
    h, w = size
    c, s = np.cos(camera["roll"][i]) * camera["zoom"][i], np.sin(camera["roll"][i]) * camera["zoom"][i]
    center = np.array([w - 1, h - 1]) / 2
    linear = np.array([[c, -s], [s, c]])
    return np.hstack([linear, (center - linear @ center + camera["pan"][i] * parallax)[:, None]])


def _compose(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    return np.hstack([outer[:, :2] @ inner[:, :2], (outer[:, :2] @ inner[:, 2] + outer[:, 2])[:, None]])


def _translate(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0, x], [0, 1.0, y]])


def _shrink(image: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shrink a background that is much finer than the frames, so that the warp does not flicker."""
    scale = np.sqrt(abs(np.linalg.det(place[0, :, :2])))
    if scale > 0.75:
        return image, place
    small = cv2.resize(image, None, fx=scale * 1.1, fy=scale * 1.1, interpolation=cv2.INTER_AREA)
    fx, fy = image.shape[1] / small.shape[1], image.shape[0] / small.shape[0]
    back = np.array([[fx, 0, (fx - 1) / 2], [0, fy, (fy - 1) / 2]])
    return small, np.stack([_compose(matrix, back) for matrix in place])


def paint(
    image: np.ndarray | None,
    labels: np.ndarray,
    layers: Sequence[Layer],
    i: int,
    blur: bool,
    sun: np.ndarray | None = None,
) -> None:
    """Draw layers, back to front, at moment i: into an image (h, w, 3) uint8 and its label map (h, w), in place.

    A pixel gets the label of the frontmost layer that gives most of its light. `sun` (x, y) is where shadows fall, in
    heights and widths of their layer. Without an image the label map alone is drawn.
    """
    for layer in layers:
        box, rgba = _warp(layer, i, labels.shape, blur)
        if rgba is None:
            continue
        if image is not None:
            if layer.shadow and sun is not None:
                _cast_shadow(image, box, rgba[..., 3], sun, layer.shadow)
            through = cv2.cvtColor(255 - rgba[..., 3], cv2.COLOR_GRAY2BGR)
            behind = cv2.multiply(image[box], through, scale=1 / 255)
            image[box] = cv2.add(behind, np.ascontiguousarray(rgba[..., :3]))
        labels[box][rgba[..., 3] >= SOLID] = layer.label


def _warp(layer: Layer, i: int, size: tuple[int, int], blur: bool) -> tuple[tuple[slice, slice], np.ndarray | None]:
    """Draw a layer at moment i: the box of the frame it covers and its premultiplied RGBA there (None: not in view)."""
    h, w = size
    ch, cw = layer.rgba.shape[:2]
    matrix = layer.matrices[i]
    corners = np.array([[0, 0], [cw, 0], [0, ch], [cw, ch]]) @ matrix[:, :2].T + matrix[:, 2]
    bend = None if layer.bends is None else layer.bends[i]
    margin = 2.0
    if blur:
        margin += np.abs(layer.shift[i]).max() / 2
    if bend is not None:
        margin += np.abs(bend).max() * np.sqrt(abs(np.linalg.det(matrix[:, :2])))
    x0, y0 = np.maximum(np.floor(corners.min(0) - margin), 0).astype(int)
    x1, y1 = np.minimum(np.ceil(corners.max(0) + margin), (w, h)).astype(int)
    box = (slice(y0, y1), slice(x0, x1))
    if x1 - x0 < 2 or y1 - y0 < 2 or abs(np.linalg.det(matrix[:, :2])) < 1e-6:
        return box, None
    inverse = cv2.invertAffineTransform(matrix)
    if bend is None:
        local = _compose(inverse, _translate(x0, y0))
        rgba = cv2.warpAffine(layer.rgba, local, (x1 - x0, y1 - y0), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    else:
        x, y = np.arange(x0, x1, dtype=np.float32), np.arange(y0, y1, dtype=np.float32)[:, None]
        inverse = inverse.astype(np.float32)
        # Displacements are looked up on their coarse grid through the same matrix: one warp, one sampling.
        nodes = np.array([(bend.shape[1] - 1) / (cw - 1), (bend.shape[0] - 1) / (ch - 1)])
        grid = _compose(np.hstack([np.diag(nodes), np.zeros((2, 1))]), _compose(inverse, _translate(x0, y0)))
        offset = cv2.warpAffine(
            bend,
            grid,
            (x1 - x0, y1 - y0),
            flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        offset[..., 0] += inverse[0, 0] * x + (inverse[0, 1] * y + inverse[0, 2])
        offset[..., 1] += inverse[1, 0] * x + (inverse[1, 1] * y + inverse[1, 2])
        rgba = cv2.remap(layer.rgba, offset, None, cv2.INTER_LINEAR)
    if blur:
        rgba = _motion_blur(rgba, layer.shift[i])
    return box, rgba


# --- appearance ---------------------------------------------------------------------------------------------------


def _motion_blur(image: np.ndarray, shift: np.ndarray, most: float = 14.0) -> np.ndarray:
    """Smear an image along `shift` (x, y) pixels, what it moves while the shutter is open."""
    length = float(np.hypot(*shift))
    if length < 1.2:
        return image
    dx, dy = np.asarray(shift) * (min(length, most) / length / 2)
    reach = int(np.ceil(max(abs(dx), abs(dy)))) + 1
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
    for step in np.linspace(-1, 1, 4 * reach + 1):
        x, y = reach + dx * step, reach + dy * step
        kernel[round(y), round(x)] += 1
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)


def _cast_shadow(image: np.ndarray, box: tuple[slice, slice], alpha: np.ndarray, sun: np.ndarray, depth: float) -> None:
    """Darken what lies under a layer: its alpha, moved away from the light and softened, in place."""
    h, w = image.shape[:2]
    y0, x0 = box[0].start, box[1].start
    dy, dx = int(sun[1] * alpha.shape[0]) + 2, int(sun[0] * alpha.shape[1])
    pad = max(4, max(alpha.shape) // 10)
    dark = cv2.copyMakeBorder(alpha, pad, pad, pad, pad, cv2.BORDER_CONSTANT, value=0)
    dark = cv2.blur(dark, (pad, pad))
    top, left = y0 + dy - pad, x0 + dx - pad
    a, b = max(top, 0), max(left, 0)
    c, d = min(top + dark.shape[0], h), min(left + dark.shape[1], w)
    if c <= a or d <= b:
        return
    keep = cv2.convertScaleAbs(dark[a - top : c - top, b - left : d - left], alpha=-depth, beta=0)
    keep = cv2.cvtColor(255 - keep, cv2.COLOR_GRAY2BGR)
    image[a:c, b:d] = cv2.multiply(image[a:c, b:d], keep, scale=1 / 255)


def _color_matrix(rng: np.random.Generator, strength: float) -> np.ndarray:
    """A random change of brightness, contrast, saturation and tint: (4, 4), for premultiplied RGBA in 0..255."""
    saturation = np.exp(rng.normal(0, strength * 1.5))
    grey = np.full((3, 3), 1 / 3) * (1 - saturation)
    gain = np.exp(np.clip(rng.normal(0, strength) + rng.normal(0, strength * 0.4, 3), -0.5, 0.35))
    matrix = np.eye(4)
    matrix[:3, :3] = (grey + np.eye(3) * saturation) * gain[:, None]
    matrix[:3, 3] = rng.normal(0, strength * 0.3)
    return matrix


def _recolor(rng: np.random.Generator, rgba: np.ndarray, look: np.ndarray | None) -> np.ndarray:
    """Change the colours of a cut-out; with `look` also move its mean part of the way to that colour."""
    matrix = _color_matrix(rng, 0.18)
    if rng.random() < 0.12:
        matrix[:3] = matrix[rng.permutation(3)]
    if look is not None:
        weight = rgba[..., 3].astype(np.float32).sum() / 255
        mean = matrix[:3, :3] @ (rgba[..., :3].reshape(-1, 3).sum(0) / max(weight, 1)) + matrix[:3, 3] * 255
        matrix[:3, 3] += (look - mean) / 255 * rng.uniform(0, 0.5)
    changed = cv2.transform(rgba, matrix)
    # Premultiplied: no channel may exceed alpha, or a soft edge would shine.
    changed[..., :3] = np.minimum(changed[..., :3], changed[..., 3:])
    return changed


def _vary(rng: np.random.Generator, rgba: np.ndarray) -> np.ndarray:
    """A look-alike of a cut-out: mirrored perhaps, with a slight change of colour."""
    if rng.random() < 0.5:
        rgba = np.ascontiguousarray(rgba[:, ::-1])
    matrix = _color_matrix(rng, 0.08)
    changed = cv2.transform(rgba, matrix)
    changed[..., :3] = np.minimum(changed[..., :3], changed[..., 3:])
    return changed


def _blob(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """A smooth random shape filled with a piece of a photograph: premultiplied RGBA."""
    side = int(rng.integers(60, min(180, *image.shape[:2])))
    other = int(np.clip(side * np.exp(rng.normal(0, 0.4)), 40, min(image.shape[:2])))
    h, w = (side, other) if rng.random() < 0.5 else (other, side)
    y, x = (int(rng.integers(0, n - m + 1)) for n, m in zip(image.shape[:2], (h, w), strict=True))
    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    radius = np.ones(64)
    for wave in range(2, 7):
        radius += rng.normal(0, 0.35 / wave) * np.cos(wave * angles + rng.uniform(0, 2 * np.pi))
    radius = np.clip(radius, 0.25, None) / radius.max()
    outline = np.stack([np.cos(angles) * w, np.sin(angles) * h], 1) * radius[:, None] * 0.46 + (w / 2, h / 2)
    alpha = np.zeros((h, w), np.uint8)
    cv2.fillPoly(alpha, [np.round(outline * 16).astype(np.int32)], 255, lineType=cv2.LINE_AA, shift=4)
    rgba = np.dstack([image[y : y + h, x : x + w], alpha]).astype(np.uint16)
    rgba[..., :3] = (rgba[..., :3] * rgba[..., 3:] + 127) // 255
    return rgba.astype(np.uint8)


def _spot(rng: np.random.Generator, size: tuple[int, int], times: np.ndarray) -> list[np.ndarray]:
    """Uneven light that wanders: one (h, w, 3) uint8 factor a frame, 128 = unchanged."""
    start, end = (rng.uniform(-0.35, 0.35, (4, 4)) for _ in range(2))
    maps = []
    for t in times:
        coarse = np.clip(128 * np.exp(start + (end - start) * t * 0.5), 40, 255).astype(np.uint8)
        fine = cv2.resize(coarse, (size[1], size[0]), interpolation=cv2.INTER_CUBIC)
        maps.append(cv2.cvtColor(fine, cv2.COLOR_GRAY2BGR))
    return maps


def _without(rng: np.random.Generator, photo: Photo, cutouts: list[Cutout], image: np.ndarray) -> np.ndarray:
    """The photograph with the given instances filled in, because what is behind them comes into view."""
    h, w = image.shape[:2]
    hole = np.zeros((h, w), np.uint8)
    for cutout in cutouts:
        (x, y), (ch, cw) = cutout.corner, cutout.rgba.shape[:2]
        a, b, c, d = max(y, 0), max(x, 0), min(y + ch, h), min(x + cw, w)
        part = cutout.rgba[a - y : c - y, b - x : d - x, 3]
        hole[a:c, b:d] = np.maximum(hole[a:c, b:d], (part > 8).astype(np.uint8))
    hole = cv2.dilate(hole, np.ones((5, 5), np.uint8))
    filled = image[:, ::-1] if rng.random() < 0.25 else _diffuse(image, hole)
    soft = cv2.cvtColor(cv2.blur(hole * 255, (3, 3)), cv2.COLOR_GRAY2BGR)
    return cv2.add(
        cv2.multiply(image, 255 - soft, scale=1 / 255), cv2.multiply(np.ascontiguousarray(filled), soft, scale=1 / 255)
    )


def _diffuse(image: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """Fill a hole smoothly from its surroundings: average what is known over ever larger cells, coarse to fine."""
    known = (1 - hole).astype(np.float32)
    pyramid = [(image.astype(np.float32) * known[..., None], known)]
    while min(pyramid[-1][1].shape) > 2:
        color, weight = pyramid[-1]
        half = (max(color.shape[1] // 2, 1), max(color.shape[0] // 2, 1))
        pyramid.append(
            (
                cv2.resize(color, half, interpolation=cv2.INTER_AREA),
                cv2.resize(weight, half, interpolation=cv2.INTER_AREA),
            )
        )
    color, weight = pyramid[-1]
    result = color / np.maximum(weight, 1e-3)[..., None]
    for color, weight in reversed(pyramid[:-1]):
        below = cv2.resize(result, (color.shape[1], color.shape[0]), interpolation=cv2.INTER_LINEAR)
        result = color + below * (1 - weight)[..., None]
    return np.clip(result, 0, 255).astype(np.uint8)


# --- contact sheet ------------------------------------------------------------------------------------------------


def contact_sheet(dataset: SyntheticClips, rows: int = 8, first: int = 0) -> np.ndarray:
    """Clips `first`.. of a data set, one a row, each frame with its masks drawn in: (h, w, 3) uint8."""
    from data.masks import overlay

    strips = []
    for index in range(first, first + rows):
        sample = dataset[index]
        frames = sample["frames"].permute(0, 2, 3, 1).numpy()
        labels = sample["labels"].numpy()
        plain, drawn = list(frames), [overlay(f, m, 0.45) for f, m in zip(frames, labels, strict=True)]
        strips.append(np.hstack(plain))
        strips.append(np.hstack(drawn))
    return np.vstack(strips)


def main(
    sources: str | list[str],
    output: str = "sheet.png",
    rows: int = 6,
    size: tuple[int, int] = (241, 241),
    max_objects: int = 10,
    max_gap: int = 12,
    motion: float = 1.0,
    seed: int = 0,
    debug: bool = False,
) -> None:
    """Write a contact sheet of synthetic clips.

    Args:
        sources: folders with cut-outs, photographs with instance masks, or photographs, separated by commas.
        output: image file to write.
        rows: clips on the sheet, one a row, once plain and once with its masks.
        size: height and width of the clips.
        max_objects: most labelled objects in a clip.
        max_gap: most video frames between two frames of a clip.
        motion: factor on all speeds.
        seed: another seed draws other clips.
        debug: show the traceback of an error.
    """
    sources = sources.split(",") if isinstance(sources, str) else sources
    dataset = SyntheticClips(sources, size=size, max_objects=max_objects, max_gap=max_gap, motion=motion, seed=seed)
    sheet = contact_sheet(dataset, rows)
    target = Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    _, data = cv2.imencode(target.suffix or ".png", cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR))
    partial = target.with_name(target.name + ".part")
    partial.write_bytes(data.tobytes())
    partial.replace(target)
    print(f"{target}: {rows} clips from {len(dataset.cutouts)} cut-outs and {len(dataset.photos)} photographs")


if __name__ == "__main__":
    from utils.cli import run

    run(main)
