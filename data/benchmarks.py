"""Benchmarks in the folders their authors ship them in: which videos, which frames, which masks a model is given.

Layouts (`<root>` is `--data_root`; frames may be any image files, masks are PNGs named like their frame):

    davis2016, davis2017        <root>/JPEGImages/{480p,Full-Resolution}/<video>/  <root>/Annotations/{...}/<video>/
                                <root>/ImageSets/{2016,2017}/<split>.txt
    youtubevos2018, ...2019     <root>/<split>/JPEGImages/<video>/  .../Annotations/<video>/  .../meta.json
                                valid_all_frames: dense frames there, masks and meta.json in <root>/valid
    mose, lvos                  <root>/<split>/JPEGImages/<video>/  .../Annotations/<video>/
    vost                        <root>/JPEGImages/<video>/  <root>/Annotations/<video>/  <root>/ImageSets/<split>.txt
    folder                      as vost; without a split all videos; a folder 480p between may be there
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.images import IMAGE_SUFFIXES, list_images, natural_key, picture_size
from data.labels import label_ids, read_label_png
from utils.errors import InputError
from utils.metrics import VOID, YOUTUBEVOS_SEEN

# default split, preset, layout
DATASETS = {
    "davis2016": ("val", "davis2016", "davis"),
    "davis2017": ("val", "davis2017", "davis"),
    "youtubevos2018": ("valid", "youtubevos", "youtubevos"),
    "youtubevos2019": ("valid", "youtubevos", "youtubevos"),
    "mose": ("valid", "mose", "split"),
    "lvos": ("valid", "lvos", "split"),
    "vost": ("val", "vost", "list"),
    "folder": (None, "all", "list"),
}


@dataclass(frozen=True)
class Video:
    """One video of a benchmark.

    frames: image files in order.
    masks: frame name -> PNG with ids, for every frame that has one.
    first_only: the model is given the first mask alone; otherwise also the masks of objects that appear later.
    merge: all objects are one.
    output_size: (height, width) of the masks to write; None: of the frames.
    kept: names of the frames that the benchmark asks for; None: all.
    """

    name: str
    frames: tuple[Path, ...]
    masks: dict[str, Path]
    first_only: bool = False
    merge: bool = False
    output_size: tuple[int, int] | None = None
    kept: frozenset[str] | None = None

    @property
    def asked(self) -> list[str]:
        """Names of the frames that the benchmark asks for, in order."""
        return [path.stem for path in self.frames if self.kept is None or path.stem in self.kept]


@dataclass(frozen=True)
class Benchmark:
    """Videos of one data set and how to score and submit them.

    truth: folder of the masks, `<truth>/<video>/<frame>.png`.
    preset: name of the scoring rules in `utils.metrics`.
    unlabelled: names of videos with frames that are to be scored and have no mask.
    seen: video -> object id -> whether training has shown its category, where the benchmark distinguishes.
    """

    dataset: str
    split: str | None
    videos: tuple[Video, ...]
    truth: Path
    preset: str
    unlabelled: tuple[str, ...] = ()
    seen: dict[str, dict[int, bool]] = field(default_factory=dict)

    @property
    def archive_root(self) -> str:
        """Folder inside the archive that the benchmark's server reads."""
        return "Annotations/" if self.dataset.startswith("youtubevos") else ""


def open_benchmark(
    dataset: str,
    data_root: str | Path,
    split: str | None = None,
    resolution: str = "480p",
    with_frames: bool = True,
) -> Benchmark:
    """Finds the videos of a benchmark; reads no frame and no mask.

    Args:
        dataset: a key of `DATASETS`.
        data_root: its folder.
        split: name of a list or of a folder; None: the usual one of the data set.
        resolution: DAVIS only, 480p or full; masks are written at 480p for both.
        with_frames: whether the frames are needed; else masks stand in for those that are not there.

    Raises InputError that names the folder and the layout when something is not there.
    """
    if dataset not in DATASETS:
        raise InputError(f"dataset {dataset!r}: no such data set; choose one of {', '.join(DATASETS)}")
    if resolution not in ("480p", "full"):
        raise InputError(f"resolution {resolution!r}: 480p or full is needed")
    default, preset, layout = DATASETS[dataset]
    root, split = Path(data_root), split or default
    _need(root, "the root folder of the data set")
    source = _Source(dataset, root, split, resolution, with_frames)
    layouts = {"davis": _davis, "youtubevos": _youtubevos, "split": _split_folder, "list": _listed}
    truth, videos, seen = layouts[layout](source)
    unlabelled = tuple(v.name for v in videos if not v.masks.keys() >= set(v.asked))
    return Benchmark(dataset, split, tuple(videos), truth, preset, unlabelled, seen)


