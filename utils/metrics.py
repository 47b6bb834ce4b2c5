"""Region and boundary scores of video object segmentation, counted as the official toolkits count them.

J is the intersection over union of an object's masks, F the harmonic mean of precision and recall of their one-pixel
boundaries, matched within a small radius (Perazzi et al., "A Benchmark Dataset and Evaluation Methodology for Video
Object Segmentation", CVPR 2016, section 4; Pont-Tuset et al., "The 2017 DAVIS Challenge on Video Object Segmentation",
arXiv:1704.00675, section 3). What differs between benchmarks - which frames count, which objects, what the label 255
means, over what the mean is taken - is a `Preset`.

`jaccard` and `boundary_f` score one pair of masks, `score_frame` a pair of label maps, `score_sequence` a folder of
them, `score_folders` a whole result. `VOSMetric` collects the rows, merges them from any number of processes and takes
the means in one fixed order, so that every split of the work gives the same bits.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.images import natural_key
from data.labels import label_ids, read_label_png
from utils.errors import InputError

VOID = 255
"""Label of pixels that belong to nobody: never an object."""


# ------------------------------------------------------------------------------------------------- one pair of masks


def boundary_radius(height: int, width: int) -> int:
    """Largest distance in pixels at which two boundary pixels match: 0.8 % of the image diagonal, rounded up."""
    return math.ceil(0.008 * math.hypot(height, width))


def jaccard(gt: np.ndarray, pred: np.ndarray) -> float:
    """Intersection over union of two (H, W) masks; 1.0 when both are empty.

    Raises ValueError when the shapes differ.
    """
    gt, pred = _pair(gt, pred)
    return _ratio(np.count_nonzero(gt & pred), np.count_nonzero(gt | pred))


def boundary_f(gt: np.ndarray, pred: np.ndarray) -> float:
    """F of the boundaries of two (H, W) masks; 1.0 when neither has one.

    A boundary pixel is one that differs from its right, lower or lower right neighbour. It is matched when the other
    mask has a boundary pixel within `boundary_radius`. Raises ValueError when the shapes differ.
    """
    gt, pred = _pair(gt, pred)
    return _boundary_f(np.stack((gt, pred)), boundary_radius(*gt.shape))


def _pair(gt: np.ndarray, pred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gt, pred = np.asarray(gt).astype(bool, copy=False), np.asarray(pred).astype(bool, copy=False)
    if gt.ndim != 2 or gt.shape != pred.shape:
        raise ValueError(f"two masks of one (H, W) shape are needed, not {gt.shape} and {pred.shape}")
    return gt, pred


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _boundary_f(masks: np.ndarray, radius: int) -> float:
    """F of masks (2, h, w): ground truth and prediction, possibly cut out of larger images."""
    height, width = masks.shape[1:]
    # One boundary map is one Python integer, a bit for each pixel. Every row ends in `radius` empty columns, so that a
    # shift by up to `radius` pixels never runs into the neighbouring row.
    stride = width + radius
    edges = np.zeros((2, height, stride), dtype=bool)
    right, down = masks[:, :, :-1] ^ masks[:, :, 1:], masks[:, :-1] ^ masks[:, 1:]
    edges[:, :-1, : width - 1] = right[:, :-1] | down[:, :, :-1] | (masks[:, :-1, :-1] ^ masks[:, 1:, 1:])
    edges[:, -1, : width - 1] = right[:, -1]  # nothing below the last row, nothing right of the last column
    edges[:, :-1, width - 1] = down[:, :, -1]
    gt, pred = (int.from_bytes(np.packbits(e, bitorder="little").tobytes(), "little") for e in edges)
    precision = _ratio((pred & _dilate(gt, radius, stride)).bit_count(), pred.bit_count())
    recall = _ratio((gt & _dilate(pred, radius, stride)).bit_count(), gt.bit_count())
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _dilate(bits: int, radius: int, stride: int) -> int:
    """Sets every pixel whose distance to a set one is at most `radius`: exact, as distances are compared squared.

    The disk is a stack of rows: row dy reaches sqrt(radius^2 - dy^2) to both sides. All widths are grown once, one
    pixel at a time, and the rows are added from the outermost to the middle one, moving the sum one row each time. The
    cost is 3 * radius steps over h * w / 64 machine words.
    """
    rows = [bits]  # rows[n]: grown by n pixels to the left and to the right
    for n in range(1, radius + 1):
        rows.append(rows[-1] | bits << n | bits >> n)
    up = down = 0
    for dy in range(radius, 0, -1):
        row = rows[math.isqrt(radius * radius - dy * dy)]
        up, down = (up | row) >> stride, (down | row) << stride
    return up | rows[radius] | down


# --------------------------------------------------------------------------------------------- one pair of label maps


class Score(NamedTuple):
    """J and F of one object in one frame, fractions of 1."""

    j: float
    f: float


def score_frame(
    gt: np.ndarray, pred: np.ndarray, ids: Iterable[int] | None = None, void: np.ndarray | None = None
) -> dict[int, Score]:
    """Scores all objects of two (H, W) label maps.

    Args:
        gt: true object ids, 0 is background.
        pred: predicted object ids.
        ids: the objects that occur in either map, when known; looked for otherwise. An object in neither scores 1.
        void: (H, W) bool, pixels that are left out of both maps.

    Raises ValueError when the shapes differ.
    """
    if gt.shape != pred.shape:
        raise ValueError(f"two label maps of one (H, W) shape are needed, not {gt.shape} and {pred.shape}")
    if ids is None:
        ids = label_ids(gt) | label_ids(pred)
    if void is not None:
        gt, pred = np.where(void, 0, gt), np.where(void, 0, pred)
    radius = boundary_radius(*gt.shape)
    box = _box((gt | pred) != 0)
    gt, pred = gt[box], pred[box]
    return {i: _score_object(gt == i, pred == i, radius) for i in sorted(ids) if i != 0}


def _score_object(gt: np.ndarray, pred: np.ndarray, radius: int) -> Score:
    box = _box(gt | pred)
    masks = np.stack((gt[box], pred[box]))
    union = np.count_nonzero(masks[0] | masks[1])
    return Score(_ratio(np.count_nonzero(masks[0] & masks[1]), union), _boundary_f(masks, radius))


def _box(mask: np.ndarray) -> tuple[slice, slice]:
    """The part of an image that a mask fills, and one pixel more on each side so that no boundary is cut off.

    Where the box meets the end of the image there is no such pixel, and no boundary either.
    """
    y, x = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if y.size == 0:
        return slice(0, 1), slice(0, 1)
    return slice(max(y[0] - 1, 0), y[-1] + 2), slice(max(x[0] - 1, 0), x[-1] + 2)


# ------------------------------------------------------------------------------------------------------------ presets


@dataclass(frozen=True)
class Preset:
    """How a benchmark turns frames into numbers.

    first, last: whether a sequence's first and last annotated frame count.
    merge: all objects of a frame are one (DAVIS 2016).
    void: label 255 marks pixels that are left out; otherwise they are background.
    objects: 'first' - those of the first frame; 'any' - every id of the ground truth.
    since: the frames of an object that count: 'sequence' - all; 'mask' - those after its first true mask, which a
        model is given; 'appearance' - from the first counted frame in which truth or prediction show it.
    tail: also the mean J over the last quarter of the frames (VOST's J_tr).
    groups: also means over seen and unseen objects, and G, the mean of these four numbers.
    """

    name: str
    first: bool = False
    last: bool = False
    merge: bool = False
    void: bool = False
    objects: str = "first"
    since: str = "sequence"
    tail: bool = False
    groups: bool = False


PRESETS = {
    p.name: p
    for p in (
        # davis2017-evaluation, semi-supervised. Ids with gaps are no phantom objects here.
        Preset("davis2017"),
        Preset("davis2016", merge=True),
        # The server's rule as its page states it; the code is not public.
        Preset("youtubevos", last=True, objects="any", since="mask", groups=True),
        # lvos-evaluation leaves the last frame out and counts the first; J&F is the mean of seen and unseen there: G.
        Preset("lvos", first=True, objects="any", since="appearance", groups=True),
        # vos-benchmark
        Preset("mose", objects="any", since="appearance"),
        # VOST's toolkit: as DAVIS, and J over the last quarter
        Preset("vost", tail=True),
        Preset("all", first=True, last=True, void=True, objects="any"),
    )
}

# The 65 categories of the training set; what a validation video shows besides is unseen.
YOUTUBEVOS_SEEN = frozenset(
    """
    airplane ape bear bike bird boat bucket bus camel cat cow crocodile deer dog dolphin duck eagle earless_seal
    elephant fish fox frisbee frog giant_panda giraffe hand hat hedgehog horse knife leopard lion lizard monkey
    motorbike mouse others owl paddle parachute parrot penguin person plant rabbit raccoon sedan shark sheep sign
    skateboard snail snake snowboard squirrel surfboard tennis_racket tiger toilet train truck turtle umbrella whale
    zebra
    """.split()
)


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises InputError that lists the names."""
    if name not in PRESETS:
        raise InputError(f"preset {name!r}: no such preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


# ------------------------------------------------------------------------------------------------------- the metric


class Row(NamedTuple):
    """One object in one frame."""

    sequence: str
    object: int
    frame: str
    j: float
    f: float


class VOSMetric:
    """Collects rows and turns them into the numbers of a benchmark; merges without regard to who computed what.

    The state is a table keyed by (sequence, object, frame). A merge is the union of two tables: in any order, any
    grouping, and with rows that both hold, the result is the same. The means run over the sorted table with exact
    summation, hence the same bits for every number of processes. Methods are named as in torchmetrics.

    Args:
        preset: name of a preset.
        sequences: names of the sequences that have to be there; `compute` refuses to answer before they are.
    """

    def __init__(self, preset: str = "davis2017", sequences: Iterable[str] = ()):
        self.preset = find_preset(preset)
        self.expected = frozenset(sequences)
        self.reset()

    def reset(self) -> None:
        """Forgets all rows."""
        self._rows: dict[tuple[str, int, str], tuple[float, float]] = {}
        self._sizes: dict[str, int] = {}
        self._seen: dict[tuple[str, int], bool] = {}

    def update(self, sequence: str, rows: Iterable[Row], seen: dict[int, bool] | None = None) -> None:
        """Adds one whole sequence. `seen` tells for its objects whether training has shown their category."""
        rows = [Row(*row) for row in rows]
        self._add({sequence: len(rows)}, {row[:3]: row[3:] for row in rows}, self._sizes, self._rows)
        self._seen.update({(sequence, i): s for i, s in (seen or {}).items()})

    def merge(self, other: VOSMetric) -> None:
        """Adds the rows of another metric.

        Raises ValueError when the presets differ, or both hold a row with different values: then one of the two runs
        was not deterministic or used other weights.
        """
        if other.preset != self.preset:
            raise ValueError(f"cannot merge scores of preset {other.preset.name!r} into {self.preset.name!r}")
        self.expected |= other.expected
        self._add(other._sizes, other._rows, self._sizes, self._rows)
        self._seen.update(other._seen)

    @staticmethod
    def _add(new_sizes: dict, new_rows: dict, sizes: dict, rows: dict) -> None:
        for new, old in ((new_sizes, sizes), (new_rows, rows)):
            for key, value in new.items():
                if old.setdefault(key, value) != value:
                    raise ValueError(f"two different results for {key}: {old[key]} and {value}")

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted by sequence, object and frame."""
        keys = sorted(self._rows, key=lambda key: (key[0], key[1], natural_key(key[2])))
        return [Row(*key, *self._rows[key]) for key in keys]

    @property
    def missing(self) -> list[str]:
        """Expected sequences without a result, or with fewer rows than they had when they were added."""
        have: dict[str, int] = defaultdict(int)
        for sequence, _, _ in self._rows:
            have[sequence] += 1
        wanted = {s: self._sizes.get(s) for s in self.expected | self._sizes.keys()}
        return sorted(s for s, size in wanted.items() if size is None or have[s] != size)

    def compute(self) -> dict:
        """The numbers of `scores.json`, fractions of 1; means over objects of means over frames.

        Recall is the share of frames above 0.5, decay the mean over the first quarter of the frames minus that over
        the last one. Raises ValueError while sequences are missing or there is nothing to average.
        """
        if self.missing:
            shown = ", ".join(self.missing[:10])
            raise ValueError(f"no score: {len(self.missing)} sequences are missing or incomplete: {shown}")
        objects: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in self.rows:
            objects[row.sequence, row.object].append(row)
        if not objects:
            raise InputError("no score: the sequences hold no frames to score; more annotated frames are needed")
        table = {key: self._summary([r.j for r in rows], [r.f for r in rows]) for key, rows in objects.items()}
        scores: dict = {"preset": self.preset.name}
        scores.update({name: mean(row[name] for row in table.values()) for name in next(iter(table.values()))})
        if self.preset.groups and self._seen.keys() >= table.keys():
            scores.update(self._groups(table))
        scores["per_object"] = {f"{sequence}_{i}": row for (sequence, i), row in table.items()}
        return scores

    def _summary(self, j: list[float], f: list[float]) -> dict[str, float]:
        out = {"J&F-Mean": (mean(j) + mean(f)) / 2}
        for name, values in (("J", j), ("F", f)):
            quarters = _quarters(len(values))
            out[f"{name}-Mean"] = mean(values)
            out[f"{name}-Recall"] = sum(v > 0.5 for v in values) / len(values)
            out[f"{name}-Decay"] = mean(values[quarters[0]]) - mean(values[quarters[-1]])
        if self.preset.tail:
            out["J-last"] = mean(j[math.floor(0.75 * len(j)) :])
        return out

    def _groups(self, table: dict[tuple[str, int], dict[str, float]]) -> dict[str, float | None]:
        out: dict[str, float | None] = {}
        for name in "JF":
            for group, seen in (("seen", True), ("unseen", False)):
                values = [row[f"{name}-Mean"] for key, row in table.items() if self._seen[key] == seen]
                out[f"{name}-{group}"] = mean(values) if values else None
        four = list(out.values())
        out["G"] = None if None in four else mean(four)
        return out


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean with exact summation."""
    values = list(values)
    return math.fsum(values) / len(values)


def _quarters(count: int) -> list[slice]:
    """Four slices of `count` frames that share their end frames, rounded as the DAVIS toolkit rounds them."""
    ends = (np.round(np.linspace(1, count, 5) + 1e-10) - 1).astype(int).tolist()
    return [slice(a, b + 1) for a, b in itertools.pairwise(ends)]


def per_sequence(scores: dict) -> dict[str, dict[str, float]]:
    """Means over the objects of each sequence, from what `VOSMetric.compute` returns."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for key, row in scores["per_object"].items():
        groups[key.rpartition("_")[0]].append(row)
    return {
        sequence: {"objects": len(rows)} | {name: mean(row[name] for row in rows) for name in rows[0]}
        for sequence, rows in groups.items()
    }


# ----------------------------------------------------------------------------------------------------------- folders


def score_folders(
    ground_truth: str | os.PathLike,
    predictions: str | os.PathLike,
    preset: str = "davis2017",
    sequences: Iterable[str] | None = None,
    seen: dict[str, dict[int, bool]] | None = None,
    subset: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> dict:
    """Scores `<predictions>/<sequence>/<frame>.png` against `<ground_truth>/<sequence>/<frame>.png`.

    Args:
        ground_truth, predictions: folders of sequence folders of indexed or grey PNGs that hold object ids.
        preset: one of `PRESETS`.
        sequences: names to score; by default all of the ground truth.
        seen: for each sequence and object id whether training has shown its category (presets with groups).
        subset: score only the sequences that the predictions hold instead of refusing.
        warn: called with one line about sequences that are not scored.

    Returns the content of `scores.json`.

    Raises InputError that names the path for: the same folder twice, no or unknown folder, a sequence or frame that is
    missing, a wrong size, an unknown id, a colour picture, a file that cannot be read. There is no score then.
    """
    metric = collect_scores(ground_truth, predictions, preset, sequences, seen, subset, warn)
    return metric.compute()


def collect_scores(
    ground_truth: str | os.PathLike,
    predictions: str | os.PathLike,
    preset: str = "davis2017",
    sequences: Iterable[str] | None = None,
    seen: dict[str, dict[int, bool]] | None = None,
    subset: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> VOSMetric:
    """As `score_folders`, and returns the metric with all its rows."""
    find_preset(preset)
    truth, result = Path(ground_truth), Path(predictions)
    for folder, what in ((truth, "ground truth"), (result, "predictions")):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; {what} as <folder>/<sequence>/<frame>.png is needed")
    names = sorted(sequences) if sequences is not None else _folders(truth)
    if not names:
        raise InputError(f"{truth}: holds no sequences; ground truth as <folder>/<sequence>/<frame>.png is needed")
    found = set(_folders(result))
    if not found & set(names):
        raise InputError(f"{result}: holds none of the {len(names)} sequences; {result / names[0]} is expected")
    lacking = [name for name in names if name not in found]
    if lacking and not subset:
        raise InputError(
            f"{result / lacking[0]}: missing, and {len(lacking) - 1} more of {len(names)} sequences; "
            "all of them are needed, or --subset true to score the others alone"
        )
    names = [name for name in names if name in found]
    for name in names:
        if os.path.samefile(truth / name, result / name):
            raise InputError(f"{result / name}: is the ground truth itself; the folder of the predictions is needed")
    if extra := sorted(found - set(names)):
        warn(f"{result}: {len(extra)} folders are not scored: {', '.join(extra[:10])}")
    if lacking:
        warn(f"{result}: {len(lacking)} sequences are missing and left out: {', '.join(lacking[:10])}")
    metric = VOSMetric(preset, names)
    with ThreadPoolExecutor(_workers()) as pool:
        for name in names:
            metric.update(name, score_sequence(truth / name, result / name, preset, pool), (seen or {}).get(name))
    return metric


def score_sequence(
    ground_truth: Path, predictions: Path, preset: str = "davis2017", pool: ThreadPoolExecutor | None = None
) -> list[Row]:
    """Scores one sequence folder frame by frame; returns a row for each counted object and frame.

    Only the ground truth's frames count; others in the prediction are not looked at. A first frame that does not count
    (its mask is given) may be missing in the prediction. Errors as in `score_folders`.
    """
    rule = find_preset(preset)
    frames = sorted((path.name for path in ground_truth.glob("[!.]*.png")), key=natural_key)
    if not frames:
        raise InputError(f"{ground_truth}: holds no PNG files; one mask for each frame is needed")
    present = {entry.name for entry in os.scandir(predictions)} if predictions.is_dir() else set()
    lacking = [name for name in frames if name not in present]
    given = None if rule.first else frames[0]
    if lost := [name for name in lacking if name != given]:
        raise InputError(
            f"{predictions / lost[0]}: missing, and {len(lost) - 1} more of {len(frames)} frames; "
            "a mask for each annotated frame is needed"
        )
    first_ids = label_ids(read_label_png(ground_truth / frames[0])) - {0}
    # DAVIS 2016 ships its single objects as 255; with other ids in the picture 255 is void as everywhere else.
    void_is_object = rule.merge and first_ids == {VOID}
    counted = {name for i, name in enumerate(frames) if (i or rule.first) and (i < len(frames) - 1 or rule.last)}

    def run(name: str) -> tuple[set[int], set[int], dict[int, Score]]:
        return _score_files(
            ground_truth / name,
            predictions / name if name in present else None,
            rule,
            void_is_object,
            score=name in counted,
        )

    results = dict(zip(frames, (pool.map if pool else map)(run, frames), strict=True))
    known = set().union(*(truth_ids for truth_ids, _, _ in results.values()))
    for name, (_, predicted_ids, _) in results.items():
        if strange := predicted_ids - known:
            ids = ", ".join(map(str, sorted(strange)[:10]))
            raise InputError(
                f"{predictions / name}: holds unknown object ids {ids}; the ground truth of {ground_truth.name} has "
                f"{', '.join(map(str, sorted(known)[:20])) or 'none'}"
            )
    return _rows(ground_truth.name, rule, frames, counted, results)


def _score_files(
    truth: Path, prediction: Path | None, rule: Preset, void_is_object: bool, score: bool
) -> tuple[set[int], set[int], dict[int, Score]]:
    """Ids of both files and the scores of all objects that occur in either."""
    gt = read_label_png(truth)
    gt_ids = label_ids(gt)
    void = None
    if VOID in gt_ids and not void_is_object:
        void = gt == VOID
        gt = np.where(void, 0, gt)
    pred_ids: set[int] = set()
    if prediction is not None:
        pred = read_label_png(prediction)
        pred_ids = label_ids(pred)
        if pred.shape != gt.shape:
            raise InputError(
                f"{prediction}: is {pred.shape[1]} x {pred.shape[0]} pixels; the ground truth {truth} is "
                f"{gt.shape[1]} x {gt.shape[0]}"
            )
    if rule.merge:
        gt_ids, pred_ids = {1} if (gt_ids - {0, VOID} or void_is_object) else set(), {1} if pred_ids - {0} else set()
    gt_ids, pred_ids = gt_ids - {0, VOID}, pred_ids - {0}
    if len(pred_ids - gt_ids) > 1000:  # would take minutes until the first of them is found unknown
        raise InputError(f"{prediction}: holds {len(pred_ids)} object ids; a label map of the objects is needed")
    if not score:
        return gt_ids, pred_ids, {}
    if rule.merge:
        gt, pred = (gt != 0).astype(np.uint8), (pred != 0).astype(np.uint8)
    return gt_ids, pred_ids, score_frame(gt, pred, gt_ids | pred_ids, void if rule.void else None)


def _rows(sequence: str, rule: Preset, frames: list[str], counted: set[str], results: dict) -> list[Row]:
    """The rows that count under a preset; an object that is in neither map of a frame scores 1 there."""
    scored = [name for name in frames if name in counted]
    if rule.objects == "first":
        objects = results[frames[0]][0]
    else:
        # with 'appearance' an object that is nowhere in the counted frames has no row
        objects = set().union(*(truth for truth, _, _ in results.values()))
    rows = []
    for i in sorted(objects):
        names = scored
        if rule.since == "mask":
            given = next(n for n, name in enumerate(frames) if i in results[name][0])
            names = [name for name in frames[given + 1 :] if name in counted]
        elif rule.since == "appearance":
            if not any(i in results[name][0] for name in scored):
                continue
            names = scored[next(n for n, name in enumerate(scored) if i in results[name][0] | results[name][1]) :]
        rows += [Row(sequence, i, Path(name).stem, *results[name][2].get(i, (1.0, 1.0))) for name in names]
    return rows


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _workers() -> int:
    """Threads that read and score frames: half of them wait for the interpreter, more than four gain nothing."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
