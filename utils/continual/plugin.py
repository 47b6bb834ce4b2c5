"""What a plugin is, and the order in which its hooks are called. docs/CONTINUAL.md is the page for authors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from utils.continual.stages import Clip, Plan
from utils.errors import InputError

if TYPE_CHECKING:
    from utils.continual.course import Course


class Plugin:
    """A remedy against forgetting; this one does nothing. Override what is needed, keep in `state` what must last.

    A step calls, in this order: `before_step`; for every pass forward, `loss`, backward (the last pass reduces the
    gradient over the processes); the gradient is unscaled; `read_gradient`; `penalty`; `project`; clipping; the
    optimiser's step; `after_step`; the moving average. Each hook is called on all plugins, in their order, before the
    next one. After the gradient is reduced it is the same on all processes, and so must be whatever a hook adds to it.

    `state` may hold tensors, numbers, text, and lists and dicts of them. It is saved in every checkpoint and must be
    the same on every process.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def plan(self, plans: list[Plan]) -> list[Plan]:
        """Change what the run trains on, before it begins; clips in a plan must fill its steps."""
        return plans

    def clips(self, course: "Course", step: int, clips: list[Clip]) -> list[Clip]:
        """Change the clips of a step, for all processes together: as many, and a function of step and `state`."""
        return clips

    def before_experience(self, course: "Course") -> None:
        """Before the first step of an experience; a run that resumes in the middle of one does not call it again."""

    def before_step(self, course: "Course") -> None:
        """Before the first forward pass of a step."""

    def loss(self, course: "Course", batch: dict[str, Any], logits: Tensor) -> Tensor | None:
        """Something to add to the loss of a pass: the mean over the clips of this process's part of the batch."""

    def read_gradient(self, course: "Course") -> None:
        """The gradient of data and `loss`, mean over the whole batch, is there; it must not be changed."""

    def penalty(self, course: "Course") -> None:
        """Add the gradient of a term that depends on the weights alone, by `course.add_gradient`."""

    def project(self, course: "Course") -> None:
        """Change the gradient, by `course.set_gradient`."""

    def after_step(self, course: "Course") -> None:
        """After a step of the optimiser; steps that are left out, for their gradient is not finite, do not call it."""

    def after_experience(self, course: "Course") -> None:
        """After the last step of an experience. The model has the averaged weights, from which the next one begins."""

    def logged(self) -> dict[str, float]:
        """Columns for metrics.csv, of the last step; the mean over the processes is written."""
        return {}


class Plugins:
    """The plugins of a run in the order of the configuration; `state_dict` is what a checkpoint keeps of them."""

    def __init__(self, plugins: Sequence[Plugin]):
        self.plugins = list(plugins)

    def __iter__(self):
        return iter(self.plugins)

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call a hook of all plugins; what they return, without None."""
        results = [getattr(plugin, hook)(*args) for plugin in self.plugins]
        return [result for result in results if result is not None]

    def state_dict(self) -> dict[str, Any]:
        return {f"{i} {type(plugin).__name__}": plugin.state for i, plugin in enumerate(self.plugins)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if own.keys() != state.keys():
            raise ValueError(f"the checkpoint is of plugins {list(state)}, this run has {list(own)}")
        for plugin, loaded in zip(self.plugins, state.values(), strict=True):
            plugin.state = dict(loaded)


def make_plugins(entries: Sequence[str | Mapping[str, Any]]) -> Plugins:
    """Plugins from the configuration: names, or mappings with `kind` and the options of the plugin's class.

    A kind `package.module:Class` names a class of your own. Importing a module runs it, and a configuration may come
    from anybody: the module has to be named in the environment, too, VOS_PLUGINS=package.module[,another].

    Raises:
        InputError: no such plugin, option or class, or one in a module that VOS_PLUGINS does not name.
    """
    import importlib
    import os

    from utils.continual.strategies import KINDS

    plugins = []
    for entry in entries:
        options = {"kind": entry} if isinstance(entry, str) else dict(entry)
        kind = options.pop("kind", None)
        if isinstance(kind, str) and kind in KINDS:
            made = KINDS[kind]
        elif isinstance(kind, str) and ":" in kind:
            module, _, name = kind.partition(":")
            if not module or module not in os.environ.get("VOS_PLUGINS", "").split(","):
                raise InputError(f"plugins: {kind} runs code of your own; if you trust it, set VOS_PLUGINS={module}")
            try:
                made = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise InputError(f"plugins: {kind} cannot be imported ({error})") from error
            if not (isinstance(made, type) and issubclass(made, Plugin)):
                raise InputError(f"plugins: {kind} is no class derived from utils.continual.plugin.Plugin")
        else:
            raise InputError(f"plugins: kind {kind!r} is none of {', '.join(KINDS)}, nor of the form module:Class")
        known = inspect.signature(made).parameters
        for name in options:
            if name not in known:
                raise InputError(f"plugins: {kind} has no option {name!r}; it has {', '.join(known) or 'none'}")
        try:
            plugins.append(made(**options))
        except TypeError as error:
            raise InputError(f"plugins: {kind}: {error}") from error
    return Plugins(plugins)
