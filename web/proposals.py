"""A mask from clicks or a box: GrabCut, or a function of the person's own, such as one around a SAM."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from utils.errors import InputError

WORK_EDGE = 320  # GrabCut sees the surroundings at this long edge; a proposal then takes a fraction of a second
REACH = 0.35  # of the frame's long edge: how far from the clicks an object may extend
SEED = 0.012

Proposer = Callable[[np.ndarray, list[tuple[float, float, bool]], tuple[float, float, float, float] | None], np.ndarray]


def propose(
    image: np.ndarray,
    points: list[tuple[float, float, bool]],
    box: tuple[float, float, float, float] | None,
) -> np.ndarray:
    """Guess the object meant.

    GrabCut (Rother et al., 2004) on the box, or on the surroundings of the points, at a working resolution.

    Args:
        image: (H, W, 3) uint8 RGB.
        points: x, y in pixels, and whether it is on the object.
        box: left, top, right, bottom around the object, or None.

    Returns:
        (H, W) booleans; all False where nothing stands out.
    """
    import cv2

    height, width = image.shape[:2]
    inside = np.array([(x, y) for x, y, on in points if on], float).reshape(-1, 2)
    if box is None:
        reach = REACH * max(height, width)
        left, top = inside.min(0) - reach
        right, bottom = inside.max(0) + reach
        margin = 0.0
    else:
        left, top, right, bottom = box
        margin = 0.15 * max(right - left, bottom - top) + 4  # background to compare with
    x0, y0 = max(0, int(left - margin)), max(0, int(top - margin))
    x1, y1 = min(width, int(right + margin) + 1), min(height, int(bottom + margin) + 1)
    crop = image[y0:y1, x0:x1]
    scale = min(1.0, WORK_EDGE / max(crop.shape[:2]))
    small = cv2.resize(crop, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA) if scale < 1 else crop
    small = cv2.cvtColor(small, cv2.COLOR_RGB2BGR)
    h, w = small.shape[:2]

    seeds = np.full((h, w), cv2.GC_PR_BGD, np.uint8)
    if box is not None:
        seeds[:] = cv2.GC_BGD
        a, b = int((left - x0) * scale), int((top - y0) * scale)
        seeds[max(0, b) : int((bottom - y0) * scale) + 1, max(0, a) : int((right - x0) * scale) + 1] = cv2.GC_PR_FGD
    else:
        seeds[[0, -1], :] = seeds[:, [0, -1]] = cv2.GC_BGD
    radius = max(1, round(SEED * max(height, width) * scale))
    places = [(round((x - x0) * scale), round((y - y0) * scale), on) for x, y, on in points]
    for x, y, on in places:
        if on and box is None:
            cv2.circle(seeds, (x, y), 6 * radius, cv2.GC_PR_FGD, -1)
    for x, y, on in places:
        cv2.circle(seeds, (x, y), radius, cv2.GC_FGD if on else cv2.GC_BGD, -1)
    ours = (seeds == cv2.GC_FGD) | (seeds == cv2.GC_PR_FGD)
    if not ours.any() or ours.all():
        return np.zeros((height, width), bool)
    cv2.setRNGSeed(0)  # its clusters begin at random
    cv2.grabCut(small, seeds, None, np.zeros((1, 65)), np.zeros((1, 65)), 4, cv2.GC_INIT_WITH_MASK)
    found = ((seeds == cv2.GC_FGD) | (seeds == cv2.GC_PR_FGD)).astype(np.uint8)
    found = cv2.morphologyEx(found, cv2.MORPH_OPEN, np.ones((3, 3), np.uint8)) | (seeds == cv2.GC_FGD)
    found = _connected(found, [(x, y) for x, y, on in places if on])
    out = np.zeros((height, width), bool)
    size = (x1 - x0, y1 - y0)
    out[y0:y1, x0:x1] = cv2.resize(found.astype(np.float32), size, interpolation=cv2.INTER_LINEAR) > 0.5
    return out


def check(image: np.ndarray, points: object, box: object) -> tuple[list[tuple[float, float, bool]], tuple | None]:
    """Points and box of a request, inside the picture.

    Raises:
        InputError: of another form, or neither of them.
    """
    height, width = image.shape[:2]
    try:
        points = [(float(x), float(y), bool(on)) for x, y, on in points or []][:64]
        if box is not None:
            x0, y0, x1, y1 = (float(value) for value in box)
            xs, ys = sorted((x0, x1)), sorted((y0, y1))
            box = max(0.0, xs[0]), max(0.0, ys[0]), min(width - 1.0, xs[1]), min(height - 1.0, ys[1])
    except (TypeError, ValueError) as error:
        raise InputError("a proposal needs points [x, y, on] or a box [left, top, right, bottom]") from error
    if any(not (0 <= x < width and 0 <= y < height) for x, y, _ in points):
        raise InputError("a point lies outside the picture")
    if box is not None and not (box[2] - box[0] >= 2 and box[3] - box[1] >= 2):
        raise InputError("the box is smaller than two pixels, or outside the picture")
    if box is None and not any(on for _, _, on in points):
        raise InputError("a proposal needs a point on the object, or a box around it")
    return points, box


def load_proposer(name: str) -> Proposer:
    """The function of `--proposer FILE.py:FUNCTION`, called as `propose` is.

    Raises:
        InputError: no such file or function.
    """
    path, _, function = name.rpartition(":")
    if not path or not Path(path).is_file():
        raise InputError(f"--proposer {name}: give FILE.py:FUNCTION, the file being there")
    specification = importlib.util.spec_from_file_location("vos_proposer", path)
    module = sys.modules["vos_proposer"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise InputError(f"--proposer {name}: {path} has no function {function}")
    return getattr(module, function)


def _connected(found: np.ndarray, points: list[tuple[int, int]]) -> np.ndarray:
    """The parts that the points lie in; without points, all but the specks."""
    import cv2

    _, parts, stats, _ = cv2.connectedComponentsWithStats(found.astype(np.uint8), connectivity=4)
    areas = stats[:, cv2.CC_STAT_AREA]
    if points:
        h, w = found.shape
        keep = {int(parts[min(h - 1, max(0, y)), min(w - 1, max(0, x))]) for x, y in points} - {0}
    else:
        keep = {i for i in range(1, len(areas)) if areas[i] >= 0.1 * areas[1:].max()}
    return np.isin(parts, list(keep))
