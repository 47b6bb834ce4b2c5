"""Where a training step's time and memory go, beside the same mathematics done naively, and what the loader delivers.

python -m benchmarks.train --data_root DIR --datasets [davis2017] --model aott --devices 1

Everything is set up by train.py itself; its loop alone is replaced by one that measures. Steps of both implementations
alternate, so that a machine shared with others treats them alike. Reduction is what the backward pass takes longer when
gradients are exchanged; with one process there is none.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = ["data", "forward", "backward", "reduction", "optimiser"]


def main(
    data_root: str,
    datasets: list[str | dict[str, Any]],
    model: str = "aott",
    encoder: str | None = None,
    crop: tuple[int, int] | None = None,
    short_edge: int = 480,
    frames: int = 5,
    batch_size: int = 4,
    recompute: bool = False,
    workers: int = 2,
    steps: int = 8,
    naive: bool = True,
    output: Path | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    strategy: str = "auto",
    precision: str = "auto",
    debug: bool = False,
) -> None:
    """Measure training steps.

    Args:
        data_root: Folder that the data sets lie in.
        datasets: As of train.py.
        model: A published model.
        encoder: Another encoder for it.
        crop: Height and width of the clips; default as published.
        short_edge: Short edge that scale 1 stands for.
        frames: Frames of a clip.
        batch_size: Clips a step over all devices.
        recompute: As of train.py.
        workers: Loader processes of each device.
        steps: Steps measured of each implementation, after two that are not.
        naive: Also run benchmarks/naive.py's attention, in turn with the real one.
        output: JSON file for the result.
        accelerator: As of train.py.
        devices: As of train.py.
        strategy: As of train.py.
        precision: As of train.py.
        debug: Show the traceback of an error.
    """
    from functools import partial
    from unittest.mock import patch

    import train
    from utils.cli import read_options
    from utils.fabric import launch, make_fabric

    variants = ["real", "naive"] if naive else ["real"]
    given = {
        "data_root": data_root,
        "datasets": datasets,
        "model": model,
        "encoder": encoder,
        "crop": crop,
        "short_edge": short_edge,
        "frames": frames,
        "batch_size": batch_size,
        "recompute": recompute,
        "workers": workers,
        "total_steps": 100000,  # more than are run, and near the start of the schedule
        "resume": "never",
    }
    fabric = make_fabric(accelerator, devices, strategy, precision, training=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = read_options(train.main, None, given | {"output_dir": folder})
        del settings["debug"]
        with patch("train.fit", partial(measure, variants=variants, steps=steps, output=output)):
            launch(fabric, train.setup, settings)


def measure(fabric, state, stage, loader, *others, variants, steps, output) -> bool:
    """In place of train.fit: run steps of the variants in turn, then the loader alone, and report."""
    from contextlib import nullcontext

    from benchmarks.naive import naive_attention
    from utils.loading import PREFETCH, batches
    from utils.timing import device_name

    contexts = {"real": nullcontext, "naive": naive_attention}
    s = next(value for value in others if isinstance(value, dict))
    exchanges = [True, False] if fabric.world_size > 1 else [True]
    stream, model = batches(loader), state["model"]
    model.train()
    seconds: dict[tuple[str, bool], list[dict[str, float]]] = {}
    step = 0
    for turn in range(steps + 2):
        for variant in variants:
            for exchange in exchanges:
                with contexts[variant]():
                    taken = timed_step(fabric, state, stream, step, exchange, s)
                step += 1
                if turn >= 2:
                    seconds.setdefault((variant, exchange), []).append(taken)
    memory = {}
    for variant in variants:
        with contexts[variant]():
            memory[variant] = step_memory(fabric.device, lambda: timed_step(fabric, state, stream, step, True, s))
    result = {
        "model": model.module.name,
        "encoder": model.module.settings.encoder,
        "crop": list(s["crop"]),
        "frames": s["frames"],
        "batch_size": s["batch_size"],
        "processes": fabric.world_size,
        "device": device_name(fabric.device),
        "precision": str(fabric.strategy.precision.precision),
        "steps": steps,
        "loader_workers": s["workers"],
        "loader_clips_per_s": loader_speed(stream, PREFETCH * s["workers"], 2 * steps) * fabric.world_size,
    }
    for variant in variants:
        result[variant] = summary(seconds, variant, s["batch_size"]) | {"step_memory_mib": memory[variant] / 2**20}
    working = result["real"]["seconds"]["step"] - result["real"]["seconds"]["data"]
    result["loader_over_model"] = result["loader_clips_per_s"] * working / s["batch_size"]
    if "naive" in result:
        pairs = zip(seconds["naive", True], seconds["real", True], strict=True)
        ratios = [(slow["step"] - slow["data"]) / (fast["step"] - fast["data"]) for slow, fast in pairs]
        result["naive_over_real"] = statistics.median(ratios)
    if fabric.global_rank == 0:
        report(result)
        if output:
            output.write_text(json.dumps(result, indent=1))
    return True  # as if it had been asked to stop


def timed_step(fabric, state, stream, step, exchange, s) -> dict[str, float]:
    """One step of train.py; seconds of its stages, waiting for the device at the end of each."""
    from contextlib import nullcontext

    import train

    clock = Clock(fabric.device)

    class Timed:
        """The run's Fabric, with a watch on the backward pass, and gradients that stay here if asked."""

        def __getattr__(self, name):
            return getattr(fabric, name)

        def backward(self, *args):
            with clock.stage("backward"):
                fabric.backward(*args)

        def no_backward_sync(self, model, enabled=True):
            return fabric.no_backward_sync(model) if not exchange and fabric.world_size > 1 else nullcontext()

    def watched():
        while True:
            with clock.stage("data"):
                batch = next(stream)
            yield batch

    with clock.stage("step"):
        at = (step, s["total_steps"])
        train.set_rates(state["optimizer"], at, s)
        train.gradients(Timed(), state["model"], watched(), step, at, False, False, s)
        with clock.stage("optimiser"):
            train.update(fabric, state, s)
    taken = clock.seconds
    taken["forward"] = taken["step"] - taken["data"] - taken["backward"] - taken["optimiser"]
    return taken


