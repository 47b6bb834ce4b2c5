"""Whether plugins are the same mathematics on any number of processes: the test that authors run on theirs.

    VOS_PLUGINS=my_package.my_module python -m utils.continual.check \
      --plugins '[{kind: my_package.my_module:MyPlugin, strength: 2}]'

A tiny network learns three experiences, through the whole of train.py, with 1, 2 and 3 processes on this machine; then
the run with 2 processes is resumed in the middle of an experience with 1 and 3. Loss curve, weights, moving average and
the plugins' state must be those of the run with one process.
"""

import csv
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

LENGTHS = (6, 5, 4)  # clips of the three experiences; six to a batch
OPTIONS: dict[str, Any] = {
    "experiences": [
        {"name": f"shade{i}", "epochs": 2, "datasets": [{"kind": "video", "root": f"shade{i}", "max_gap": 2}]}
        for i in range(len(LENGTHS))
    ],
    "crop": (33, 33),
    "short_edge": 40,
    "frames": 3,
    "batch_size": 6,
    "lr": 5e-3,
    "lr_min": 1e-3,
    "warm_up_ratio": 0.0,
    "weight_decay": 0.01,
    "freeze_encoder": True,
    "precision": "64-true",
    "log_every": 1,
    "save_every": 1000,
    "keep": 1,
    "picture_every": 0,
    "workers": 0,
    "accelerator": "cpu",
}
FLOAT32 = {"precision": "32-true", "lr": 2e-4, "lr_min": 2e-5}
TOLERANCE = {"64-true": 1e-9, "32-true": 1e-5}
# A shift of all keys changes no attention: this gradient is 0, and AdamW makes steps of what rounding leaves of it.
WITHOUT_GRADIENT = "self_attn.linear_K.bias"


@dataclass(frozen=True)
class Case:
    """A run, repeated with several numbers of processes.

    options: of train.py that differ from OPTIONS; resume: name of a case, processes and step to go on from.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (1, 2, 3)
    resume: tuple[str, int, int] | None = None


def write_experiences(root: Path) -> None:
    """Three folders of tiny videos in DAVIS layout: two squares that move over noise of another brightness in each.

    In all but one video of the second, and one of the third, the ground is the object: what is learned from them
    contradicts the rest, and gradients of parts of a batch disagree.
    """
    from PIL import Image

    from data.masks import write_mask

    rng = np.random.default_rng(0)
    for number, length in enumerate(LENGTHS):
        for video in range(length):
            place = root / f"shade{number}"
            images, masks = place / "JPEGImages" / f"video{video}", place / "Annotations" / f"video{video}"
            images.mkdir(parents=True)
            masks.mkdir(parents=True)
            ground = rng.integers(80 * number, 80 * number + 90, (44, 48, 3), np.uint8)
            for time in range(5):
                image, labels = ground.copy(), np.zeros((44, 48), np.uint8)
                for thing in range(2):
                    y, x = 4 + 18 * thing + time, 5 + 3 * video + 2 * time
                    image[y : y + 14, x : x + 15] = 250 - 90 * number, 100 * thing, 40 * video
                    labels[y : y + 14, x : x + 15] = thing + 1
                if (number == 1 and video > 0) or (number == 2 and video == 0):
                    labels = (labels == 0).astype(np.uint8)
                Image.fromarray(image).save(images / f"{time:05}.jpg")
                write_mask(masks / f"{time:05}.png", labels)


def tiny_model() -> nn.Module:
    """AOTT with 32 channels, without what draws random numbers by the way clips are grouped (drop path, dropout)."""
    from models.aot import AOTTransformer
    from models.decoder import Decoder
    from models.encoders import build_encoder
    from models.network import SLOTS, VOSNetwork
    from models.registry import model_settings

    torch.manual_seed(0)
    settings = model_settings("aott", encoder="timm/test_efficientnet")
    encoder, transformer = build_encoder(settings.encoder), AOTTransformer(1, width=32, drop_path=0.0)
    decoder = Decoder(transformer.output_width, encoder.channels, SLOTS + 1, True, width=32)
    model = VOSNetwork(
        encoder,
        transformer,
        decoder,
        align_corners=True,
        identity_norm=False,
        train_memory_gap=None,
        test_memory_gap=None,
        max_long_edge=1040,
        width=32,
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    model.name, model.settings = "aott", settings
    return model


def run_worlds(cases: Sequence[Case], folder: Path) -> dict[tuple[str, int], Path]:
    """Run all cases with all their numbers of processes; (name, processes) -> folder of the run.

    Processes are started once for all cases, for their imports take longer than a case.

    Raises:
        RuntimeError: with the traceback of what failed.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    data = folder / "data"
    if not data.exists():
        write_experiences(data)
    size = max(world for case in cases for world in case.worlds)
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch", "timm", "lightning_fabric", "jsonargparse", "cv2", "PIL.Image"])
    failures = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(rank, list(cases), folder, failures, dict(os.environ)), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        for sentinel in wait(list(waiting)):
            if waiting.pop(sentinel).exitcode:  # the others would wait for it
                for other in waiting.values():
                    other.terminate()
    for process in processes:
        process.join()
    if not failures.empty():
        raise RuntimeError(failures.get())
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a process ended with status {[process.exitcode for process in processes]}")
    return {(case.name, world): _place(folder, case.name, world) for case in cases for world in case.worlds}


