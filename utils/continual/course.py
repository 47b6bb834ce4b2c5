"""What the plugins of a run share: the model's weights and gradient as vectors, clips of the past, and helpers that
reduce over the processes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data.clips import collate
from utils.continual.plugin import Plugins
from utils.continual.stages import Clip, ClipsOfExperiences, Stage
from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CACHED_CLIPS = 256  # decoded clips of the past that a process keeps in memory


@dataclass(frozen=True)
class Recipe:
    """The parts of train.py that plugins use as well; `at` is (step of the stage, steps of the stage).

    forward: (model, batch, at, feed_predictions) -> logits; feed_predictions None: as the schedule has it.
    objective: (model, logits, batch, at) -> the loss, mean over the clips of the batch.
    feeds_predictions: at -> whether the model remembers its own predictions.
    """

    forward: Callable[..., Tensor]
    objective: Callable[..., Tensor]
    feeds_predictions: Callable[[tuple[int, int]], bool]


class Course:
    """A run through several experiences, as its plugins see it.

    Vectors (p,) hold all parameters that are trained, in the order of `model.named_parameters()`.

    Args:
        model: the bare network, not its wrapper for data parallelism.
        data: clips of all experiences.
        part: clips that one forward pass on this process takes.

    Attributes:
        stage: the present one; step: the present step of the run, counted from 0.
    """

    def __init__(
        self,
        fabric: "Fabric",
        model: nn.Module,
        data: ClipsOfExperiences,
        stages: Sequence[Stage],
        plugins: Plugins,
        recipe: Recipe,
        part: int,
    ):
        from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy

        if not isinstance(fabric.strategy, DDPStrategy | SingleDeviceStrategy):
            raise InputError(
                f"--strategy: {type(fabric.strategy).__name__} keeps no whole copy of weights and gradients in each "
                "process, and plugins need one; continual training takes ddp, which gives the same numbers on any "
                "number of processes"
            )
        self.fabric, self.model, self.data, self.stages = fabric, model, data, list(stages)
        self.plugins, self.recipe, self.part = plugins, recipe, max(1, part)
        self.stage, self.step = self.stages[0], 0
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sample = lru_cache(maxsize=CACHED_CLIPS)(lambda clip: data[clip] | {"item": clip})

    # --- weights and gradient: the same on every process ----------------------------------------------------------

    def weights(self) -> Tensor:
        """A copy of the parameters (p,)."""
        return torch.cat([p.detach().flatten() for p in self._named.values()])

    def load_weights(self, module: nn.Module, weights: Tensor) -> None:
        """Put a vector (p,) into a copy of the model."""
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, part in zip(self._named, self._split(weights), strict=True):
                own[name].copy_(part)

    def gradient(self) -> Tensor:
        """A copy of the gradient (p,): of the whole batch, once a step has reduced it."""
        return torch.cat([_gradient(p).flatten() for p in self._named.values()])

    def set_gradient(self, gradient: Tensor) -> None:
        """Replace the gradient; the vector must be the same on every process."""
        for parameter, part in zip(self._named.values(), self._split(gradient), strict=True):
            _gradient(parameter).copy_(part)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the gradient, as it is: a term that every process computes counts once."""
        for parameter, part in zip(self._named.values(), self._split(gradient), strict=True):
            _gradient(parameter).add_(part)

    # --- clips: names are global, what lies behind them is loaded where it is needed ------------------------------

    def clips(self, step: int) -> list[Clip]:
        """The clips of a step of the run, for all processes together."""
        stage = next(stage for stage in self.stages if step < stage.end)
        clips = stage.batch(step)
        for plugin in self.plugins:
            changed = [tuple(clip) for clip in plugin.clips(self, step, clips)]
            if len(changed) != len(clips):
                raise ValueError(f"{type(plugin).__name__}.clips gave {len(changed)} clips for {len(clips)}")
            clips = changed
        return clips

    def seen(self) -> list[Clip]:
        """The present stage's own clips, without what plugins put in their places, in order; each once."""
        steps = range(self.stage.first, self.stage.end)
        trained = {clip for step in steps for clip in self.clips(step)}
        return [clip for clip in dict.fromkeys(c for step in steps for c in self.stage.batch(step)) if clip in trained]

    def batch(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """A batch of clips on this process's device."""
        samples = [self._sample(clip) for clip in clips]
        return self.fabric.to_device(collate(samples)) | {"items": list(clips)}

    # --- helpers that reduce over the processes: all of them must call, with the same clips -----------------------

    def mean_gradient(self, clips: Sequence[Clip]) -> Tensor:
        """Gradient (p,) of the step's loss, mean over clips; each process computes its share of them.

        The model is in eval mode, so that nothing random depends on who computes what.
        """
        at = (self.step - self.stage.first, self.stage.steps)
        own = clips[self.fabric.global_rank :: self.fabric.world_size]
        total = torch.zeros_like(self.weights())
        for start in range(0, len(own), self.part):
            part = own[start : start + self.part]
            total += self._gradient_of(part, at) * len(part)
        return self.sum(total) / len(clips)

    def mean_squared_gradient(self, clips: Sequence[Clip]) -> Tensor:
        """Mean over clips of the squared gradient (p,) of one clip's loss, at the start of the stage's schedule (all
        pixels, true masks remembered); each process computes its share of the clips. In eval mode."""
        total = torch.zeros_like(self.weights())
        for clip in clips[self.fabric.global_rank :: self.fabric.world_size]:
            total += self._gradient_of([clip], (0, self.stage.steps)) ** 2
        return self.sum(total) / len(clips)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the processes, to the same bits on all of them."""
        return self.fabric.all_reduce(value, reduce_op="sum")

    # --- the outputs of another model on a batch ------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: dict[str, Any], feed_predictions: bool | None = None) -> Tensor:
        """Logits (b, t, 11, h/4, w/4) of a bare model, with the identities that the batch has in this run."""
        with self.fabric.autocast():
            return self.recipe.forward(model, batch, (self.step - self.stage.first, self.stage.steps), feed_predictions)

    def remembered_labels(self, batch: dict[str, Any], logits: Tensor) -> Tensor:
        """The masks (b, t, h, w) that the model remembered in the pass that gave these logits."""
        labels = batch["labels"]
        if not self.recipe.feeds_predictions((self.step - self.stage.first, self.stage.steps)):
            return labels
        frames = [self.model.resize(frame.detach(), labels.shape[-2:]).argmax(1) for frame in logits[:, 1:].unbind(1)]
        return torch.cat((labels[:, :1], torch.stack(frames, dim=1).to(labels.dtype)), dim=1)

    # --- what train.py calls --------------------------------------------------------------------------------------

    def begin(self, stage: Stage, step: int) -> None:
        """Go on at a step of a stage; its first step tells the plugins."""
        self.stage, self.step = stage, step
        if step == stage.first:
            self.plugins.call("before_experience", self)

    def logged(self) -> dict[str, float]:
        """The plugins' columns, mean over the processes."""
        values = {name: value for columns in self.plugins.call("logged") for name, value in columns.items()}
        if not values:
            return {}
        means = self.fabric.all_reduce(torch.tensor(list(values.values())), reduce_op="mean")
        return dict(zip(values, means.tolist(), strict=True))

    def check_equal(self) -> None:
        """Raise RuntimeError if weights or a plugin's state are not the same on all processes, to the bit."""
        if self.fabric.world_size == 1:
            return
        parts = {"the model's weights": self.weights()} | self.plugins.state_dict()
        own = {name: fingerprint(part) for name, part in parts.items()}
        first = self.fabric.broadcast(own)
        differ = torch.tensor([float(own[name] != first[name]) for name in own], device=self.fabric.device)
        differ = self.sum(differ).tolist()  # so that all processes end, and say the same
        if any(differ):
            names = ", ".join(name for name, count in zip(own, differ, strict=True) if count)
            raise RuntimeError(
                f"after {self.stage.name}, not the same on all processes: {names}; something entered training that "
                "each process has drawn or computed for itself (docs/CONTINUAL.md)"
            )

    def state_dict(self) -> dict[str, Any]:
        return self.plugins.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plugins.load_state_dict(self.fabric.to_device(state))

    def _gradient_of(self, clips: Sequence[Clip], at: tuple[int, int]) -> Tensor:
        """Gradient (p,) of the loss, mean over clips, without reduction and leaving the model's gradient alone."""
        training = self.model.training
        self.model.eval()
        batch = self.batch(clips)
        logits = self.recipe.forward(self.model, batch, at, None)
        loss = self.recipe.objective(self.model, logits, batch, at)
        parameters = list(self._named.values())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        self.model.train(training)
        pairs = zip(gradients, parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])

    def _split(self, vector: Tensor) -> list[Tensor]:
        parameters = list(self._named.values())
        parts = vector.split([p.numel() for p in parameters])
        return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def fingerprint(value: Any) -> bytes:
    """16 bytes that tell apart trees of tensors, numbers and text that differ in a single bit."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value):
                digest.update(repr(name).encode())
                add(value[name])
        elif isinstance(value, list | tuple):
            digest.update(b"[")
            for item in value:
                add(item)
            digest.update(b"]")
        else:
            digest.update(repr(value).encode())

    add(value)
    return digest.digest()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
