"""Which clips every step of a continual training sees: a function of the configuration and the step alone.

A clip is named by two numbers, its experience and its item there: data sets draw a clip from its item (data/clips.py),
so the pair stands for the pixels, on every process and at any later time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from utils.errors import InputError
from utils.loading import ItemOrder

Clip = tuple[int, int]  # experience, item
OPTIONS = ("name", "datasets", "steps", "epochs", "evaluate")


@dataclass(frozen=True)
class Experience:
    """One data set of the sequence.

    datasets: as for train.py.
    steps, epochs: how long it is trained on; one of them is given.
    evaluate: a benchmark, as options of `data.benchmarks.open_benchmark` and, under `tracker`, of `models.Tracker`;
        None: it takes no part in the evaluation.
    """

    name: str
    datasets: list[str | Mapping[str, Any]]
    steps: int | None = None
    epochs: float | None = None
    evaluate: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Plan:
    """What a stage is to train on: `clips[e]` so many of experience e, for `steps` steps; `name` for the results."""

    name: str
    steps: int
    clips: dict[int, int]


@dataclass
class Stage:
    """A stretch of a run with learning rates and other schedules of its own.

    number: from 0; first, end: steps of the run that begin it and follow it.
    """

    number: int
    name: str
    first: int
    end: int
    _batches: np.ndarray | None = field(default=None, repr=False)

    @property
    def steps(self) -> int:
        return self.end - self.first

    def batch(self, step: int) -> list[Clip]:
        """The clips of a step (of the run) before any plugin has changed them, for all processes together."""
        return [(int(e), int(item)) for e, item in self._batches[step - self.first]]


class ClipsOfExperiences(Dataset):
    """The data sets of all experiences as one, whose items are clips (experience, item)."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.datasets = list(datasets)

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def __getitem__(self, clip: Clip) -> dict:
        return self.datasets[clip[0]][clip[1]]


def read_experiences(entries: Sequence[Mapping[str, Any]]) -> list[Experience]:
    """Experiences from the configuration. Raises InputError for what is missing, unknown or contradictory."""
    experiences = []
    for number, entry in enumerate(entries, start=1):
        place = f"experiences, number {number}"
        for key in entry:
            if key not in OPTIONS:
                raise InputError(f"{place}: there is no option {key!r}; it has {', '.join(OPTIONS)}")
        experience = Experience(**{"name": f"experience{number}", "datasets": []} | dict(entry))
        if not experience.datasets:
            raise InputError(f"{place}: datasets is missing; a list of names or descriptions is needed")
        if (experience.steps is None) == (experience.epochs is None):
            raise InputError(f"{place}: either steps or epochs is needed")
        length = experience.steps if experience.epochs is None else experience.epochs
        if not isinstance(length, int | float) or length <= 0 or (experience.epochs is None and length % 1):
            raise InputError(f"{place}: {length} is no length; steps is a whole number, epochs a number, above 0")
        if experience.name in ["start", *(other.name for other in experiences)]:
            raise InputError(f"{place}: the name {experience.name} is taken; names must differ")
        if not str(experience.name).replace("-", "").replace("_", "").isalnum():
            raise InputError(f"{place}: the name {experience.name!r} must consist of letters, digits, - and _")
        experiences.append(experience)
    if not experiences:
        raise InputError("experiences: the list is empty; it needs one entry for each data set of the sequence")
    return experiences


def plan_stages(experiences: Sequence[Experience], lengths: Sequence[int], batch_size: int) -> list[Plan]:
    """One stage for each experience, in order. Epochs that are no whole number of steps are rounded up: the last batch
    goes on with the clips of the next turn, so that every batch is full."""
    plans = []
    for number, (experience, length) in enumerate(zip(experiences, lengths, strict=True)):
        steps = experience.steps or -int(-experience.epochs * length // batch_size)
        plans.append(Plan(str(experience.name), int(steps), {number: int(steps) * batch_size}))
    return plans


def make_stages(plans: Sequence[Plan], lengths: Sequence[int], batch_size: int, seed: int) -> list[Stage]:
    """Draw the order of the clips of every stage.

    Each experience is one stream, in which stages that share it go on where the last one stopped. A stage shuffles its
    parts of the streams, so that a plan with all clips of all experiences (joint training) has the very clips that
    training on one after the other has.

    Raises:
        ValueError: a plan's clips do not fill its steps.
    """
    orders = [ItemOrder(length, seed, 11, number) for number, length in enumerate(lengths)]
    taken, first, stages = dict.fromkeys(range(len(lengths)), 0), 0, []
    for number, plan in enumerate(plans):
        if sum(plan.clips.values()) != plan.steps * batch_size:
            raise ValueError(f"stage {plan.name}: {plan.clips} clips do not fill {plan.steps} steps of {batch_size}")
        source = np.repeat(list(plan.clips), list(plan.clips.values()))
        if len(plan.clips) > 1:
            source = np.random.default_rng([seed, 12, number]).permutation(source)
        item = np.empty_like(source)
        for experience, count in plan.clips.items():
            start = taken[experience]
            item[source == experience] = [orders[experience](g) for g in range(start, start + count)]
            taken[experience] += count
        batches = np.stack([source, item], axis=1).reshape(plan.steps, batch_size, 2)
        stages.append(Stage(number, plan.name, first, first + plan.steps, batches))
        first += plan.steps
    return stages