def _place(folder: Path, name: str, world: int) -> Path:
    return folder / f"{name} on {world}"


def _work(rank: int, cases: list[Case], folder: Path, failures: Any, environment: dict[str, str]) -> None:
    os.environ |= environment  # a server of processes may have been started before it was what it is now
    try:
        _run_cases(rank, cases, folder)
    except BaseException:
        failures.put(f"process {rank}: {traceback.format_exc()}")
        os._exit(1)  # a group that is left open could hang


def _run_cases(rank: int, cases: list[Case], folder: Path) -> None:
    import contextlib

    import torch.distributed as dist

    import train
    from utils.cli import read_options
    from utils.continual.course import fingerprint
    from utils.fabric import launch, make_fabric

    torch.set_num_threads(1)
    for world in sorted({world for case in cases for world in case.worlds}, key=lambda world: (world != 2, world)):
        if rank >= world:
            continue
        if world > 1:
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
            os.environ |= {"TORCHELASTIC_RUN_ID": "check"} | {name: str(value) for name, value in own.items()}
            store = (folder / f"store{world}").as_uri()
            # Long: a process that a group is too small for waits for the next one here.
            patience = timedelta(minutes=30)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
        for case in cases:
            if world not in case.worlds:
                continue
            output = _place(folder, case.name, world)
            options = {"data_root": str(folder / "data"), "output_dir": str(output)} | OPTIONS | case.options
            if case.resume:
                name, before, step = case.resume
                options["resume"] = str(_place(folder, name, before) / "checkpoints" / f"step_{step}.ckpt")
            settings = read_options(train.main, None, options)
            del settings["debug"]
            model = tiny_model()
            # Fabric casts outputs, and with them the loss, to the default type.
            torch.set_default_dtype(torch.float64 if settings["precision"] == "64-true" else torch.float32)
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                launch(make_fabric("cpu", precision=settings["precision"]), train.setup, settings, model)
            torch.set_default_dtype(torch.float32)
            (output / f"weights_of_{rank}").write_bytes(fingerprint(model.state_dict()))
        if world > 1:
            dist.destroy_process_group()
            for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
                os.environ.pop(name, None)


