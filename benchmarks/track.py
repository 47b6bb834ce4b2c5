"""Time a frame, arithmetic, share of the machine's matrix peak and memory, by model, size, objects and memory frames.

python -m benchmarks.track --models '[aott, r50_deaotl]' --objects '[1, 10]' --naive true
"""

import json
import statistics
import time
from pathlib import Path


def main(
    models: list[str] = ["aott"],  # noqa: B006 - the parser copies it
    encoder: str | None = None,
    checkpoint: Path | None = None,
    sizes: list[tuple[int, int]] = [(480, 854)],  # noqa: B006
    objects: list[int] = [10],  # noqa: B006
    memory_frames: list[int] = [1],  # noqa: B006
    max_long_edge: int = 1040,
    runs: int = 7,
    naive: bool = False,
    output: Path | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    debug: bool = False,
) -> None:
    """Measure the tracker on random frames.

    Args:
        models: Names of published models.
        encoder: Another encoder for all of them.
        checkpoint: A weights file of this project instead: its masks hold together, while those of random weights put
            several objects into every patch. All objects of ten are tracked together.
        sizes: Height and width of the frames.
        objects: Numbers of objects.
        memory_frames: Frames in the long-term memory; it does not grow while measured.
        max_long_edge: As of the tracker.
        runs: Frames measured, after two that are not.
        naive: Also run the naive implementation of benchmarks/naive.py, in turn with the real one.
        output: JSON file for the rows.
        accelerator: As of the scripts.
        devices: As of the scripts.
        debug: Show the traceback of an error.
    """
    from contextlib import nullcontext

    from benchmarks.naive import naive_tracking
    from models import build_model
    from models.network import SLOTS
    from utils.checkpoint import load_model
    from utils.fabric import make_fabric

    fabric = make_fabric(accelerator, devices)
    rows = []
    header = "model  size  objects  memory  ms (min-max)  GFLOP  peak GFLOP/s  share  peak MiB"
    print(header + ("  naive ms  ratio" if naive else ""))
    for name in [str(checkpoint)] if checkpoint else models:
        if checkpoint:
            network = fabric.to_device(load_model(checkpoint))
            network.group_size = SLOTS
        else:
            network = fabric.to_device(build_model(name, **({"encoder": encoder} if encoder else {})))
        for size in sizes:
            for count in objects:
                for frames in memory_frames:
                    variants = {"real": nullcontext, **({"naive": naive_tracking} if naive else {})}
                    trackers = {}
                    for variant, context in variants.items():
                        with context():
                            trackers[variant] = prepared(network, size, count, frames, max_long_edge)
                    row = {"model": name, "size": size, "objects": count, "memory_frames": frames}
                    row |= measure(fabric, trackers, variants, runs)
                    row["gflop"] = needed_gflop(network, size, count, frames, max_long_edge)
                    row["share_of_peak"] = row["gflop"] / (row["ms"] / 1000) / row["matrix_peak_gflops"]
                    rows.append(row)
                    line = (
                        f"{name}  {size[0]}x{size[1]}  {count}  {frames}  {row['ms']:.0f} ({row['ms_min']:.0f}-"
                        f"{row['ms_max']:.0f})  {row['gflop']:.1f}  {row['matrix_peak_gflops']:.0f}  "
                        f"{row['share_of_peak']:.0%}  {row['peak_memory_mib']:.0f}"
                    )
                    if naive:
                        line += f"  {row['naive_ms']:.0f}  {row['ratio']:.2f}"
                    print(line, flush=True)
    if output:
        output.write_text(json.dumps(rows, indent=1))


def prepared(network, size, count, memory_frames, max_long_edge):
    """A tracker of `count` squares, two frames in, with the memory filled and then fixed."""
    import numpy as np

    from models import Tracker

    rng = np.random.default_rng(0)
    frame = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    mask = np.zeros(size, np.int32)
    side = max(1, int((size[0] * size[1] / (4 * count)) ** 0.5) // 2)
    columns = max(1, size[1] // (2 * side))
    for i in range(count):
        y, x = (i // columns) * 2 * side, (i % columns) * 2 * side
        mask[y : y + side, x : x + side] = i + 1
    tracker = Tracker(network, long_term_gap=1, max_long_edge=max_long_edge)
    tracker.step(frame, mask)
    for _ in range(memory_frames - 1):
        tracker.step(frame)
    for session in tracker._sessions:
        session.gap = None
    tracker.step(frame)
    tracker.frame = frame
    return tracker


def measure(fabric, trackers, variants, runs) -> dict:
    """Median times, the variants and a matrix product in turn, so that the machine's moods meet all of them."""
    from utils.timing import peak_memory

    times, peaks = {variant: [] for variant in trackers}, []
    for i in range(runs + 1):
        for variant, tracker in trackers.items():
            with variants[variant]():
                started = time.perf_counter()
                tracker.step(tracker.frame)  # ends with the labels on the CPU: nothing is left to wait for
                if i:
                    times[variant].append(1000 * (time.perf_counter() - started))
        peaks.append(matrix_peak(fabric.device))
    row = {
        "ms": statistics.median(times["real"]),
        "ms_min": min(times["real"]),
        "ms_max": max(times["real"]),
        "matrix_peak_gflops": statistics.median(peaks),
        "peak_memory_mib": peak_memory(fabric.device) / 2**20,
    }
    if "naive" in times:
        row["naive_ms"] = statistics.median(times["naive"])
        row["ratio"] = statistics.median(n / r for n, r in zip(times["naive"], times["real"], strict=True))
    return row


def matrix_peak(device) -> float:
    """GFLOP/s of a 1536 x 1536 float32 product, the best of three."""
    import torch

    a = torch.rand(1536, 1536, device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * 1536**3 / best / 1e9


def needed_gflop(network, size, count, memory_frames, max_long_edge) -> float:
    """Arithmetic of one frame by the plain formulas (2 a multiply-add; element-wise work counts nothing).

    Counted on the naive implementation's convolutions and products; the window attention, which it does element-wise
    there, is added as 225 positions a token: what a band of dense products does in excess is not counted as work.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.naive import naive_tracking
    from models.attention import WINDOW

    with naive_tracking():
        tracker = prepared(network, size, count, memory_frames, max_long_edge)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tracker.step(tracker.frame)
    groups = tracker._sessions[0].groups.values()
    window = 0
    for group in groups:
        for key, value in group.short_term:
            heads, tokens = key.shape[1:3]
            window += 2 * heads * tokens * WINDOW**2 * (key.shape[3] + value.shape[3])
    return (counter.get_total_flops() + window) / 1e9


if __name__ == "__main__":
    from utils.cli import run

    run(main)
