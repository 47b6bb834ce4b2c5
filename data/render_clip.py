"""Render the clip that the demo shows when nobody names another: `python -m data.render_clip --output_dir assets`.

A rocket takes off, a cup of coffee flies by in front of it and behind a walking astronaut, filmed from the hand.

Everything is cut from photographs that ship with scikit-image and that its documentation (`skimage.data`) states to be
free of copyright:
* `rocket`: launch pad of DSCOVR, by SpaceX, released in the public domain
* `astronaut`: Eileen Collins, by NASA, released in the public domain
* `coffee`: by Rachel Michetti, CC0
"""

from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np

from data.synthetic import Layer, paint

SIZE = (480, 854)
LENGTH = 64
RATE = 24
ROCKET, COFFEE, ASTRONAUT = 1, 2, 3

# Outlines by hand, (x, y) in the photographs; GrabCut then finds the edge within a few pixels of them.
ROCKET_OUTLINE = [
    *[(321, 126), (315, 134), (311, 148), (311, 178), (314, 182), (313, 405)],
    *[(332, 405), (331, 182), (334, 178), (334, 150), (329, 134)],
]
ASTRONAUT_OUTLINE = [
    *[(225, 14), (188, 22), (158, 60), (153, 92), (165, 122), (178, 148), (150, 152), (122, 172), (112, 205)],
    *[
        (75, 235),
        (45, 270),
        (28, 330),
        (20, 420),
        (32, 511),
        (500, 511),
        (508, 470),
        (490, 400),
        (455, 360),
        (410, 344),
    ],
    *[(362, 352), (356, 300), (340, 265), (303, 235), (298, 210), (272, 182), (270, 150), (296, 118), (301, 85)],
    *[(285, 48), (255, 22)],
]
SPOON_OUTLINE = [(398, 150), (400, 72), (410, 66), (425, 74), (412, 120), (404, 175)]


