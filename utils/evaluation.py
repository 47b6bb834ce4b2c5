"""Runs a model over a benchmark's videos, on any number of processes, and writes what came out.

Every finished video leaves its masks in `<output>/Annotations/<video>` and a record in `<output>/records/<video>.json`:
frames, seconds, score rows, and the settings they were made with. Both appear whole, so a run that was stopped goes on
where it was, with any number of processes.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from data.benchmarks import Benchmark, Video, given_mask
from data.images import read_rgb
from data.labels import label_ids
from data.masks import write_mask
from data.submission import pack_submission
from models.tracker import Prediction, Tracker
from utils.errors import InputError
from utils.fabric import place
from utils.metrics import VOSMetric, score_sequence
from utils.results import write_json, write_scores
from utils.sharding import WorkQueue, forget_dead_processes
from utils.timing import Stopwatch, device_name, peak_memory

if TYPE_CHECKING:
    from lightning_fabric import Fabric

WARMUP_FRAMES = 3  # of each process: the first ones pay for allocation, kernel choice and page faults
AHEAD = 4  # frames decoded before they are needed
RECORD_KEYS = {"frames", "objects", "seconds", "timed_frames", "model_seconds", "warmup_frames", "settings", "device"}
RECORD_KEYS |= {"peak_memory_bytes"}
log = logging.getLogger(__name__)


def evaluate(
    fabric: "Fabric",
    model: torch.nn.Module,
    weights: dict,
    benchmark: Benchmark,
    output: Path,
    tracker_options: dict,
    preset: str | None,
    threads: int | None = None,
    compiled: bool = False,
) -> dict | None:
    """What each process of an evaluation does; to be started by `utils.fabric.launch`.

    Args:
        weights: file, sha256 and kind, for the results to name.
        output: folder for masks, records, speed.json, submission.zip and the scores.
        tracker_options: keyword arguments of `Tracker`.
        preset: rules to score by; None: do not score.
        threads: CPU threads of this process; None: all cores. Their number, and not that of the processes, decides in
            which order the network's sums are taken.
        compiled: run the model through torch.compile.

    Returns the content of `scores.json` on rank 0 when there are scores.

    Raises InputError for frames, masks or folders that cannot be used.
    """
    if (output / "Annotations").resolve() in (truth := benchmark.truth.resolve(), *truth.parents):
        raise InputError(f"--output_dir {output}: results would replace the true masks; another folder is needed")
    start = time.perf_counter()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or _cores())
    model = place(fabric, model).eval()
    if compiled:
        model = deepcopy(model)  # the caller's stays as it is
        model.compile_for_inference()
    settings = {
        "model": model.name,
        "weights": weights["sha256"],
        "dataset": [benchmark.dataset, benchmark.split],
        "tracker": {
            name: list(value) if isinstance(value, tuple) else value for name, value in tracker_options.items()
        },
        "precision": fabric.strategy.precision.precision,
    }
    order = longest_first(benchmark)
    queue = WorkQueue.of(fabric, [benchmark.videos[i].name for i in order])
    tracker = Tracker(model, **tracker_options)
    warmup = WARMUP_FRAMES

    def work(number: int) -> None:
        nonlocal warmup
        video = benchmark.videos[order[number]]
        record = read_record(output, video, settings)
        if record is None:
            tracker.reset()
            folder = output / "Annotations" / video.name
            record = run_video(model, tracker, video, folder, warmup, fabric.autocast, queue.check)
            warmup -= record["warmup_frames"]
            device = fabric.device
            record |= {"settings": settings, "device": device_name(device), "peak_memory_bytes": peak_memory(device)}
            log.info("%s: %d frames in %.1f s", video.name, record["frames"], record["seconds"])
        elif preset in (None, record.get("preset")):
            return
        if preset is not None:
            rows = score_sequence(benchmark.truth / video.name, output / "Annotations" / video.name, preset)
            record |= {"preset": preset, "rows": rows}
        write_json(record_path(output, video), record)

    try:
        queue.run(work)
    finally:
        torch.set_num_threads(threads_before)
    if fabric.global_rank != 0:
        return None
    forget_dead_processes(fabric)
    for leftover in (output / "Annotations").glob(".*.partial"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    records = [read_record(output, video, settings) for video in benchmark.videos]
    speed = speed_summary(records, fabric.world_size, time.perf_counter() - start)
    write_json(output / "speed.json", speed)
    copy_asked_frames(benchmark, output)
    pack_submission(benchmark, output / "Annotations", output / "submission.zip")
    if preset is None:
        log.info("not scored; the archive for the server is %s", output / "submission.zip")
        return None
    metric = VOSMetric(preset, [video.name for video in benchmark.videos])
    for video, record in zip(benchmark.videos, records, strict=True):
        metric.update(video.name, record["rows"], benchmark.seen.get(video.name))
    if not metric.rows:
        log.warning("not scored: no frame of these videos counts under the rules of %s", preset)
        return None
    return write_scores(metric, benchmark, output / "Annotations", output, weights, speed)


def longest_first(benchmark: Benchmark) -> list[int]:
    """Order in which videos are handed out: the longest must not be the last to start (Graham's rule)."""
    return sorted(range(len(benchmark.videos)), key=lambda i: (-len(benchmark.videos[i].frames), i))


# ---------------------------------------------------------------------------------------------------------- one video


def run_video(
    model: torch.nn.Module,
    tracker: Tracker,
    video: Video,
    folder: Path,
    warmup: int,
    autocast: Callable,
    check: Callable[[], None],
) -> dict:
    """Tracks one video and puts its masks, `<frame>.png`, into `folder` at the end.

    Args:
        model, tracker: the tracker has been made for the model and reset.
        warmup: how many tracked frames to leave out of the model's time; those with a given mask never count.
        autocast: makes the context in which the model runs.
        check: called before each frame; may raise to stop.

    Returns frames, objects, seconds (reading and writing included), timed_frames, model_seconds, warmup_frames.
    """
    watch = Stopwatch(next(model.parameters()).device)
    known: set[int] = set()
    tracked = []  # numbers of the frames that the model has segmented
    start = time.perf_counter()
    with _folder_at_end(folder) as partial, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        written = []
        for number, (path, image) in enumerate(_read_ahead(video.frames, reader)):
            check()
            mask = given_mask(video, path.stem, known)
            if mask is not None:
                if mask.shape != image.shape[:2]:
                    raise InputError(
                        f"{video.masks[path.stem]}: is {mask.shape[1]} x {mask.shape[0]} pixels; "
                        f"its frame {path} is {image.shape[1]} x {image.shape[0]}"
                    )
                known |= label_ids(mask) - {0}
            elif known:
                tracked.append(number)
            try:
                with watch.measure(), autocast():
                    prediction = tracker.step(image, mask)
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
            labels = _labels_at(prediction, video.output_size, model.align_corners)
            written.append(writer.submit(write_mask, partial / f"{path.stem}.png", labels))
            if number >= AHEAD:
                written[number - AHEAD].result()
        for future in written:
            future.result()
    seconds = watch.seconds()
    return {
        "frames": len(video.frames),
        "objects": len(known),
        "seconds": time.perf_counter() - start,
        "timed_frames": len(tracked[warmup:]),
        "model_seconds": sum(seconds[number] for number in tracked[warmup:]),
        "warmup_frames": len(tracked[:warmup]),
    }


@contextmanager
def _folder_at_end(folder: Path) -> Iterator[Path]:
    """A folder under another name, whose files go to `folder` when all went well and vanish otherwise."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():  # of another run: what it has besides these files is left alone
            for path in partial.iterdir():
                os.replace(path, folder / path.name)
        else:
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_ahead(paths: tuple[Path, ...], reader: ThreadPoolExecutor) -> Iterator[tuple[Path, np.ndarray]]:
    waiting = [reader.submit(read_rgb, path) for path in paths[:AHEAD]]
    for number, path in enumerate(paths):
        image = waiting.pop(0).result()
        if number + AHEAD < len(paths):
            waiting.append(reader.submit(read_rgb, paths[number + AHEAD]))
        yield path, image


def _labels_at(prediction: Prediction, size: tuple[int, int] | None, align_corners: bool) -> np.ndarray:
    """Labels at the size a benchmark wants; other than the frame's only for DAVIS at full resolution."""
    if size is None or prediction.labels.shape == tuple(size):
        return prediction.labels
    scores = F.interpolate(prediction.scores[None].float(), size, mode="bilinear", align_corners=align_corners)[0]
    ids = np.array([0, *prediction.object_ids], np.int32)
    return ids[scores.argmax(0).cpu().numpy()]


# ------------------------------------------------------------------------------------------------------------ records


def record_path(output: Path, video: Video) -> Path:
    """Where the record of a video is."""
    return output / "records" / f"{video.name}.json"


def read_record(output: Path, video: Video, settings: dict) -> dict | None:
    """The record of a finished video, or None: there is none, masks are missing, or the settings were others."""
    try:
        record = json.loads(record_path(output, video).read_text())
        if not RECORD_KEYS <= record.keys():
            return None
    except (OSError, ValueError, AttributeError):
        return None
    folder = output / "Annotations" / video.name
    have = set(os.listdir(folder)) if folder.is_dir() else set()
    if any(f"{path.stem}.png" not in have for path in video.frames):
        return None
    if record.get("settings") != settings:
        log.warning("%s: results of other settings are replaced", folder)
        return None
    return record


def speed_summary(records: list[dict], processes: int, wall_seconds: float) -> dict:
    """Content of `speed.json`: frames over seconds, never means of rates, so that every split gives the same sums.

    `fps_model` counts tracker steps on frames without a given mask, warm-up left out; `fps_end_to_end` all frames with
    reading and writing. Both are those of one process; None where there was nothing to time.
    """
    total = {
        name: sum(record[name] for record in records)
        for name in ("frames", "timed_frames", "warmup_frames", "objects", "model_seconds", "seconds")
    }
    return {
        "fps_model": total["timed_frames"] / total["model_seconds"] if total["timed_frames"] else None,
        "fps_end_to_end": total["frames"] / total["seconds"],
        **total,
        "videos": len(records),
        "device": records[0]["device"],
        "processes": processes,
        "wall_seconds": wall_seconds,
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
    }


def copy_asked_frames(benchmark: Benchmark, output: Path) -> None:
    """For data sets that ask for some of the frames only: these in `<output>/Annotations_sparse`."""
    for video in benchmark.videos:
        if len(video.asked) < len(video.frames):
            with _folder_at_end(output / "Annotations_sparse" / video.name) as partial:
                for frame in video.asked:
                    shutil.copyfile(output / "Annotations" / video.name / f"{frame}.png", partial / f"{frame}.png")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
