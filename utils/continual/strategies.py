"""The remedies against forgetting, one class each. Weights and gradients are flat vectors (p,), see `Course`.

Everything here happens after gradients are reduced over the processes, or reduces by itself through the helpers of
`Course`; docs/CONTINUAL.md says why each is the same mathematics on any number of processes.
"""

import copy
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.continual.memory import balanced, reservoir
from utils.continual.plugin import Plugin
from utils.continual.stages import Clip, Plan
from utils.errors import InputError


class Naive(Plugin):
    """One experience after the other, and nothing against forgetting."""


class Joint(Plugin):
    """All experiences at once, in one stage: the very clips of naive training, shuffled."""

    def plan(self, plans: list[Plan]) -> list[Plan]:
        clips = {experience: count for plan in plans for experience, count in plan.clips.items()}
        return [Plan("joint", sum(plan.steps for plan in plans), clips)]


class Cumulative(Plugin):
    """Each stage trains on its experience and all before, the same share of each, for as many steps as naive."""

    def plan(self, plans: list[Plan]) -> list[Plan]:
        changed = []
        for number, plan in enumerate(plans):
            total, among = sum(plan.clips.values()), number + 1
            shares = {e: total // among + (e >= among - total % among) for e in range(among)}
            changed.append(Plan(plan.name, plan.steps, {e: n for e, n in shares.items() if n}))
        return changed


class Replay(Plugin):
    """Experience replay: a share of every batch is clips from a memory of earlier experiences (Chaudhry et al., "On
    tiny episodic memories in continual learning", 2019).

    Args:
        size: clips in memory.
        share: of each batch, taken from it; the batch and the time of a step stay as they were.
        policy: reservoir, a uniform sample of all that was seen, or balanced, the same number of every experience.
        seed: of the choice.
    """

    def __init__(
        self, size: int = 200, share: float = 0.5, policy: Literal["reservoir", "balanced"] = "reservoir", seed: int = 0
    ) -> None:
        super().__init__()
        if policy not in ("reservoir", "balanced"):
            raise InputError(f"plugins: replay: policy {policy!r} must be reservoir or balanced")
        if not 0 < share < 1 or size < 1:
            raise InputError(f"plugins: replay: size {size} must be at least 1, share {share} between 0 and 1")
        self.size, self.share, self.seed = size, share, seed
        self.choose = {"reservoir": reservoir, "balanced": balanced}[policy]
        self.state = {"clips": []}

    def clips(self, course: Any, step: int, clips: list[Clip]) -> list[Clip]:
        memory, count = self.state["clips"], round(self.share * len(clips))
        if not memory or not count:
            return clips
        rng = np.random.default_rng([self.seed, 21, step])
        drawn = rng.choice(len(memory), count, replace=count > len(memory))
        clips = list(clips)
        for place, number in zip(np.arange(count) * len(clips) // count, drawn, strict=True):  # spread over processes
            clips[place] = tuple(memory[number])
        return clips

    def after_experience(self, course: Any) -> None:
        offered = [tuple(clip) for clip in self.state["clips"]] + course.seen()
        self.state["clips"] = [list(clip) for clip in self.choose(offered, self.size, self.seed)]

    def logged(self) -> dict[str, float]:
        return {"replay_clips": len(self.state["clips"])}


class EWC(Plugin):
    """Elastic weight consolidation: strength * sum over parameters of fisher * (weight - anchor)^2 (Kirkpatrick et al.,
    PNAS 2017, without its factor 1/2).

    The Fisher information is the mean over clips of the squared gradient of one clip.

    Args:
        strength: of the penalty.
        online: one running Fisher information and the latest anchor (Schwarz et al., "Progress & Compress", 2018);
            otherwise a penalty for every past experience, in whose number memory grows.
        decay: of the running Fisher information, at each experience.
        clips: most clips of an experience that it is estimated from; None: all that were trained on.
    """

    def __init__(self, strength: float = 1e4, online: bool = False, decay: float = 1.0, clips: int | None = 64) -> None:
        super().__init__()
        self.strength, self.online, self.decay, self.count = strength, online, decay, clips
        self.state = {"fisher": [], "anchor": []}
        self.value = 0.0

    def penalty(self, course: Any) -> None:
        weights, value = course.weights(), 0.0
        for fisher, anchor in zip(self.state["fisher"], self.state["anchor"], strict=True):
            away = weights - anchor
            course.add_gradient(2 * self.strength * fisher * away)
            value += self.strength * (fisher * away**2).sum()
        self.value = float(value)

    def after_experience(self, course: Any) -> None:
        fisher = course.mean_squared_gradient(course.seen()[: self.count])
        if self.online and self.state["fisher"]:
            fisher += self.decay * self.state["fisher"][0]
        past = [] if self.online else self.state["fisher"]
        anchors = [] if self.online else self.state["anchor"]
        self.state = {"fisher": [*past, fisher], "anchor": [*anchors, course.weights()]}

    def logged(self) -> dict[str, float]:
        return {"ewc": self.value}


class SI(Plugin):
    """Synaptic intelligence: strength * sum of importance * (weight - anchor)^2 (Zenke et al., ICML 2017).

    A parameter's importance is its share in the fall of the loss along its path, over the square of the way it went.
    The path follows the gradient of the data, as in the paper, not that of the penalty.

    Args:
        strength: of the penalty.
        damping: added to the square of the way.
    """

    def __init__(self, strength: float = 1.0, damping: float = 1e-3) -> None:
        super().__init__()
        self.strength, self.damping = strength, damping
        self.value = 0.0

    def before_experience(self, course: Any) -> None:
        weights = course.weights()
        importance = self.state.get("importance", torch.zeros_like(weights))
        self.state = {"importance": importance, "anchor": weights, "path": torch.zeros_like(weights)}

    def read_gradient(self, course: Any) -> None:
        self._gradient, self._before = course.gradient(), course.weights()

    def penalty(self, course: Any) -> None:
        away = self._before - self.state["anchor"]
        course.add_gradient(2 * self.strength * self.state["importance"] * away)
        self.value = float(self.strength * (self.state["importance"] * away**2).sum())

    def after_step(self, course: Any) -> None:
        self.state["path"] -= self._gradient * (course.weights() - self._before)

    def after_experience(self, course: Any) -> None:
        way = course.weights() - self.state["anchor"]
        self.state["importance"] = self.state["importance"] + self.state["path"].clamp(min=0) / (way**2 + self.damping)

    def logged(self) -> dict[str, float]:
        return {"si": self.value}


class LwF(Plugin):
    """Learning without forgetting: stay near the outputs that the model gave before the experience (Li and Hoiem,
    ECCV 2016), strength * KL(before || now) at a temperature, mean over the pixels of a clip, then over clips.

    The old model sees the new clip with the student's identity permutation, and remembers the masks that the student
    remembers: the true ones, or those that the student has just predicted. The reference frame does not count, and of
    the identities only the background and the clip's objects.

    Args:
        strength, temperature: as above; the loss has no factor temperature^2.
    """

    def __init__(self, strength: float = 1.0, temperature: float = 2.0) -> None:
        super().__init__()
        self.strength, self.temperature = strength, temperature
        self._teacher: nn.Module | None = None
        self._values: list[float] = []

    def before_experience(self, course: Any) -> None:
        self._teacher = None
        if course.stage.number > 0:
            self.state = {"teacher": course.weights()}

    def before_step(self, course: Any) -> None:
        self._values = []
        if "teacher" in self.state and self._teacher is None:
            # A bare copy: a teacher inside the wrapper for data parallelism would take part in its reductions.
            self._teacher = copy.deepcopy(course.model).requires_grad_(False).eval()
            course.load_weights(self._teacher, self.state["teacher"])

    def loss(self, course: Any, batch: dict[str, Any], logits: Tensor) -> Tensor | None:
        if self._teacher is None:
            return None
        remembered = course.remembered_labels(batch, logits)
        with torch.no_grad():
            old = course.forward(self._teacher, batch | {"labels": remembered}, feed_predictions=False)
        clips = []
        for new_clip, old_clip, objects in zip(logits, old, batch["num_objects"].tolist(), strict=True):
            new, before = (x[1:, : objects + 1] / self.temperature for x in (new_clip, old_clip))
            new, before = (x.log_softmax(1, torch.promote_types(x.dtype, torch.float32)) for x in (new, before))
            clips.append(F.kl_div(new, before, reduction="none", log_target=True).sum(1))
        loss = self.strength * torch.stack([clip.mean() for clip in clips]).mean()  # per clip first: see the page
        self._values.append(loss.detach())
        return loss

    def logged(self) -> dict[str, float]:
        return {"lwf": float(sum(self._values)) / max(len(self._values), 1)}


class GEM(Plugin):
    """Gradient episodic memory: a step must not raise the loss on the memory of any past experience (Lopez-Paz and
    Ranzato, NIPS 2017). Costs a pass over every memory in each step.

    Args:
        size: clips kept of each experience.
        margin: least share of every memory's gradient that is mixed in where the gradient is changed.
        damping: of the quadratic programme, as a share of the mean square of the memories' gradients.
        seed: of the choice of clips.
    """

    def __init__(self, size: int = 8, margin: float = 0.0, damping: float = 1e-3, seed: int = 0) -> None:
        super().__init__()
        self.size, self.margin, self.damping, self.seed = size, margin, damping, seed
        self.state = {"memories": []}
        self._changed = 0.0

    def before_step(self, course: Any) -> None:
        self._references = [course.mean_gradient([tuple(clip) for clip in memory]) for memory in self.state["memories"]]

    def project(self, course: Any) -> None:
        self._changed = 0.0
        if not self._references:
            return
        references, gradient = torch.stack(self._references), course.gradient()
        # Rank 0 decides for all: another processor's last bits could turn the sign of a product that is nearly 0.
        products = (references @ gradient).cpu().double().numpy()
        squares = (references @ references.T).cpu().double().numpy()
        mixed = course.fabric.broadcast(self.mixture(squares, products))
        if mixed is not None:
            self._changed = 1.0
            share = torch.tensor(mixed, dtype=references.dtype, device=references.device)
            course.set_gradient(gradient + share @ references)

    def mixture(self, squares: np.ndarray, products: np.ndarray) -> np.ndarray | None:
        """How much of each reference gradient to add, or None where no product is below 0.

        Args:
            squares: (m, m) products of the reference gradients.
            products: (m,) of them with the gradient.
        """
        if not (products < 0).any():
            return None
        damped = squares + self.damping * squares.diagonal().mean() * np.eye(len(squares))
        return solve_bounded(damped, products, self.margin)

    def after_experience(self, course: Any) -> None:
        kept = [list(clip) for clip in reservoir(course.seen(), self.size, self.seed)]
        self.state["memories"] = [*self.state["memories"], kept]

    def logged(self) -> dict[str, float]:
        return {"gem_projected": self._changed}


class AGEM(Plugin):
    """Averaged GEM: a step must not raise the mean loss on a sample of all memories (Chaudhry et al., ICLR 2019).

    Args:
        size: clips kept of each experience.
        sample: clips drawn for each step, as evenly over the past experiences as can be.
        seed: of both choices.
    """

    def __init__(self, size: int = 64, sample: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.size, self.sample, self.seed = size, sample, seed
        self.state = {"memories": []}
        self._changed = 0.0

    def before_step(self, course: Any) -> None:
        memories = self.state["memories"]
        self._reference = None
        if memories:
            rng = np.random.default_rng([self.seed, 22, course.step])
            first = int(rng.integers(len(memories)))  # who gets what is left over
            clips = []
            for place, memory in enumerate(memories):
                extra = (place - first) % len(memories) < self.sample % len(memories)
                count = min(self.sample // len(memories) + extra, len(memory))
                clips += [tuple(memory[i]) for i in rng.choice(len(memory), count, replace=False)]
            self._reference = course.mean_gradient(clips)

    def project(self, course: Any) -> None:
        self._changed = 0.0
        if self._reference is None:
            return
        gradient, reference = course.gradient(), self._reference
        product = float(gradient @ reference)
        factor = course.fabric.broadcast(-product / float(reference @ reference) if product < 0 else None)
        if factor is not None:
            self._changed = 1.0
            course.set_gradient(gradient + factor * reference)

    def after_experience(self, course: Any) -> None:
        kept = [list(clip) for clip in reservoir(course.seen(), self.size, self.seed)]
        self.state["memories"] = [*self.state["memories"], kept]

    def logged(self) -> dict[str, float]:
        return {"agem_projected": self._changed}


def solve_bounded(matrix: np.ndarray, vector: np.ndarray, least: float) -> np.ndarray:
    """v >= least that minimises v.matrix.v / 2 + vector.v, for a positive definite matrix (m, m) of few rows.

    By coordinate descent, until no coordinate changes any more.
    """
    v = np.full(len(vector), float(least))
    for _ in range(10_000):
        before = v.copy()
        for i in range(len(v)):
            v[i] = max(least, v[i] - (matrix[i] @ v + vector[i]) / matrix[i, i])
        if np.abs(v - before).max() <= 1e-13 * max(1.0, np.abs(v).max()):
            break
    return v


KINDS: dict[str, type[Plugin]] = {
    "naive": Naive,
    "joint": Joint,
    "cumulative": Cumulative,
    "replay": Replay,
    "ewc": EWC,
    "si": SI,
    "lwf": LwF,
    "gem": GEM,
    "agem": AGEM,
}
