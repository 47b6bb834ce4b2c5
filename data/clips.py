"""Training clips from videos and from static images, merged, and mixed from several data sets.

A sample is one clip: `dict(frames=uint8 (t, 3, h, w) RGB, labels=uint8 (t, h, w), num_objects=int, name=str)`. Labels
are 0 for background, 1..num_objects without gaps for the objects of the first frame, 255 for pixels to ignore.

Sampling follows the published training of AOT / DeAOT; every number is an argument with the published default.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.images import list_images, read_image, read_rgb
from data.transforms import IGNORE, ClipTransform, StillTransform, count_labels, merge_clips
from utils.errors import InputError

Sample = dict[str, Any]
Clip = tuple[np.ndarray, np.ndarray, int]  # frames (t, h, w, 3), label maps (t, h, w), number of objects


class ClipDataset(torch.utils.data.Dataset):
    """A map-style data set whose item `i` depends on `(seed, epoch, i)` alone, never on worker, rank or call order.

    The epoch lives in shared memory, so that `set_epoch` reaches workers that stay alive between epochs.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that all following draws belong to."""
        self._epoch.fill_(epoch)

    def generator(self, index: int, stream: int = 0) -> np.random.Generator:
        """The random numbers of item `index` in the present epoch; `stream` gives independent ones for a second use."""
        return np.random.default_rng([self.seed, int(self._epoch), index, stream])


class MergedClips(ClipDataset):
    """What video clips and clips from static images share: merging, another try for an empty clip, broken files.

    With probability `merge`, and always when it shows no object, a clip gets the objects of a second one pasted over
    it. A file that cannot be read costs a new draw and a warning; more than `max_broken` of them are an error.
    """

    def __init__(self, source: str, count: int, *, merge: float, min_pixels: int, max_broken: int, seed: int) -> None:
        super().__init__(seed)
        self.source, self.count = source, count
        self.merge, self.min_pixels, self.max_broken = merge, min_pixels, max_broken
        self.broken: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def draw(self, rng: np.random.Generator, item: int) -> Clip:
        """Draw one clip of video or image `item`."""
        raise NotImplementedError

    def name(self, item: int) -> str:
        """What samples of `item` are called."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        """Item `index`; an index past the length draws from the same videos again, differently."""
        unread = None
        for attempt in range(20):
            # A new try starts from numbers of its own, whatever the failed one used up.
            rng = self.generator(index, attempt)
            item = index % self.count if attempt == 0 else int(rng.integers(self.count))
            try:
                frames, labels, objects = self.draw(rng, item)
                if objects == 0 or rng.random() < self.merge:
                    other = (item + int(rng.integers(1, self.count))) % self.count if self.count > 1 else item
                    more_frames, more_labels, _ = self.draw(rng, other)
                    frames, labels, objects = merge_clips(
                        rng, frames, labels, more_frames, more_labels, min_pixels=self.min_pixels
                    )
            except InputError as error:
                self._skip(error)
                unread = error
                continue
            if objects:
                return make_sample(frames, labels, objects, self.name(item))
        reason = f"show no object of more than {self.min_pixels} pixels" + (f", or: {unread}" if unread else "")
        raise InputError(f"{self.source}: 20 clips in a row {reason}")

    def _skip(self, error: InputError) -> None:
        message = str(error)
        if message not in self.broken:
            self.broken.add(message)
            warnings.warn(f"skipped: {message}", stacklevel=2)
        if len(self.broken) > self.max_broken:
            raise InputError(f"{self.source}: more than {self.max_broken} files cannot be used, the last: {message}")


class VideoClips(MergedClips):
    """Clips from videos in the layout of DAVIS: `images/<sequence>/<frame>.jpg`, `annotations/<sequence>/<frame>.png`.

    Args:
        root: folder that the other paths start from.
        images, annotations: folders of the sequences; where such a folder holds one resolution folder alone
            (`JPEGImages/480p`), that is meant.
        sequences: names, or a text file with one name a line (`ImageSets/2017/train.txt`); default all.
        frames: length of a clip.
        max_gap: neighbours in a clip are 1..max_gap annotated frames apart.
        min_reference: pixels that objects must cover in the first frame for it to be taken at the first tries.
        cache_megabytes: so much of the decoded frames is kept in memory, filled here, before workers start.

    Raises:
        InputError: a folder, list or sequence is missing or empty.
    """

    def __init__(
        self,
        root: str | Path,
        images: str = "JPEGImages",
        annotations: str = "Annotations",
        sequences: str | Sequence[str] | None = None,
        *,
        transform: ClipTransform | None = None,
        frames: int = 5,
        max_gap: int = 12,
        min_reference: int = 200,
        merge: float = 0.3,
        cache_megabytes: float = 0,
        max_broken: int = 20,
        seed: int = 0,
    ) -> None:
        self.transform = transform or ClipTransform()
        self.videos = find_videos(Path(root), images, annotations, sequences)
        super().__init__(
            str(root),
            len(self.videos),
            merge=merge,
            min_pixels=self.transform.min_pixels,
            max_broken=max_broken,
            seed=seed,
        )
        self.frames, self.max_gap, self.min_reference = frames, max_gap, min_reference
        self.reader = PairReader([pair for _, pairs in self.videos for pair in pairs], cache_megabytes)
        self._objects: dict[Path, tuple[int, frozenset[int]]] = {}

    def name(self, item: int) -> str:
        return self.videos[item][0]

    def draw(self, rng: np.random.Generator, item: int) -> Clip:
        pairs = self.videos[item][1]
        if rng.random() < 0.5:
            pairs = pairs[::-1]
        for _ in range(5):
            steps = np.cumsum(rng.integers(1, self.max_gap + 1, self.frames - 1))
            for _ in range(20):
                start = int(rng.integers(len(pairs)))
                if self._visible(pairs[start])[0] > self.min_reference:
                    break
            else:
                start = 0
            chosen = [pairs[reflect(start + step, len(pairs))] for step in (0, *steps)]
            shown = [self._visible(pair)[1] for pair in chosen]
            if frozenset().union(*shown[1:]) <= shown[0]:
                break
        images, labels = zip(*(self.reader.read(pair) for pair in chosen), strict=True)
        return self.transform(rng, images, labels)

    def _visible(self, pair: tuple[Path, Path]) -> tuple[int, frozenset[int]]:
        """Pixels of all objects of a frame, and their ids."""
        if pair[1] not in self._objects:
            counts = count_labels(self.reader.read_labels(pair))[1:IGNORE]
            self._objects[pair[1]] = (int(counts.sum()), frozenset((np.flatnonzero(counts) + 1).tolist()))
        return self._objects[pair[1]]


class StillClips(MergedClips):
    """Clips made from static images with masks: each is moved, coloured and cropped in `frames` different ways.

    `images` and `masks` are folders, searched with all their sub-folders; a mask has the path and name of its image,
    ending in .png. Raises InputError when there is no such pair.
    """

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        *,
        transform: StillTransform | None = None,
        merge: float = 1.0,
        min_pixels: int = 100,
        cache_megabytes: float = 0,
        max_broken: int = 20,
        seed: int = 0,
    ) -> None:
        self.transform = transform or StillTransform()
        self.pairs = find_pairs(Path(images), Path(masks))
        super().__init__(
            str(images), len(self.pairs), merge=merge, min_pixels=min_pixels, max_broken=max_broken, seed=seed
        )
        self.reader = PairReader(self.pairs, cache_megabytes)

    def name(self, item: int) -> str:
        return self.pairs[item][0].stem

    def draw(self, rng: np.random.Generator, item: int) -> Clip:
        return self.transform(rng, *self.reader.read(self.pairs[item]))


class Mixture(ClipDataset):
    """Several clip data sets as one.

    With `repeats` (default 1 each) an epoch holds data set k `repeats[k]` times, each time drawn anew. With `weights`
    it holds `length` clips (default the sum of all lengths), each from a data set drawn with these odds.
    """

    def __init__(
        self,
        datasets: Sequence[ClipDataset],
        *,
        repeats: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if repeats is not None and weights is not None:
            raise InputError("a mixture takes repeats or weights, not both")
        for given, option in ((repeats, "repeats"), (weights, "weights")):
            if given is not None and (len(given) != len(datasets) or min(given) < 0 or sum(given) == 0):
                raise InputError(f"{option} {list(given)}: want {len(datasets)} numbers from 0 up, not all 0")
        self.datasets = list(datasets)
        lengths = np.array([len(dataset) for dataset in datasets])
        self.odds = None if weights is None else np.asarray(weights, float) / sum(weights)
        self.ends = np.cumsum(lengths * (np.ones(len(datasets), int) if repeats is None else np.asarray(repeats)))
        self.length = int(self.ends[-1]) if length is None or weights is None else length

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for dataset in self.datasets:
            dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if self.odds is not None:
            # The index goes on unchanged: two draws of one data set in an epoch never share their random numbers.
            return self.datasets[self.generator(index).choice(len(self.datasets), p=self.odds)][index]
        turn, place = divmod(index, self.length)
        which = int(np.searchsorted(self.ends, place, side="right"))
        first = int(self.ends[which - 1]) if which else 0
        return self.datasets[which][place - first + turn * (int(self.ends[which]) - first)]


# --- files --------------------------------------------------------------------------------------------------------


def find_videos(
    root: Path, images: str, annotations: str, sequences: str | Sequence[str] | None
) -> list[tuple[str, list[tuple[Path, Path]]]]:
    """Sequences of a folder in DAVIS layout: names, each with its (image, mask) files in order of time.

    Only frames with both count. Raises InputError naming the folder, and the layout that was expected.
    """
    layout = f"expected {images}/<sequence>/<frame>.jpg and {annotations}/<sequence>/<frame>.png in {root}"
    folders = []
    for part in (images, annotations):
        folder = root / part
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; {layout}")
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        if len(inside) == 1 and inside[0].is_dir() and any(path.is_dir() for path in inside[0].iterdir()):
            folder = inside[0]
        folders.append(folder)
    if sequences is None:
        names = sorted(path.name for path in folders[1].iterdir() if path.is_dir())
    elif isinstance(sequences, str):
        listing = root / sequences
        if not listing.is_file():
            raise InputError(f"{listing}: no such file; expected a text file with one sequence name a line")
        try:
            lines = [line.split()[0] for line in listing.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise InputError(f"{listing}: is no text in UTF-8 ({error})") from None
        # DAVIS 2016 lists the path of every image instead of the names of the videos.
        names = list(dict.fromkeys(Path(line).parent.name if Path(line).suffix else line for line in lines))
    else:
        names = list(sequences)
    if not names:
        raise InputError(f"{folders[1]}: no sequence; {layout}")
    videos = []
    for name in names:
        for folder in folders:
            if not (folder / name).is_dir():
                raise InputError(f"{folder / name}: no such folder; {layout}")
        masks = {path.stem: path for path in list_images(folders[1] / name)[0]}
        pairs = [(path, masks[path.stem]) for path in list_images(folders[0] / name)[0] if path.stem in masks]
        if not pairs:
            raise InputError(f"{folders[1] / name}: no mask is named like an image in {folders[0] / name}; {layout}")
        videos.append((name, pairs))
    return videos


def find_pairs(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Images with a mask of the same relative path and stem. Raises InputError when there is none."""
    layout = f"expected images in {images} and masks of the same names, ending in .png, in {masks}"
    for folder in (images, masks):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; {layout}")
    found = {path.relative_to(masks).with_suffix(""): path for path in sorted(masks.rglob("*.png"))}
    pairs = []
    for path in sorted(images.rglob("*")):
        key = path.relative_to(images).with_suffix("")
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp", ".bmp") and key in found:
            pairs.append((path, found[key]))
    if not pairs:
        raise InputError(f"{images}: no image has a mask; {layout}")
    return pairs