def given_mask(video: Video, frame: str, known: set[int]) -> np.ndarray | None:
    """The (H, W) mask that a model is given with a frame, or None.

    It holds the objects that are not in `known` yet, and only them; with `first_only` there is none once an object is
    known. Void pixels become background.

    Raises InputError for a mask that cannot be read.
    """
    if frame not in video.masks or (video.first_only and known):
        return None
    labels = read_label_png(video.masks[frame])
    ids = label_ids(labels) - {0}
    if video.merge:
        # DAVIS 2016 ships single objects as 255; beside other ids that is void.
        labels = ((labels != 0) & ((labels != VOID) | (ids == {VOID}))).astype(np.uint8)
        ids = {1} if labels.any() else set()
    new = ids - known - {VOID}
    if not new:
        return None
    return np.where(np.isin(labels, sorted(new)), labels, 0)


# ------------------------------------------------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class _Source:
    """What was asked for."""

    dataset: str
    root: Path
    split: str | None
    resolution: str
    with_frames: bool

    def need(self, images: Path, *masks: Path) -> None:
        if self.with_frames:
            _need(images, f"the frames of {self.dataset}, {images}/<video>/<frame>.jpg")
        for folder in masks:
            _need(folder, f"the masks of {self.dataset}, {folder}/<video>/<frame>.png")

    def frames(self, folder: Path, masks: dict[str, Path]) -> tuple[Path, ...]:
        if not folder.is_dir() and not self.with_frames:
            return tuple(masks.values())
        _need(folder, f"the frames of the video {folder.name}, {folder}/<frame>.jpg")
        return tuple(list_images(folder)[0])

    def frames_of_masks(self, folder: Path, masks: dict[str, Path]) -> tuple[Path, ...]:
        """The same where every mask counts: one that no frame has would be an object lost silently."""
        frames = self.frames(folder, masks)
        if lost := masks.keys() - {path.stem for path in frames}:
            name = min(lost, key=natural_key)
            raise InputError(f"{masks[name]}: {folder} has no frame of that name; {len(lost)} masks are like this")
        return frames

    def videos(self, images: Path, truth: Path) -> list[str]:
        return _folders(images if self.with_frames or images.is_dir() else truth)


def _davis(source: _Source) -> tuple[Path, list[Video], dict]:
    root, year = source.root, source.dataset.removeprefix("davis")
    names = _read_list(root / "ImageSets" / year / f"{source.split}.txt")
    folder = {"480p": "480p", "full": "Full-Resolution"}[source.resolution]
    images, given, truth = root / "JPEGImages" / folder, root / "Annotations" / folder, root / "Annotations" / "480p"
    source.need(images, given, truth)
    videos = []
    for name in names:
        masks = _masks(truth / name)
        frames = source.frames(images / name, masks)
        first = frames[0].stem
        first_mask = given / name / f"{first}.png"
        if first not in masks or not first_mask.is_file():
            raise InputError(f"{first_mask}: no such file; needed is the mask of the first frame")
        # Server and toolkit score at 480p whatever the frames are: 480 x ceil(480 w / h), the size of these masks.
        size = picture_size(masks[first])
        masks[first] = first_mask
        videos.append(Video(name, frames, masks, first_only=True, merge=year == "2016", output_size=size))
    return truth, videos, {}


def _youtubevos(source: _Source) -> tuple[Path, list[Video], dict]:
    folder = source.root / source.split
    sparse = source.root / source.split.removesuffix("_all_frames")
    source.need(folder / "JPEGImages", sparse / "Annotations")
    meta = _read_meta(sparse / "meta.json")
    videos, seen = [], {}
    for name, entry in sorted(meta.items()):
        try:
            objects = {int(i): (list(o["frames"]), o.get("category")) for i, o in entry["objects"].items()}
            kept = frozenset(frame for frames, _ in objects.values() for frame in frames)
            if not kept or not all(isinstance(frame, str) for frame in kept):
                raise ValueError
            categories = {i: category in YOUTUBEVOS_SEEN for i, (_, category) in objects.items() if category}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                f"{sparse / 'meta.json'}: {name} is not as 'objects': {{id: {{'frames': [...], 'category': ...}}}}"
            ) from None
        masks = _masks(sparse / "Annotations" / name)
        images = source.frames(folder / "JPEGImages" / name, masks)
        if folder == sparse:
            images = tuple(path for path in images if path.stem in kept)
        else:
            images = tuple(path for path in images if min(kept) <= path.stem <= max(kept))
        if (lost := kept - {path.stem for path in images}) and source.with_frames:
            raise InputError(f"{folder / 'JPEGImages' / name}: lacks frame {min(lost)}, which meta.json lists")
        videos.append(Video(name, images, masks, kept=kept))
        if categories.keys() == objects.keys():
            seen[name] = categories
    return sparse / "Annotations", videos, seen


