"""Plugins with the mistakes that data parallelism invites: each must be seen by the comparison."""

import numpy as np
import torch

from utils.continual.strategies import EWC, GEM, Replay


class PenaltyTimesProcesses(EWC):
    """Every process adds the penalty, and the sum is taken instead of the mean."""

    def penalty(self, course):
        strength, self.strength = self.strength, self.strength * course.fabric.world_size
        super().penalty(course)
        self.strength = strength


class FisherOfProcessBatches(EWC):
    """Squares of the gradient of each process's batch."""

    def after_experience(self, course):
        own = course.seen()[: self.count][course.fabric.global_rank :: course.fabric.world_size]
        gradient = course._gradient_of(own, (0, course.stage.steps))
        fisher = course.sum(gradient**2) / course.fabric.world_size
        self.state = {key: [*self.state[key], new] for key, new in (("fisher", fisher), ("anchor", course.weights()))}


class ProjectionOfLocalGradients(GEM):
    """Each process projects the gradient of its own clips; the mean is taken afterwards."""

    def project(self, course):
        if not self._references:
            return
        clips, size = course.clips(course.step), course.part
        own = clips[course.fabric.global_rank * size :][:size]
        gradient = course._gradient_of(own, (course.step - course.stage.first, course.stage.steps))
        references = torch.stack(self._references)
        mixed = self.mixture((references @ references.T).numpy(), (references @ gradient).numpy())
        if mixed is not None:
            gradient = gradient + torch.as_tensor(mixed) @ references
        course.set_gradient(course.sum(gradient) / course.fabric.world_size)


class ReferencesNotReduced(GEM):
    """Each process has the reference gradient of its own share of the memory; `told` keeps what the run says to it."""

    def before_experience(self, course):
        check = type(course).check_equal

        def note():
            try:
                check(course)
            except RuntimeError as error:
                self.state["told"] = str(error)

        course.check_equal = note

    def before_step(self, course):
        at, rank, world = (course.step - course.stage.first, course.stage.steps), course.fabric.global_rank, 2
        self._references = [
            course._gradient_of([tuple(clip) for clip in memory[rank::world]], at) for memory in self.state["memories"]
        ]


class DuplicatedReplay(Replay):
    """Each process draws the same clips from the memory."""

    def clips(self, course, step, clips):
        world, memory = course.fabric.world_size, self.state["clips"]
        if not memory:
            return clips
        share = len(clips) // world
        count = round(self.share * share)
        drawn = np.random.default_rng([self.seed, 21, step]).choice(len(memory), count, replace=count > len(memory))
        clips = list(clips)
        for rank in range(world):
            clips[rank * share : rank * share + count] = [tuple(memory[number]) for number in drawn]
        return clips
