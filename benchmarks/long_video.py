"""Time a frame and resident memory along an endless video, with the bounded memory of demo.py and with the naive one.

python -m benchmarks.long_video --models '[aott, aotl]' --frames 10000

The bundled clip is played forwards and backwards, in small, until there are enough frames. A fixed matrix product is
timed beside the frames: on a machine shared with others it tells their moods from the tracker's.
"""

import json
import statistics
import time
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path

WINDOW = 200  # frames that a time is the median of
ASSETS = Path(__file__).parent.parent / "assets"


def main(
    models: list[str] = ["aott", "aotl"],  # noqa: B006 - the parser copies it
    frames: int = 10000,
    marks: list[int] = [500, 1000, 5000, 10000],  # noqa: B006
    size: tuple[int, int] = (64, 96),
    max_memory_frames: int = 9,
    naive_frames: int = 1000,
    output: Path | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    debug: bool = False,
) -> None:
    """Track a long video.

    Args:
        models: Names of published models, with random weights.
        frames: Length of the video.
        marks: Frames at which time and memory are reported; those beyond the end are left out.
        size: Height and width of the frames.
        max_memory_frames: As of demo.py.
        naive_frames: Frames of benchmarks/naive.py's tracker, whose memory grows with every one; 0 leaves it out.
        output: JSON file for the rows.
        accelerator: As of the scripts.
        devices: As of the scripts.
        debug: Show the traceback of an error.
    """
    from benchmarks.naive import naive_tracking
    from models import Tracker, build_model
    from utils.fabric import make_fabric

    device = make_fabric(accelerator, devices).device
    clip, mask = small_clip(size)
    rows = []
    print(f"ms: median of {WINDOW} frames; product: the same of a fixed matrix product; MiB: resident, or CUDA's own")
    print(f"{'model':14}{'frame':>7}{'memory frames':>15}{'ms':>9}{'product ms':>12}{'MiB':>9}")
    for name in models:
        network = build_model(name).to(device)
        rows += run(name, Tracker(network, max_memory_frames=max_memory_frames), device, clip, mask, frames, marks)
        if naive_frames:
            with naive_tracking():
                tracker = Tracker(network)
                naive_marks = [WINDOW, naive_frames]
                rows += run(f"{name} (naive)", tracker, device, clip, mask, naive_frames, naive_marks)
    if output:
        output.write_text(json.dumps(rows, indent=1))


def small_clip(size):
    """Frames of the bundled clip and its first mask at `size`."""
    import cv2

    from data.masks import read_mask
    from data.video import open_frames

    with open_frames(ASSETS / "clip.mp4") as source:
        images = [cv2.resize(frame.image, size[::-1], interpolation=cv2.INTER_AREA) for frame in source]
    labels = read_mask(ASSETS / "clip_first.png").labels
    return images, cv2.resize(labels, size[::-1], interpolation=cv2.INTER_NEAREST)


def to_and_fro(images: list) -> Iterator:
    return cycle(chain(images, images[-2:0:-1]))


def run(name, tracker, device, clip, mask, frames, marks) -> list[dict]:
    """Track `frames` frames and report at the marks."""
    import torch

    a = torch.rand(256, 256, device=device)
    times, products, rows = [], [], []
    for number, image in zip(range(1, frames + 1), to_and_fro(clip), strict=False):
        started = time.perf_counter()
        tracker.step(image, mask if number == 1 else None)  # ends with the labels on the CPU
        middle = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(1000 * (middle - started))
        products.append(1000 * (time.perf_counter() - middle))
        del times[:-WINDOW], products[:-WINDOW]
        if number in marks:
            row = {
                "model": name,
                "frame": number,
                "memory_frames": tracker.memory_frames,
                "ms": statistics.median(times),
                "product_ms": statistics.median(products),
                "mib": memory_now(device) / 2**20,
            }
            rows.append(row)
            print(
                f"{name:14}{number:7}{row['memory_frames']:15}{row['ms']:9.2f}{row['product_ms']:12.3f}{row['mib']:9.1f}",
                flush=True,
            )
    return rows


def memory_now(device) -> int:
    """Bytes held at present: by CUDA's allocator, elsewhere the resident set; 0 where the system does not say."""
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()


if __name__ == "__main__":
    from utils.cli import run as run_script

    run_script(main)