def _split_folder(source: _Source) -> tuple[Path, list[Video], dict]:
    root, folder = source.root, source.root / source.split
    images, truth = folder / "JPEGImages", folder / "Annotations"
    source.need(images, truth)
    videos = []
    for name in source.videos(images, truth):
        masks = _masks(truth / name)
        videos.append(Video(name, source.frames_of_masks(images / name, masks), masks))
    seen = {}
    # LVOS: its toolkit's list of the videos whose categories are not in the training set
    unseen = next((p for p in (folder / "unseen_videos.txt", root / "unseen_videos.txt") if p.is_file()), None)
    if source.dataset == "lvos" and unseen:
        names = set(_read_text(unseen).split())
        seen = {video.name: dict.fromkeys(range(1, 256), video.name not in names) for video in videos}
    return truth, videos, seen


def _listed(source: _Source) -> tuple[Path, list[Video], dict]:
    root = source.root
    images, truth = root / "JPEGImages", root / "Annotations"
    if source.dataset == "folder" and (truth / "480p").is_dir():
        images, truth = images / "480p", truth / "480p"
    source.need(images, truth)
    listed = root / "ImageSets" / f"{source.split}.txt"
    names = source.videos(images, truth) if source.split is None else _read_list(listed)
    videos = []
    for name in names:
        masks = _masks(truth / name)
        frames = source.frames_of_masks(images / name, masks)
        if source.dataset == "vost":  # its toolkit reads the annotated frames only
            frames = tuple(path for path in frames if path.stem in masks)
        videos.append(Video(name, frames, masks, first_only=source.dataset == "vost"))
    return truth, videos, {}


# ------------------------------------------------------------------------------------------------------------ reading


def _need(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; needed is {what}")


def _folders(root: Path) -> list[str]:
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise InputError(f"{root}: holds no videos; needed are {root}/<video>/<frame>.jpg")
    return names


def _masks(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; it should hold the masks of the video {folder.name}")
    masks = {path.stem: path for path in folder.glob("*.png") if not path.name.startswith(".")}
    if not masks:
        raise InputError(f"{folder}: holds no masks; needed is a PNG for the frame in which an object appears")
    return dict(sorted(masks.items(), key=lambda item: natural_key(item[0])))


def _read_list(path: Path) -> list[str]:
    if not path.is_file():
        others = sorted(p.stem for p in path.parent.glob("*.txt")) if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file; needed is a list of videos, one a line"
            + (f"; splits here: {', '.join(others)}" if others else "")
        )
    # DAVIS 2016's own lists give the paths of an image and a mask instead of the video's name.
    lines = [line.split()[0] for line in _read_text(path).splitlines() if line.strip()]
    names = [Path(line).parent.name if Path(line).suffix.lower() in IMAGE_SUFFIXES else line for line in lines]
    if not names:
        raise InputError(f"{path}: is empty; needed is a list of videos, one a line")
    return [_folder_name(name, path) for name in dict.fromkeys(names)]


def _read_meta(path: Path) -> dict:
    if not path.is_file():
        raise InputError(f"{path}: no such file; it says in which frames each object is")
    try:
        videos = json.loads(_read_text(path))["videos"]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON of the form {{'videos': {{...}}}} ({error})") from None
    if not isinstance(videos, dict) or not videos:
        raise InputError(f"{path}: lists no videos")
    return {_folder_name(name, path): entry for name, entry in videos.items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InputError(f"{path}: is no text in UTF-8 ({error})") from None


def _folder_name(name: str, path: Path) -> str:
    """A video's name as a file gives it; results go to a folder of that name, which must lie in the output folder."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise InputError(f"{path}: {name!r} is no name of a video; needed is that of a folder")
    return name
