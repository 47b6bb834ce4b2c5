"""Training, evaluation and tracking from Python: a script, a notebook or a prompt, on one device or many.

    vos = VOS("aott", checkpoint="aott.safetensors")        # or VOS() for the bundled weights
    result = vos.train(config="configs/stages/pre_ytb_dav.yaml", data_root="DIR", devices="0,1")
    scores = vos.evaluate(dataset="davis2017", data_root="DIR")
    for prediction in vos.track("video.mp4", "first.png"): ...

What runs is what the scripts train.py, eval.py and demo.py run, with the same options by the same names.
"""

import copy
import csv
import hashlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from utils.cli import read_options
from utils.errors import InputError
from utils.fabric import launch, make_fabric, place, processes_to_start

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from models.network import VOSNetwork
    from models.tracker import Prediction

ROOT = Path(__file__).resolve().parent
RUN_OPTIONS = ("accelerator", "devices", "strategy", "num_nodes", "precision")
Callback = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class TrainResult:
    """What a training run left, on one device or many.

    Attributes:
        output_dir: folder of the run.
        checkpoint: weights to use, for `VOS(checkpoint=...)`; `output_dir` has what a resumed run needs.
        step: steps done.
        metrics: rows of metrics.csv, those of earlier parts of a resumed run too.
    """

    output_dir: Path
    checkpoint: Path
    step: int
    metrics: list[dict[str, float]]