class Clock:
    """Seconds of named stages, which may lie within each other."""

    def __init__(self, device):
        from utils.timing import Stopwatch

        self.watches, self.make = {}, lambda: Stopwatch(device)

    def stage(self, name: str):
        return self.watches.setdefault(name, self.make()).measure()

    @property
    def seconds(self) -> dict[str, float]:
        return {name: sum(watch.seconds()) for name, watch in self.watches.items()}


def step_memory(device, work) -> int:
    """Bytes that `work` needs at its peak beyond what is held before it; 0 where the system does not say."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        return 0
    import ctypes

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps have left free would hide what this one takes
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return status("VmHWM") - before


def loader_speed(stream, ready: int, count: int) -> float:
    """Clips a second of the loader when nothing else is done, over `count` batches after those that lie ready."""
    for _ in range(ready):
        next(stream)
    started, clips = time.perf_counter(), 0
    for _ in range(count):
        clips += len(next(stream)["names"])
    return clips / (time.perf_counter() - started)


def summary(seconds, variant: str, batch_size: int) -> dict[str, Any]:
    """Median seconds of the stages, and clips a second."""
    rows = seconds[variant, True]
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    median["reduction"] = 0.0
    if (variant, False) in seconds:
        alone = statistics.median(row["backward"] for row in seconds[variant, False])
        median["reduction"] = max(0.0, median["backward"] - alone)
        median["backward"] -= median["reduction"]
    return {
        "samples_per_s": batch_size / median["step"],
        "step_s_min_max": [min(row["step"] for row in rows), max(row["step"] for row in rows)],
        "seconds": median,
    }


def report(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    print(
        f"{result['model']} with {result['encoder']}, {result['batch_size']} clips of {result['frames']} x "
        f"{result['crop'][0]} x {result['crop'][1]} a step, {result['processes']} x {result['device']}, "
        f"{result['precision']}"
    )
    print("          clips/s  s/step (min-max)   " + "".join(f"{stage:>11}" for stage in STAGES) + "   MiB/step")
    for variant in ("real", "naive"):
        if variant in result:
            row = result[variant]
            low, high = row["step_s_min_max"]
            stages = "".join(f"{row['seconds'][stage]:11.3f}" for stage in STAGES)
            print(
                f"{variant:8} {row['samples_per_s']:8.2f}  {row['seconds']['step']:.2f} ({low:.2f}-{high:.2f}) {stages}"
                f"{row['step_memory_mib']:11.0f}"
            )
    if "naive_over_real" in result:
        print(f"naive / real, without data: {result['naive_over_real']:.2f}")
    print(
        f"loader alone, {result['loader_workers']} workers: {result['loader_clips_per_s']:.1f} clips/s, "
        f"{result['loader_over_model']:.1f} times what the model takes"
    )


if __name__ == "__main__":
    from utils.cli import run

    run(main)
