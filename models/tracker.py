"""Tracker: one video, frame by frame, at the video's own size and with the user's own object ids."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.network import VOSNetwork
from models.session import Session
from utils.errors import InputError

MAX_ID = 65535
MAX_SCALE = 8  # a larger one is a slip that takes the memory of a machine

# Every ten objects take memory of their own. So many ids come from a depth map or photograph sooner than from a person.
MAX_OBJECTS = int(os.environ.get("VOS_MAX_OBJECTS", 500))


@dataclass
class Prediction:
    """Result for one frame.

    Attributes:
        labels: (H, W) int32 array at the frame's size, object ids, 0 background.
        object_ids: ids of the tracked objects in the order of `probabilities`.
    """

    labels: np.ndarray
    object_ids: list[int]
    scores: Tensor  # (1 + K, H, W): logits, or probabilities where `normalised`
    normalised: bool = False

    @cached_property
    def probabilities(self) -> Tensor:
        """(1 + K, H, W) float32, background first; computed when asked for."""
        return self.scores if self.normalised else self.scores.softmax(0)


class Tracker:
    """Tracks objects through one video with a memory of its own; any number of trackers may share a model.

    Args:
        model: of `build_model`, put in eval mode; runs on the device the model is on.
        long_term_gap: every n-th frame enters the long-term memory; None: the model's published setting; 0: reference
            frames only.
        max_memory_frames: most frames in the long-term memory of ten objects, None: no limit.
        max_long_edge: frames are shrunk to this long edge for the network, None: the model's own setting (1040 for the
            published ones), and `enlargement` where the model asks for it.
        max_short_edge: likewise for the short edge, None: no limit.
        flip: also track the mirrored video and average (test-time augmentation).
        scales: also track at these scales and average.
    """

    def __init__(
        self,
        model: VOSNetwork,
        long_term_gap: int | None = None,
        max_memory_frames: int | None = None,
        max_long_edge: int | None = None,
        max_short_edge: int | None = None,
        flip: bool = False,
        scales: Sequence[float] = (1.0,),
    ):
        for name, value, least in (
            ("long_term_gap", long_term_gap, 0),
            ("max_memory_frames", max_memory_frames, 1),
            ("max_long_edge", max_long_edge, 16),
            ("max_short_edge", max_short_edge, 16),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}: it must be at least {least}, or None for the default")
        if not scales or not all(0 < scale <= MAX_SCALE for scale in scales):
            raise InputError(f"scales are {tuple(scales)}: give at least one, all above 0 and at most {MAX_SCALE}")
        self._model = model
        gap = model.test_memory_gap if long_term_gap is None else long_term_gap or None
        self._new_session = lambda: Session(model, gap, max_memory_frames)
        self._max_long_edge = model.max_long_edge if max_long_edge is None else max_long_edge
        self._max_short_edge = max_short_edge
        self._object_edge = model.object_edge if max_long_edge is None and max_short_edge is None else None
        self._views = [(scale, mirrored) for scale in scales for mirrored in ((False, True) if flip else (False,))]
        self.reset()

    def reset(self) -> None:
        """Forget the video: the next frame begins a new one, of any size."""
        self._sessions = [self._new_session() for _ in self._views]
        self._slots: list[int | None] = []  # id of each slot, None once removed
        self._frame_size: tuple[int, int] | None = None
        self._enlargement: float | None = None  # known with the first object

    @property
    def object_ids(self) -> list[int]:
        """Ids of the tracked objects, in the order they came."""
        return [object_id for object_id in self._slots if object_id is not None]

    @property
    def memory_frames(self) -> int:
        """Frames in the long-term memory."""
        return max(session.memory_frames for session in self._sessions)

    def remove(self, object_ids: Iterable[int]) -> None:
        """Stop tracking these objects; memory is freed when the last of a group of ten has gone.

        Raises:
            InputError: an id that is not tracked.
        """
        object_ids = list(object_ids)
        for object_id in object_ids:
            if object_id not in self.object_ids:
                raise InputError(f"object {object_id} is not tracked: the tracked ids are {self.object_ids}")
        slots = [slot for slot, object_id in enumerate(self._slots) if object_id in set(object_ids)]
        for session in self._sessions:
            session.remove(slots)
        for slot in slots:
            self._slots[slot] = None

    @torch.inference_mode()
    def step(self, frame: np.ndarray | Tensor, mask: np.ndarray | Tensor | None = None) -> Prediction:
        """Track the next frame.

        Args:
            frame: (H, W, 3) uint8 RGB; every frame of a video has the same size.
            mask: (H, W) integers, or None. The truth for the ids it holds: new ids are added, known ones corrected,
                and their predicted pixels elsewhere dropped; other objects keep theirs where the mask is 0.

        Raises:
            InputError: a frame or mask of a wrong type, size or range.
        """
        image = _as_frame(frame)
        size = image.shape[:2]
        if self._frame_size not in (None, size):
            raise InputError(
                f"the frame is {size[0]}x{size[1]}, the video {self._frame_size[0]}x{self._frame_size[1]} (height x "
                "width): all frames must have one size; call reset() before another video"
            )
        given = None if mask is None else _as_mask(mask, size)
        if given is not None:
            _check_count(given, self.object_ids)
        if self._frame_size is None:  # a new video is tracked with the weights that the model has now
            self._encoder = self._model.eval().folded_encoder()
        self._frame_size = size
        tracked = self._live()
        if not tracked and (given is None or not given.any()):
            device = self._model.identity_bank.weight.device
            return Prediction(np.zeros(size, np.int32), [], torch.ones(1, *size, device=device), normalised=True)
        if self._object_edge is not None and self._enlargement is None:
            self._enlargement = enlargement(given, self._object_edge, self._max_long_edge)

        features = [self._model.encode(self._view(image, *view), self._encoder) for view in self._views]
        if tracked:
            scores = [self._read(i, features[i], size) for i in range(len(self._views))]
            own = [_argmax(score) for score in scores]
            if len(scores) == 1:
                final, normalised, combined = own[0], False, scores[0]
            else:
                combined, normalised = torch.stack([score.softmax(0) for score in scores]).mean(0), True
                final = _argmax(combined)
            # From places among the live objects to slots; the background stays 0.
            names = torch.tensor([0, *(slot + 1 for slot in tracked)], device=final.device)
            own = [names[label] for label in own]
            final = own[0] if len(scores) == 1 else names[final]
        else:
            final = torch.zeros(size, dtype=torch.int64, device=features[0].tokens.device)
            own, combined, normalised = [final] * len(self._views), None, False

        if given is not None and given.any():
            given_slots = self._add(given).to(final.device)
            final = _overrule(final, given_slots)
            live = self._live()
            for i, (_, mirrored) in enumerate(self._views):
                label = self._shrink(_overrule(own[i], given_slots), i, mirrored)
                self._sessions[i].write_reference(features[i], label, live)
            names = torch.tensor([0, *(slot + 1 for slot in live)], device=final.device)
            combined, normalised = (final == names[:, None, None]).float(), True
        else:
            for i, (_, mirrored) in enumerate(self._views):
                self._sessions[i].write(features[i], self._shrink(own[i], i, mirrored))
        ids = np.array([0, *(object_id or 0 for object_id in self._slots)], np.int32)
        return Prediction(ids[final.cpu().numpy()], self.object_ids, combined, normalised)

    def _live(self) -> list[int]:
        return [slot for slot, object_id in enumerate(self._slots) if object_id is not None]

    def _read(self, i: int, features, size: tuple[int, int]) -> Tensor:
        """(1 + live objects, H, W) logits of view i, mirrored back."""
        session = self._sessions[i]
        score = session.merge(session.read(features), size)[0]
        return score.flip(-1) if self._views[i][1] else score

    def _add(self, given: np.ndarray) -> Tensor:
        """Give new ids a slot; the mask as a map of slot + 1."""
        for object_id in np.unique(given):
            if object_id != 0 and object_id not in self._slots:
                self._slots.append(int(object_id))
        table = np.zeros(MAX_ID + 1, np.int64)
        for slot in self._live():
            table[self._slots[slot]] = slot + 1
        return torch.from_numpy(table[given])

    def _view(self, image: np.ndarray, scale: float, mirrored: bool) -> Tensor:
        """(1, 3, h, w) network input of one view of the frame."""
        height, width = self._network_size(scale)
        if (height, width) != image.shape[:2]:
            import cv2

            image = cv2.resize(image.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
        device = self._model.identity_bank.weight.device
        pixels = torch.from_numpy(np.require(image, requirements="CW")).to(device).permute(2, 0, 1)[None]
        pixels = self._model.normalise(pixels).to(self._model.identity_bank.weight.dtype)
        return pixels.flip(-1) if mirrored else pixels

    def _shrink(self, label: Tensor, i: int, mirrored: bool) -> Tensor:
        """Label map (H, W) of slots -> (1, h, w) at the input size of view i."""
        label = label.flip(-1) if mirrored else label
        return F.interpolate(label[None, None].float(), self._network_size(self._views[i][0]), mode="nearest")[0]

    def _network_size(self, scale: float) -> tuple[int, int]:
        if self._enlargement is not None:
            return network_size(self._model, *self._frame_size, scale * self._enlargement)
        return network_size(self._model, *self._frame_size, scale, self._max_short_edge, self._max_long_edge)


def enlargement(mask: np.ndarray, object_edge: float, long_edge: float) -> float:
    """The factor by which frames are resized so that the smallest object is large enough for the network to follow.

    An object's edge is the square root of its area. Frames get at least `long_edge`, and up to 1.6 times that where it
    takes so much to give the smallest object `object_edge` pixels, but never more than twice their own size.

    Args:
        mask: (H, W) the first mask, with an object at least.
        object_edge: in pixels of the network's input.
        long_edge: of the network's input when no object is small.
    """
    native = max(mask.shape)
    smallest = np.unique(mask[mask > 0], return_counts=True)[1].min()
    wanted = min(max(object_edge / math.sqrt(smallest), long_edge / native), 1.6 * long_edge / native)
    return min(wanted, 2.0)


def network_size(
    model: VOSNetwork,
    height: int,
    width: int,
    scale: float = 1.0,
    max_short_edge: float | None = None,
    max_long_edge: float | None = None,
) -> tuple[int, int]:
    """Size of the network's input for a frame: limits first (they only shrink), then scale, then the model's grid."""
    h, w = float(height), float(width)
    if max_short_edge is not None and min(h, w) > max_short_edge:
        factor = max_short_edge / min(h, w)
        h, w = h * factor, w * factor
    if max_long_edge is not None and max(h, w) > max_long_edge:
        factor = max_long_edge / max(h, w)
        h, w = h * factor, w * factor
    return model.input_size(int(h * scale), int(w * scale))


def _overrule(label: Tensor, given: Tensor) -> Tensor:
    """Predicted slots with the given ones in their place."""
    named = torch.isin(label, given[given > 0].unique())
    return torch.where(given > 0, given, label.masked_fill(named, 0))


def _argmax(scores: Tensor) -> Tensor:
    """Index of the largest of (k, H, W) scores, the first where equal."""
    if scores.device.type != "cpu" or scores.stride(0) == 1:
        return scores.argmax(0)
    # Planes lie apart: a running maximum reads them in order, argmax would jump for every pixel.
    best, index = scores[0].clone(), torch.zeros(scores.shape[1:], dtype=torch.int64)
    for k in range(1, scores.shape[0]):
        index.masked_fill_(scores[k] > best, k)
        torch.maximum(best, scores[k], out=best)
    return index


def _check_count(given: np.ndarray, tracked: list[int]) -> None:
    ids = set(np.flatnonzero(np.bincount(given.reshape(-1), minlength=1)).tolist()) - {0}
    if (count := len(ids.union(tracked))) > MAX_OBJECTS:
        raise InputError(
            f"with this mask the video has {count} objects, more than the limit of {MAX_OBJECTS} (VOS_MAX_OBJECTS "
            "raises it): give a mask whose values are ids of objects"
        )


def _as_frame(frame: np.ndarray | Tensor) -> np.ndarray:
    image = frame.cpu().numpy() if isinstance(frame, Tensor) else np.asarray(frame)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise InputError(f"the frame is {image.dtype} of shape {image.shape}: it must be uint8 (height, width, 3) RGB")
    return image


def _as_mask(mask: np.ndarray | Tensor, size: tuple[int, int]) -> np.ndarray:
    labels = mask.cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if labels.dtype == bool:
        labels = labels.astype(np.uint8)
    if labels.ndim != 2 or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"the mask is {labels.dtype} of shape {labels.shape}: it must be integers (height, width)")
    if labels.shape != size:
        raise InputError(f"the mask is {labels.shape[0]}x{labels.shape[1]}, its frame {size[0]}x{size[1]}: no resizing")
    if labels.size and (labels.min() < 0 or labels.max() > MAX_ID):
        raise InputError(f"the mask holds ids from {labels.min()} to {labels.max()}: ids are 1..{MAX_ID}, 0 background")
    return labels.astype(np.int64)
