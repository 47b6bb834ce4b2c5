"""Tracking for the page: from any frame forwards or backwards, with every mask that a person has drawn."""

import threading
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.video import prefetch
from utils.errors import InputError
from web.jobs import Job
from web.sessions import Session

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from models.network import VOSNetwork

REFERENCES = 8  # marked frames behind the start that are learnt anew
KEPT_MODELS = 2


class Models:
    """Weights that may be chosen, and the models loaded last.

    Args:
        checkpoints: files by the name that the page shows; the first is the default.
        model: name of the model that the first of them holds, None: the file says it.
        run: accelerator, devices, strategy, num_nodes, precision as for `utils.fabric.make_fabric`; the default device.
    """

    def __init__(self, checkpoints: dict[str, Path], model: str | None, run: dict):
        self.checkpoints, self.model, self._run = checkpoints, model, run
        self._loaded: OrderedDict[tuple, tuple] = OrderedDict()
        self._lock = threading.Lock()

    def choices(self) -> dict:
        """What the page offers."""
        from models import list_models
        from utils.fabric import device_choices

        devices = [{"value": value, "label": label} for value, label in {"": "as started", **device_choices()}.items()]
        return {"devices": devices, "models": list_models(), "model": self.model or ""}

    def load(self, checkpoint: Path, model: str | None, device: str) -> "tuple[Fabric, VOSNetwork]":
        """A model on a device.

        Raises:
            InputError: weights or device that cannot be used.
        """
        from utils.checkpoint import load_model
        from utils.fabric import make_fabric, place

        with self._lock:
            key = (str(checkpoint), model, device)
            if key not in self._loaded:
                run = {"devices": device, "precision": self._run.get("precision", "auto")} if device else self._run
                fabric = make_fabric(**run)
                if fabric.world_size > 1:
                    raise InputError("one video is tracked on one device; choose one")
                while len(self._loaded) >= KEPT_MODELS:
                    self._loaded.popitem(last=False)
                self._loaded[key] = fabric, place(fabric, load_model(checkpoint, model))
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def forget(self, folder: Path) -> None:
        """Drop the models of weights in a folder that goes."""
        with self._lock:
            for key in [key for key in self._loaded if Path(key[0]).is_relative_to(folder)]:
                del self._loaded[key]


def track(job: Job, session: Session, models: Models, start: int, step: int, settings: dict) -> str:
    """Track from frame `start` to the end of the video, or with step -1 to its beginning.

    The masks drawn on the frames behind are learnt first (the nearest of them), the labels of the start are taken as
    they are, and masks drawn on the frames ahead correct what is predicted there. An object that a person has erased
    from a frame ends there, until it is drawn again.

    Args:
        settings: checkpoint (path), model, device, max_long_edge, max_memory_frames, long_term_gap.

    Returns:
        What was done, for the person.
    """
    reader, labels = session.reader.twin(), session.labels
    origin = start if labels.has(start) else nearest(labels.frames(), start, step)
    if origin is None:
        where = "this frame or an earlier one" if step > 0 else "this frame or a later one"
        raise InputError(f"no object is marked on {where}; draw a mask first, or load one")
    behind = [frame for frame in labels.marked_frames() if (origin - frame) * step > 0]
    warm_up = sorted(behind, key=lambda frame: abs(frame - origin))[:REFERENCES][::-1]
    if not any(labels.read(frame).any() for frame in (*warm_up, origin)):
        raise InputError(f"the mask of frame {origin} is empty; draw an object first")
    ahead = range(origin + step, reader.length if step > 0 else -1, step)
    if not ahead:
        raise InputError(f"frame {origin} is the {'last' if step > 0 else 'first'}; there is nothing to track from it")

    job.total = len(ahead)
    job.notes = {"frame": origin, "doing": "loading the model"}
    session.changed()
    fabric, network = models.load(settings["checkpoint"], settings["model"], settings["device"])
    job.check()
    from models import Tracker  # seconds, the first time

    tracker = Tracker(
        network, settings["long_term_gap"], settings["max_memory_frames"], max_long_edge=settings["max_long_edge"]
    )

    def forget(gone: set[int]) -> None:
        tracker.remove(gone & set(tracker.object_ids))

    with closing(reader), closing(prefetch(map(reader.read, (*warm_up, origin, *ahead)), 2)) as frames:
        for frame in (*warm_up, origin):
            given = labels.read(frame)
            forget(labels.marked(frame) - set(np.unique(given).tolist()))
            with fabric.autocast():
                tracker.step(next(frames).image, given if given.any() else None)
            job.check()
        for frame in ahead:
            forget(set(tracker.object_ids) - set(session.objects))
            drawn = labels.marked(frame)
            given = labels.read(frame) if drawn else None
            if drawn:
                given = np.where(np.isin(given, list(drawn)), given, 0)
                forget(drawn - set(np.unique(given).tolist()))
            with fabric.autocast():
                prediction = tracker.step(next(frames).image, given if drawn and given.any() else None)
            labels.write(frame, prediction.labels)
            job.progress(
                len(ahead),
                frame=frame,
                objects=len(prediction.object_ids),
                memory_frames=tracker.memory_frames,
                memory_bytes=memory(fabric),
            )
    return f"Tracked {len(ahead)} frames."


def nearest(frames: list[int], start: int, step: int) -> int | None:
    """The frame next to `start` among those that lie before it in the direction of `step`."""
    behind = [frame for frame in frames if (start - frame) * step >= 0]
    return min(behind, key=lambda frame: abs(start - frame), default=None)


def memory(fabric: "Fabric") -> int:
    """Bytes in use now: of the device's allocator on CUDA, else of the whole process."""
    import torch

    from utils.timing import peak_memory

    if fabric.device.type == "cuda":
        return torch.cuda.memory_allocated(fabric.device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return peak_memory(fabric.device)
    import resource

    return pages * resource.getpagesize()