def read_labels(path: Path) -> np.ndarray:
    """Read a training mask as a label map (h, w) uint8.

    Indexed and grey files hold ids themselves, 255 means ignore; a grey or black-and-white file with 0 and 255 alone
    holds one object. Raises InputError for files that cannot be read and for ids above 254.
    """
    image = read_image(path)
    if image.mode not in ("P", "L", "1", "I", "I;16"):
        raise InputError(f"{path}: a mask of mode {image.mode}; training needs indexed or grey PNG with ids as values")
    labels = np.asarray(image)
    if image.mode == "1":
        return labels.astype(np.uint8)
    if labels.dtype != np.uint8:
        if labels.max() >= IGNORE:
            raise InputError(f"{path}: id {labels.max()}; training masks may hold ids 1 to 254")
        return labels.astype(np.uint8)
    if image.mode == "L" and labels.max() == IGNORE and not np.any((labels > 0) & (labels < IGNORE)):
        return (labels == IGNORE).astype(np.uint8)
    return labels


class PairReader:
    """Reads (image, mask) files, and keeps the first of them decoded within `megabytes`.

    The cache is filled at once: workers that are forked later share it, and reads stay the same for any of them.
    """

    def __init__(self, pairs: Sequence[tuple[Path, Path]], megabytes: float = 0) -> None:
        self.cache: dict[tuple[Path, Path], tuple[np.ndarray, np.ndarray]] = {}
        left = megabytes * 2**20
        for pair in pairs:
            if left <= 0:
                break
            try:
                image, labels = self.read(pair)
            except InputError:
                continue  # reported when a clip asks for it
            image.setflags(write=False)
            labels.setflags(write=False)
            left -= image.nbytes + labels.nbytes
            if left >= 0:
                self.cache[pair] = image, labels

    def read(self, pair: tuple[Path, Path]) -> tuple[np.ndarray, np.ndarray]:
        """Image (h, w, 3) and label map (h, w) of one size; a mask of another size is resized to the image's."""
        if pair in self.cache:
            return self.cache[pair]
        image, labels = read_rgb(pair[0]), read_labels(pair[1])
        if labels.shape != image.shape[:2]:
            import cv2

            labels = cv2.resize(labels, image.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        return image, np.ascontiguousarray(labels)

    def read_labels(self, pair: tuple[Path, Path]) -> np.ndarray:
        """The label map alone, in the size of its file."""
        return self.cache[pair][1] if pair in self.cache else read_labels(pair[1])


def reflect(index: int, length: int) -> int:
    """Fold an index past the end back into 0..length-1, as a mirror at both ends would."""
    if length == 1:
        return 0
    index %= 2 * (length - 1)
    return min(index, 2 * (length - 1) - index)


# --- samples and batches ------------------------------------------------------------------------------------------


def make_sample(frames: np.ndarray, labels: np.ndarray, num_objects: int, name: str) -> Sample:
    """Pack images (t, h, w, 3) uint8 and label maps (t, h, w) uint8 into the sample format."""
    return {
        "frames": torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2))),
        "labels": torch.from_numpy(np.ascontiguousarray(labels)),
        "num_objects": int(num_objects),
        "name": name,
    }


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Stack samples of equal size: frames (b, t, 3, h, w), labels (b, t, h, w), num_objects (b,) int64, names list."""
    return {
        "frames": torch.stack([sample["frames"] for sample in samples]),
        "labels": torch.stack([sample["labels"] for sample in samples]),
        "num_objects": torch.tensor([sample["num_objects"] for sample in samples]),
        "names": [sample["name"] for sample in samples],
    }


def worker_init(worker_id: int) -> None:
    """`worker_init_fn` of the loader: one thread a worker, because OpenCV's own pool only slows several workers."""
    import cv2

    cv2.setNumThreads(0)