def compare(one: Path, other: Path) -> dict[str, float]:
    """Largest absolute difference of two runs in loss curve, weights, moving average and plugins' state, and `ranks`:
    0 where all processes of the second have the same weights to the bit, else infinite."""
    mine, theirs = last_checkpoint(one), last_checkpoint(other)
    curves = [loss_curve(folder) for folder in (one, other)]
    shared = curves[0].keys() & curves[1].keys()
    ranks = {path.read_bytes() for path in other.glob("weights_of_*")}
    if all(value.dtype == torch.float32 for value in mine["ema"]["shadow"].values()):
        mine, theirs = _without_idle(mine), _without_idle(theirs)
    return {
        "loss": max(abs(curves[0][step] - curves[1][step]) for step in shared),
        "weights": difference(mine["model"], theirs["model"]),
        "average": difference(mine["ema"]["shadow"], theirs["ema"]["shadow"]),
        "state": difference(mine["plugins"], theirs["plugins"]),
        "ranks": 0.0 if len(ranks) == 1 else float("inf"),
    }


def last_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest checkpoint of a run."""
    newest = max((folder / "checkpoints").glob("step_*.ckpt"), key=lambda path: int(path.stem.removeprefix("step_")))
    return torch.load(newest, weights_only=True)


def loss_curve(folder: Path) -> dict[int, float]:
    """Step -> loss of a run."""
    with open(folder / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def _without_idle(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without the parameters WITHOUT_GRADIENT, which only in float64 are the same on every machine."""
    sizes = {name: value.numel() for name, value in checkpoint["ema"]["shadow"].items()}
    counts = torch.cat([torch.full((size,), not name.endswith(WITHOUT_GRADIENT)) for name, size in sizes.items()])

    def drop(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: drop(item) for key, item in value.items() if not str(key).endswith(WITHOUT_GRADIENT)}
        if isinstance(value, list):
            return [drop(item) for item in value]
        return value[counts] if isinstance(value, torch.Tensor) and value.shape == counts.shape else value

    return {key: drop(checkpoint[key]) for key in ("model", "ema", "plugins")}


def difference(one: Any, other: Any) -> float:
    """Largest absolute difference of two trees of tensors and numbers; infinite where their form differs."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return max((difference(x, y) for x, y in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return 0.0 if type(one) is type(other) and one == other else float("inf")


def cases_of(name: str, plugins: list[str | Mapping[str, Any]], **options: Any) -> list[Case]:
    """A case with these plugins on 1, 2 and 3 processes, and that on 2 resumed with 1 and 3 after step 3."""
    options = {"plugins": plugins, "save_every": 3, "keep": 3} | options
    return [Case(name, options), Case(f"{name}, resumed", options, (1, 3), (name, 2, 3))]


def main(
    plugins: list[str | dict[str, Any]], output_dir: str | None = None, precision: str = "64-true", debug: bool = False
) -> None:
    """Compare training with plugins on 1, 2 and 3 processes; ends with an error where it is not the same.

    Args:
        plugins: As for train.py.
        output_dir: Keeps the runs; by default a temporary folder.
        precision: 64-true, within 1e-9, or 32-true, within 1e-5 (with learning rates of training, for AdamW makes
            steps of full length of gradients that are hardly more than rounding).
        debug: Show the traceback of an error.
    """
    import tempfile

    from utils.continual.plugin import make_plugins
    from utils.errors import InputError

    if precision not in TOLERANCE:
        raise InputError(f"--precision {precision}: must be {' or '.join(TOLERANCE)}")
    make_plugins(plugins)  # a mistake in them is told here, in one line
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(output_dir or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runs = run_worlds(cases_of("run", plugins, **FLOAT32 if precision == "32-true" else {}), folder)
        worst = 0.0
        for (name, world), place in runs.items():
            if (name, world) != ("run", 1):
                found = compare(runs["run", 1], place)
                worst = max(worst, *found.values())
                print(f"{name}, {world} processes: " + ", ".join(f"{key} {value:.1e}" for key, value in found.items()))
    if worst > TOLERANCE[precision]:
        raise RuntimeError(f"runs differ by {worst:.1e}, more than {TOLERANCE[precision]:.0e}: see docs/CONTINUAL.md")
    print(f"the same on any number of processes, within {worst:.1e}")


if __name__ == "__main__":
    from utils.cli import run

    sys.path.insert(0, os.getcwd())
    run(main)