class VOS:
    """A model, and what one does with it.

    Args:
        model: name of a published model, a network of `models.build_model`, or None: what the checkpoint says.
        checkpoint: weights file; without one, a name gives random weights, and nothing at all the bundled ones.

    Attributes:
        model: the network; after `train` it holds the trained weights.
        metrics: of the last `train`, as in its result.

    Raises:
        InputError: as `utils.checkpoint.load_model`.
    """

    def __init__(self, model: "str | VOSNetwork | None" = None, checkpoint: str | Path | None = None):
        from utils.checkpoint import load_model, load_weights
        from utils.wandb_run import without_wandb

        self.metrics: list[dict[str, float]] = []
        if model is None and checkpoint is None:
            checkpoint = ROOT / "assets" / "starter.safetensors"
        if model is None or isinstance(model, str):
            with without_wandb():
                self.model = load_model(checkpoint, model)
        elif not hasattr(model, "settings"):
            raise InputError(f"model: a {type(model).__name__} is neither a name nor a network of models.build_model")
        else:
            self.model = model
            if checkpoint is not None:
                load_weights(model, checkpoint)
        self._remember(checkpoint)

    def train(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        on_step: Callback | None = None,
        on_checkpoint: Callback | None = None,
        on_end: Callback | None = None,
        **options: Any,
    ) -> TrainResult:
        """Train the model as train.py does. Several devices get a process each; this one hears and ends them.

        Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint, end the run and then have the effect that they have elsewhere.
        Under torchrun or SLURM every process calls this and takes its part in the group; callbacks are rank 0's.

        Args:
            config: YAML file of train.py, or the same as a mapping.
            on_step: called here after every step with its row: step, epoch, loss, iou, lr, grad_norm, samples_per_s,
                and val_loss, val_iou where it validates. Costs a little time in every step.
            on_checkpoint: called here after every checkpoint with step, checkpoint (weights to use) and resume.
            on_end: called here at the end with step, checkpoint, output_dir.
            options: of train.py by name; they win over the configuration. `devices` may be 2, "0,1", [0, 1], "cuda:1",
                "cpu", "mps" or "auto"; with accelerator="cpu" it is a number of processes. Without `output_dir` the run
                gets a new folder in runs/.

        Raises:
            InputError: an unusable option, a device that is not there, a batch that cannot be split, or something
                that cannot be handed to other processes; before anything is started.
            Exception: what a process of the run raised first, the others having ended; its cause names rank and place.
        """
        script = _script("train")
        settings = self._train_options(script, config, options)
        run = {name: settings[name] for name in RUN_OPTIONS} | {"training": True}
        processes = processes_to_start(**run)
        script.check_experiences(settings)
        script.check_batch(settings, processes)
        made = None if settings["output_dir"] else _new_folder(f"train_{self.model.name}")
        settings["output_dir"] = settings["output_dir"] or str(made)
        callbacks = {"on_step": on_step, "on_checkpoint": on_checkpoint}
        arguments = {
            "model": copy.deepcopy(self.model).cpu(),
            "settings": settings,
            "wanted": [name for name, callback in callbacks.items() if callback is not None],
        }

        def hear(name: str, data: dict[str, Any]) -> None:
            callbacks[name](data)

        try:
            outcome, stopped, rank = self._run(_train, arguments, processes, run, hear)
        except InputError:
            if made is not None and not any(made.iterdir()):
                made.rmdir()
            raise
        if outcome is not None:
            result = self._take(Path(settings["output_dir"]), outcome["step"])
            stopped = stopped or outcome["signal"]
        if stopped is not None:
            signal.raise_signal(stopped)
        if outcome is None:
            raise RuntimeError("the run was stopped before its first step")
        if on_end is not None and rank == 0:
            on_end({"step": result.step, "checkpoint": str(result.checkpoint), "output_dir": settings["output_dir"]})
        return result

    def evaluate(self, dataset: str = "davis2017", split: str | None = None, **options: Any) -> dict[str, Any] | None:
        """Evaluate the model as eval.py does; several devices get a process each.

        Args:
            dataset, split, options: of eval.py by name. Without `output_dir` the results get a new folder in runs/;
                without `threads` a process keeps the number that it has.

        Returns:
            The content of scores.json; None where there are no true masks and on other ranks than 0 of a launcher.

        Raises:
            As `train`.
        """
        script = _script("eval")
        _refuse(options, "model", "checkpoint", "predictions")
        settings = read_options(script.main, None, {"output_dir": "runs", "dataset": dataset, "split": split} | options)
        run = {name: settings[name] for name in RUN_OPTIONS}
        processes = processes_to_start(**run)
        if "output_dir" not in options:
            settings["output_dir"] = str(_new_folder(f"eval_{self.model.name}_{dataset}"))
        model = self.model if processes == 1 else copy.deepcopy(self.model).cpu()
        arguments = {"model": model, "weights": self._describe(), "plan": script.plan(settings)}
        scores, stopped, _ = self._run(_evaluate, arguments, processes, run, _ignore)
        if stopped is not None:
            signal.raise_signal(stopped)
        return scores

    def track(
        self,
        video: str | Path,
        mask: str | Path,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        precision: str = "auto",
        fps: float = 24,
        snap_colors: bool = False,
        **options: Any,
    ) -> Iterator["Prediction"]:
        """Track the objects of a mask through a video as demo.py does, frame by frame; nothing is written.

        Args:
            video: file, or folder of frames.
            mask: of the first frame, or folder of masks named like the frames they belong to.
            accelerator, devices, precision: the one device; see `utils.fabric.make_fabric`.
            fps, snap_colors: as in demo.py.
            options: of `models.Tracker`; max_memory_frames is that of demo.py if not given.

        Returns:
            An iterator over the frames' predictions.

        Raises:
            InputError: a video, mask or option that cannot be used.
        """
        from data.video import open_frames
        from models.tracker import Tracker

        script = _script("demo")
        source = open_frames(video, fps)
        masks = script.find_masks(Path(mask), source, snap_colors, say=lambda line: None)
        fabric = make_fabric(accelerator, devices, precision=precision)
        if fabric.world_size > 1:
            raise InputError(f"devices {devices}: one video is tracked on one device")
        model = place(fabric, self.model).eval()
        tracker = Tracker(model, **{"max_memory_frames": script.MEMORY_FRAMES} | options)
        return self._track(fabric, tracker, script.read_inputs(source, masks, snap_colors, {}))

    def save(self, path: str | Path, half: bool = False) -> Path:
        """Write the weights as safetensors that carry the model's name and settings; `half` stores float16."""
        from utils.checkpoint import save_weights

        save_weights(self.model, path, kind=self._kind, half=half)
        return Path(path)

    def _train_options(self, script: ModuleType, config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The options of train.py for this model; output_dir is None if nobody named one."""
        import yaml

        _refuse(options, "model", "encoder")
        if isinstance(config, Mapping):
            written, config, options = dict(config), None, {**config, **options}
        else:
            is_file = config is not None and Path(config).is_file()
            try:
                written = yaml.safe_load(Path(config).read_text(encoding="utf-8")) if is_file else None
            except (ValueError, yaml.YAMLError, RecursionError) as error:
                raise InputError(f"config {config}: is no YAML ({' '.join(str(error).split())})") from error
            written = written if isinstance(written, dict) else {}  # what else it is, the options' check says
        own = {"model": self.model.name, "encoder": self.model.settings.encoder}
        for name, value in own.items():
            if written.get(name) not in (None, value):
                raise InputError(
                    f"config: its {name} is {written[name]}, this model's {value}; make the VOS that it asks for, or "
                    f"leave {name} out"
                )
        named = options.get("output_dir") or written.get("output_dir")
        settings = read_options(script.main, config, {"output_dir": "runs"} | options | own)
        settings["output_dir"] = named and str(named)
        del settings["debug"]
        return settings

    def _run(
        self, function: Callable, arguments: dict[str, Any], processes: int, run: dict[str, Any], hear: Callable
    ) -> tuple[Any, int | None, int]:
        """What `function` returns on rank 0, here or in new processes; the signal that stopped those; this rank."""
        if processes > 1:
            from utils.workers import run_workers

            return *run_workers(function, arguments, processes, run, hear), 0
        fabric = make_fabric(**run)
        return launch(fabric, partial(function, **arguments), hear), None, fabric.global_rank

    def _take(self, output_dir: Path, step: int) -> TrainResult:
        """Take over weights and metrics of a run."""
        from utils.checkpoint import load_weights

        checkpoint = output_dir / "checkpoints" / f"ema_{step}.safetensors"
        load_weights(self.model, checkpoint)
        self._remember(checkpoint)
        with open(output_dir / "metrics.csv", newline="") as file:
            self.metrics = [_numbers(row) for row in csv.DictReader(file)]
        return TrainResult(output_dir, checkpoint, step, self.metrics)

    def _remember(self, checkpoint: str | Path | None) -> None:
        from utils.checkpoint import describe_weights

        self._file = None if checkpoint is None else describe_weights(checkpoint)
        self._kind = self._file["kind"] if self._file else "raw"
        self._digest = _digest(self.model)

    def _describe(self) -> dict[str, Any]:
        """What results say of the weights: the file that they came from, unless they were changed since."""
        digest = _digest(self.model)
        if self._file and digest == self._digest:
            return self._file
        return {"file": None, "sha256": digest, "kind": self._kind}

    @staticmethod
    def _track(fabric: "Fabric", tracker: Any, inputs: Iterator) -> Iterator["Prediction"]:
        from contextlib import closing

        from data.video import prefetch

        with closing(prefetch(inputs)) as frames:
            for frame, mask in frames:
                with fabric.autocast():
                    prediction = tracker.step(frame.image, mask and mask.labels)
                yield prediction


def _train(fabric: "Fabric", report: Callable, model: "VOSNetwork", settings: dict, wanted: list[str]) -> dict:
    """The part of one process in a training run."""
    return _script("train").setup(fabric, settings, model, **{name: partial(report, name) for name in wanted})


def _evaluate(fabric: "Fabric", report: Callable, model: "VOSNetwork", weights: dict, plan: tuple) -> dict | None:
    """The part of one process in an evaluation."""
    import torch

    from utils.evaluation import evaluate

    *asked, threads, compiled = plan
    return evaluate(fabric, model, weights, *asked, threads or torch.get_num_threads(), compiled)


def _numbers(row: dict[str, str]) -> dict[str, float]:
    """A row of metrics.csv without its empty places."""
    return {name: int(value) if name == "step" else float(value) for name, value in row.items() if value}


def _ignore(name: str, data: dict[str, Any]) -> None:
    pass


def _refuse(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in options:
            raise InputError(f"{name}: belongs to VOS(model, checkpoint), which holds the model")


def _script(name: str) -> ModuleType:
    """train.py, eval.py or demo.py beside this file; the program that imports this one may have the same name."""
    alias = f"vos_{name}"
    if alias not in sys.modules:
        specification = importlib.util.spec_from_file_location(alias, ROOT / f"{name}.py")
        module = sys.modules[alias] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return sys.modules[alias]


def _new_folder(name: str) -> Path:
    """A folder in runs/ that was not there before."""
    base = Path("runs") / f"{name}_{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def _digest(model: "VOSNetwork") -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256(repr(asdict(model.settings)).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
