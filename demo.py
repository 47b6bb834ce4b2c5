"""Track objects through a video: python demo.py --input VIDEO_OR_FRAME_FOLDER --mask FIRST.png --output_dir DIR."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import run
from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from data.masks import Mask
    from data.video import Frame, FrameSource
    from models import Tracker

ASSETS = Path(__file__).parent / "assets"
AHEAD = 4  # frames decoded, and results waiting to be written, at any time
UNFINISHED = "unfinished.txt"
MEMORY_FRAMES = 9  # the reference and eight more (RMem, CVPR 2024)
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

logger = logging.getLogger(__name__)


def main(
    input: Path | None = None,
    mask: Path | None = None,
    model: str | None = None,
    checkpoint: Path | None = None,
    output_dir: Path = Path("out"),
    max_long_edge: int | None = None,
    long_term_gap: int | None = None,
    max_memory_frames: int | None = MEMORY_FRAMES,
    compile: bool = False,
    fps: float = 24,
    snap_colors: bool = False,
    web: bool = False,
    host: str = "127.0.0.1",
    port: int = 7860,
    upload_limit: int = 4096,
    proposer: str | None = None,
    accelerator: str = "auto",
    devices: int | str | list[int] = 1,
    strategy: str = "auto",
    num_nodes: int = 1,
    precision: str = "auto",
    debug: bool = False,
) -> None:
    """Track the objects of a first mask through a video; without options, through the bundled clip.

    Writes masks/<frame>.png (indexed PNG, ids as given), overlay.mp4 (the input's frames and timing) and, last of all,
    summary.json. Results of an earlier run in the same folder are replaced. An interrupted run keeps the masks that are
    done and overlay_part.mp4, and has no summary.json.

    Args:
        input: Video file, or folder of frames in natural order.
        mask: Mask of the first frame, or folder of masks named like the frames they belong to (objects that appear
            later, corrections). Indexed or grey: the value is the object id; colours: see data/masks.py.
        model: Name of a published model; not needed with weight files of this project.
        checkpoint: Weights; left out together with model, the bundled ones.
        output_dir: Folder for the results.
        max_long_edge: Frames are shrunk to this long edge for the model; results keep the input's size.
        long_term_gap: Every n-th frame enters the long-term memory.
        max_memory_frames: Largest number of frames in the long-term memory of ten objects; null for no limit.
        compile: Run the model through torch.compile; minutes at the start, for long videos on GPUs.
        fps: Frames per second of a frame folder; videos have their own timing.
        snap_colors: Turn a mask with soft edges or JPEG noise into its main colours instead of refusing it.
        web: Open a page to draw the masks, watch the tracking and correct it; input and mask are what it begins with.
        host: Address that the page is served on; the default can be reached from this machine alone.
        port: Port of the page; 0 takes a free one.
        upload_limit: Largest video that the page takes, in MB.
        proposer: FILE.py:FUNCTION that proposes masks on the page in place of GrabCut; see web/README.md.
        accelerator: auto, cpu, cuda (gpu) or mps.
        devices: The one device: 1, or cuda:1 for a certain one.
        strategy: auto; one video is tracked by one process.
        num_nodes: 1; one video is tracked by one process.
        precision: auto (32-true), 32-true, 16-mixed or bf16-mixed; bf16-true also on CPUs that compute in it.
        debug: Show the traceback of an error.
    """
    from data.video import open_frames

    # What a person handed in is checked before anything slow starts.
    if input is not None and mask is None and not web:
        raise InputError("--mask is missing: pass the mask of the first frame, or a folder of masks")
    if model is not None and checkpoint is None:
        raise InputError(f"--model {model}: pass its weights as well, --checkpoint FILE")
    source = open_frames(given_or_bundled(input, "clip.mp4", "--input and --mask"), fps)
    weights = given_or_bundled(checkpoint, "starter.safetensors", "--checkpoint")
    if web:
        run_options = {"accelerator": accelerator, "devices": devices, "strategy": strategy}
        run_options |= {"num_nodes": num_nodes, "precision": precision}
        limits = {
            "max_long_edge": max_long_edge,
            "max_memory_frames": max_memory_frames,
            "long_term_gap": long_term_gap,
        }
        if input is None or mask is not None:
            mask = given_or_bundled(mask, "clip_first.png", "--mask")
            find_masks(mask, source, snap_colors, say=lambda line: None)
        source.close()
        video = {"video": source.path, "mask": mask, "fps": fps, "snap_colors": snap_colors}
        open_page(host, port, upload_limit, proposer, weights, model, run_options, defaults=limits, **video)
        return
    mask = given_or_bundled(mask, "clip_first.png", "--mask")
    masks = find_masks(mask, source, snap_colors)
    check_output(output_dir, [source.path, mask])

    from models import Tracker
    from utils.checkpoint import describe_weights, load_model
    from utils.fabric import launch, make_fabric, place

    fabric = make_fabric(accelerator, devices, strategy, precision, num_nodes)
    if fabric.world_size > 1:
        raise InputError(f"--devices {devices}: one video is tracked on one device, pass --devices 1")
    network = place(fabric, load_model(weights, model))
    if compile:
        network.compile_for_inference()
    tracker = Tracker(network, long_term_gap, max_memory_frames, max_long_edge)

    prepare_output(output_dir)
    summary = launch(fabric, track_video, tracker, source, masks, output_dir, snap_colors)
    summary |= {"model": network.name, "weights": describe_weights(weights)}
    finish_output(output_dir, summary)
    print(f"{output_dir}: {summary['frames']} frames, {summary['fps_end_to_end']:.1f} a second")


def open_page(
    host: str,
    port: int,
    upload_limit: int,
    proposer: str | None,
    weights: Path,
    model: str | None,
    run_options: dict,
    **begin: object,
) -> None:
    """Serve the page until Ctrl-C. `run_options` choose the device; `begin` is what `web.server.make_app` takes."""
    import importlib.util

    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise InputError(f"--web true: needs {' and '.join(missing)}; install: pip install -r requirements-web.txt")
    if upload_limit < 1:
        raise InputError(f"--upload_limit {upload_limit}: give a number of MB, at least 1")
    from utils.checkpoint import load_model
    from web.proposals import load_proposer, propose
    from web.server import make_app, serve
    from web.tracking import Models

    if host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("--host %s: whoever can reach this address can use the page", host)
    load_model(weights, model)  # what cannot be used is said now
    names = {weights.name: weights, "starter.safetensors": ASSETS / "starter.safetensors"}
    app = make_app(
        Models({name: path for name, path in names.items() if path.exists()}, model, run_options),
        hosts=(host, "localhost", "127.0.0.1", "::1"),
        upload_limit=upload_limit * 2**20,
        proposer=load_proposer(proposer) if proposer else propose,
        **begin,
    )
    serve(app, host, port, announce)


def announce(address: str) -> None:
    """Say where the page is, and open it where there is a screen."""
    import sys
    import webbrowser

    print(f"{address}  (Ctrl-C ends it)", flush=True)
    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and sys.stdout.isatty():
        webbrowser.open(address)


def track_video(
    fabric: "Fabric",
    tracker: "Tracker",
    source: "FrameSource",
    masks: dict[str, Path],
    output_dir: Path,
    snap_colors: bool = False,
) -> dict:
    """Decode, track and write as a stream: reading and writing have a thread each, no list of frames is kept.

    Args:
        masks: by the name of the frame they belong to.

    Returns what summary.json says of the run.
    """
    from collections import deque
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import closing
    from time import perf_counter

    from tqdm import tqdm

    from data.masks import overlay, write_mask
    from data.video import VideoWriter, prefetch
    from utils.timing import Stopwatch, device_name

    colors: dict[int, tuple[int, int, int]] = {}
    used: set[str] = set()
    changed_pixels = frames = 0
    watch = Stopwatch(fabric.device)
    start = perf_counter()

    def write(frame, labels) -> None:
        write_mask(output_dir / "masks" / f"{frame.name}.png", labels)
        video.write(overlay(frame.image, labels), frame.time)

    with (
        VideoWriter(output_dir / "overlay.mp4", source.size, source.time_base, source.rate) as video,
        tqdm(total=source.length, unit=" frames", mininterval=0.5, bar_format=BAR) as bar,
        closing(prefetch(read_inputs(source, masks, snap_colors, colors), AHEAD)) as inputs,
        ThreadPoolExecutor(1) as writer,
    ):
        waiting = deque()
        try:
            for frame, mask in inputs:
                with watch.measure(), fabric.autocast():
                    prediction = tracker.step(frame.image, mask and mask.labels)
                waiting.append(writer.submit(write, frame, prediction.labels))
                if len(waiting) > AHEAD:
                    waiting.popleft().result()
                frames += 1
                if mask:
                    used.add(frame.name)
                    changed_pixels += mask.changed_pixels
                bar.set_postfix(objects=len(prediction.object_ids), refresh=False)
                bar.update()
            for result in waiting:
                result.result()
        except KeyboardInterrupt:
            writer.shutdown()  # lets the results that wait be written
            video.path = output_dir / "overlay_part.mp4"
            video.close()
            tqdm.write(f"interrupted: {output_dir} keeps the results of the first {video.frames} frames")
            raise
    if unused := sorted(set(masks) - used):
        logger.warning("%d masks are of frames that the video does not have, from %s on", len(unused), unused[0])
    return {
        "frames": frames,
        "object_ids": sorted(tracker.object_ids),
        "size": list(source.size),
        "fps_model": frames / sum(watch.seconds()),
        "fps_end_to_end": frames / (perf_counter() - start),
        "device": device_name(fabric.device),
        "colors": colors or None,
        "changed_mask_pixels": changed_pixels,
    }


def read_inputs(
    source: "FrameSource", masks: dict[str, Path], snap_colors: bool, colors: dict[int, tuple[int, int, int]]
) -> Iterator[tuple["Frame", "Mask | None"]]:
    """Every frame with the mask given for it; `colors` is filled with the ids of colours as masks bring new ones."""
    from data.masks import read_mask

    for frame in source:
        mask = None
        if frame.name in masks:
            mask = read_mask(masks[frame.name], size=source.size, snap_colors=snap_colors, known_colors=colors)
            colors.update(mask.colors or {})
        yield frame, mask


def given_or_bundled(path: Path | None, name: str, options: str) -> Path:
    """The path, or without one the file in assets/ that takes its place."""
    if path is not None:
        return path
    if not (ASSETS / name).exists():
        raise InputError(f"{ASSETS / name}: this checkout lacks the bundled file; pass {options}")
    return ASSETS / name


def find_masks(
    path: Path, source: "FrameSource", snap_colors: bool, say: Callable[[str], object] = print
) -> dict[str, Path]:
    """Mask files by frame name; the first is read once, to say what it holds before the model is loaded."""
    import numpy as np

    from data.masks import read_mask, read_mask_folder

    if path.is_dir():
        masks = read_mask_folder(path, source.names)
    else:
        masks = {source.names[0] if source.names else "00000": path}
    first = read_mask(next(iter(masks.values())), size=source.size, snap_colors=snap_colors)
    ids, areas = np.unique(first.labels[first.labels > 0], return_counts=True)
    if len(ids) == 0 and not path.is_dir():
        raise InputError(f"{path}: every pixel is background; mark at least one object")
    say(f"{path}: " + (", ".join(f"object {i} ({n} px)" for i, n in zip(ids, areas, strict=True)) or "no object yet"))
    return masks


def check_output(output_dir: Path, inputs: list[Path]) -> None:
    """Refuse an output folder in which a run would destroy what no earlier run of this script has made."""
    results = [output_dir / name for name in ("masks", "overlay.mp4", "overlay_part.mp4", "summary.json")]
    for path in inputs:
        if any(path.resolve().is_relative_to(result.resolve()) for result in results):
            raise InputError(f"--output_dir {output_dir}: {path} is an input and would be overwritten; pass another")
    ours = (output_dir / "summary.json").exists() or (output_dir / UNFINISHED).exists()
    if not ours and any(result.is_file() or result.is_dir() and any(result.iterdir()) for result in results):
        raise InputError(f"--output_dir {output_dir}: holds files that are not results of this script; pass another")


def prepare_output(output_dir: Path) -> None:
    """Make the folder, remove an earlier run's results, and mark the run as unfinished."""
    masks = output_dir / "masks"
    try:
        masks.mkdir(parents=True, exist_ok=True)
        (output_dir / UNFINISHED).write_text("This run has not finished. summary.json takes the place of this file.\n")
    except OSError as error:
        raise InputError(f"--output_dir {output_dir}: cannot be written ({error.strerror}); pass another") from error
    old = [*masks.glob("*.png"), *masks.glob(".*.partial"), *output_dir.glob(".*.partial")]
    for path in [*old, *(output_dir / name for name in ("summary.json", "overlay.mp4", "overlay_part.mp4"))]:
        path.unlink(missing_ok=True)


def finish_output(output_dir: Path, summary: dict) -> None:
    """Write summary.json, which says that everything else is there."""
    temporary = output_dir / ".summary.json.partial"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(temporary, output_dir / "summary.json")
    (output_dir / UNFINISHED).unlink()


if __name__ == "__main__":
    run(main)