def cut_out(image: np.ndarray, outline: np.ndarray, reach: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Cut an object out of a photograph (h, w, 3) RGB along an outline (a filled (h, w) mask), free by `reach` pixels.

    Returns premultiplied RGBA with a transparent rim, and the position (x, y) of its top left pixel.
    """
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * reach + 1, 2 * reach + 1))
    state = np.full(outline.shape, cv2.GC_BGD, np.uint8)
    state[cv2.dilate(outline, disc) > 0] = cv2.GC_PR_BGD
    state[outline > 0] = cv2.GC_PR_FGD
    state[cv2.erode(outline, disc) > 0] = cv2.GC_FGD
    cv2.setRNGSeed(0)
    cv2.grabCut(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), state, None, *np.zeros((2, 1, 65)), 4, cv2.GC_INIT_WITH_MASK)
    solid = ((state == cv2.GC_FGD) | (state == cv2.GC_PR_FGD)).astype(np.uint8)
    # One piece without frayed edges.
    small = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (5, 5))
    solid = cv2.morphologyEx(cv2.morphologyEx(solid, cv2.MORPH_OPEN, small), cv2.MORPH_CLOSE, small)
    _, pieces, stats, _ = cv2.connectedComponentsWithStats(solid)
    solid = (pieces == 1 + stats[1:, cv2.CC_STAT_AREA].argmax()).astype(np.uint8) * 255
    alpha = cv2.GaussianBlur(cv2.erode(solid, np.ones((3, 3), np.uint8)), (0, 0), 0.8)
    x, y, w, h = cv2.boundingRect(alpha)
    rgba = np.dstack([image, alpha])[y : y + h, x : x + w].astype(np.float32)
    rgba[..., :3] *= rgba[..., 3:] / 255
    return cv2.copyMakeBorder(rgba.round().astype(np.uint8), 2, 2, 2, 2, cv2.BORDER_CONSTANT, value=0), (x - 2, y - 2)


def filled(shape: tuple[int, int], *outlines: list[tuple[int, int]]) -> np.ndarray:
    """A mask (h, w) of filled polygons."""
    mask = np.zeros(shape, np.uint8)
    for outline in outlines:
        cv2.fillPoly(mask, [np.array(outline, np.int32)], 1)
    return mask


def render() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Render the clip: 64 images (480, 854, 3) uint8 RGB and label maps (480, 854) uint8."""
    from skimage import data

    pad, woman, cup = data.rocket(), data.astronaut(), data.coffee()
    rocket, (rocket_x, rocket_y) = cut_out(pad, filled(pad.shape[:2], ROCKET_OUTLINE), reach=2)
    astronaut, _ = cut_out(woman, filled(woman.shape[:2], ASTRONAUT_OUTLINE), reach=7)
    saucer = filled(cup.shape[:2], SPOON_OUTLINE)
    cv2.ellipse(saucer, ((279, 223), (404, 332), 3.0), 1, -1)
    cv2.ellipse(saucer, ((289, 112), (234, 190), 0.0), 1, -1)
    coffee, _ = cut_out(cup, saucer, reach=4)

    # What stands around the rocket goes with it: its light edge would be smeared over the sky.
    hole = filled(pad.shape[:2], [(303, 118), (342, 118), (342, 404), (303, 404)])
    empty = cv2.inpaint(np.ascontiguousarray(pad), hole, 5, cv2.INPAINT_TELEA)

    t = np.arange(2 * LENGTH) % LENGTH + np.where(np.arange(2 * LENGTH) < LENGTH, 0.0, 0.4)  # shutter open, closed
    n = len(t)
    shake = np.stack([np.sin(t / 4.1) + 0.6 * np.sin(t / 2.3 + 1), np.sin(t / 3.3 + 2) + 0.5 * np.sin(t / 1.9)], 1)
    # The view moves from left to right over the photograph, and closer.
    zoom = 1.46 + 0.0012 * t
    left = 10 + 0.42 * t
    view = np.zeros((n, 2, 3))
    view[:, 0, 0] = view[:, 1, 1] = zoom
    view[:, 0, 2] = -left * zoom + shake[:, 0]
    view[:, 1, 2] = -(100.0 + 0.04 * t) * zoom + shake[:, 1]

    lift = np.maximum(t - 8, 0) ** 1.9 * 0.105
    rockets = view.copy()
    rockets[:, :, 2] += zoom[:, None] * np.stack([np.full(n, rocket_x), rocket_y - lift], 1)

    cups = placed(
        coffee,
        center=np.stack([700 - 9.2 * t, 120 + 125 * np.sin(t * np.pi / LENGTH)], 1) + shake,
        scale=0.36 + 0.0012 * t,
        angle=0.22 * np.sin(t / 7.0),
        squeeze=0.92 + 0.08 * np.cos(t / 6.0),
    )
    walk = np.abs(np.sin(t / 5.5))
    women = placed(
        astronaut,
        center=np.stack([150 + 7.0 * t, 360 - 9 * walk + 0.25 * t], 1) + 1.5 * shake,
        scale=0.62 + 0.0006 * t,
        angle=0.045 * np.sin(t / 5.5),
        squeeze=1.0 - 0.05 * np.sin(t / 14.0) ** 2,
    )
    layers = [
        layer(rocket, rockets, ROCKET),
        layer(coffee, cups, COFFEE),
        layer(astronaut, women, ASTRONAUT, sway(t, *astronaut.shape[:2])),
    ]
    images, labels = [], []
    for i in range(LENGTH):
        image = cv2.warpAffine(empty, view[i], SIZE[::-1], flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT_101)
        label = np.zeros(SIZE, np.uint8)
        paint(image, label, layers, i, blur=True)
        images.append(image)
        labels.append(label)
    return images, labels


def placed(rgba: np.ndarray, center: np.ndarray, scale: np.ndarray, angle: np.ndarray, squeeze: np.ndarray):
    """Matrices (n, 2, 3) that put the middle of a cut-out at `center` (n, 2), scaled, squeezed in width and turned."""
    middle = np.array([rgba.shape[1] - 1, rgba.shape[0] - 1]) / 2
    c, s = np.cos(angle) * scale, np.sin(angle) * scale
    linear = np.stack([np.stack([c * squeeze, -s], 1), np.stack([s * squeeze, c], 1)], 1)
    return np.concatenate([linear, (center - linear @ middle)[:, :, None]], 2)


def sway(t: np.ndarray, h: int, w: int, nodes: int = 9) -> np.ndarray:
    """Displacements (n, nodes, nodes, 2): the upper body leans from side to side and breathes."""
    y, x = np.mgrid[0 : 1 : nodes * 1j, 0 : 1 : nodes * 1j]
    phase = t[:, None, None] / 5.5
    across = 0.03 * w * (1 - y) * np.sin(phase) + 0.008 * w * np.sin(2 * phase + 5 * y)
    down = 0.012 * h * np.sin(phase * 0.7 + 4 * x)
    return np.stack([across, down], 3).astype(np.float32)


def layer(rgba: np.ndarray, matrices: np.ndarray, label: int, bends: np.ndarray | None = None) -> Layer:
    """A layer from matrices at the opening and, in their second half, the closing moments of the shutter."""
    # Cut-outs shown smaller than they are would flicker: shrink them once.
    scale = np.sqrt(np.abs(np.linalg.det(matrices[:, :, :2]))).max() * 1.1
    if scale < 1:
        small = cv2.resize(rgba, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        fx, fy = rgba.shape[1] / small.shape[1], rgba.shape[0] / small.shape[0]
        back = np.array([[fx, 0, (fx - 1) / 2], [0, fy, (fy - 1) / 2], [0, 0, 1]])
        rgba, matrices = small, matrices @ back
        bends = None if bends is None else bends / np.float32([fx, fy])
    middle = np.array([rgba.shape[1] - 1, rgba.shape[0] - 1]) / 2
    points = matrices[:, :, :2] @ middle + matrices[:, :, 2]
    half = len(matrices) // 2
    return Layer(
        rgba, matrices[:half], None if bends is None else bends[:half], points[half:] - points[:half], label, 0.0
    )


def main(output_dir: str = "assets", truth_dir: str | None = None, crf: int = 18, debug: bool = False) -> None:
    """Render the bundled clip and the mask of its first frame.

    Args:
        output_dir: where clip.mp4 and clip_first.png go.
        truth_dir: where the masks of all frames go, if they are wanted.
        crf: quality of the video; lower is better and larger.
        debug: show the traceback of an error.
    """
    from data.masks import write_mask
    from data.video import VideoWriter

    images, labels = render()
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with VideoWriter(output / "clip.mp4", SIZE, Fraction(1, RATE), Fraction(RATE), crf) as writer:
        for i, image in enumerate(images):
            writer.write(image, Fraction(i, RATE))
    write_mask(output / "clip_first.png", labels[0])
    if truth_dir is not None:
        Path(truth_dir).mkdir(parents=True, exist_ok=True)
        for i, label in enumerate(labels):
            write_mask(Path(truth_dir) / f"{i:05d}.png", label)
    size = (output / "clip.mp4").stat().st_size
    print(f"{output / 'clip.mp4'}: {LENGTH} frames {SIZE[1]}x{SIZE[0]}, {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    from utils.cli import run

    run(main)
