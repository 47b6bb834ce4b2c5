"""The folder of a training run: configuration, metrics, log, pictures and checkpoints."""

import csv
import os
import sys
import zipfile
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from utils.checkpoint import save_weights
from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class RunFolder:
    """Everything that a run writes. All methods are called by all processes; rank 0 alone writes.

    A run's `state` is a dict of its model, optimizer, "ema" (utils.schedule.WeightAverage) and "step".

    Args:
        fabric: of the run.
        path: the folder, made if need be.
        settings: the resolved options, kept as config.yaml.
        keep: so many of the newest checkpoints stay.
        wandb: send rows and pictures there as well.
    """

    def __init__(self, fabric: "Fabric", path: str | Path, settings: dict[str, Any], keep: int, wandb: bool = False):
        self.fabric, self.path, self.keep = fabric, Path(path), max(1, keep)
        self.writes = fabric.global_rank == 0
        self.checkpoints = self.path / "checkpoints"
        self.wandb = None
        if self.writes:
            import yaml

            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                for left_over in self.checkpoints.glob(".*"):  # of a run that was killed while it wrote
                    if left_over.is_file():
                        left_over.unlink()
                _replace(self.path / "config.yaml", yaml.safe_dump(_plain(settings), sort_keys=False))
            except OSError as error:
                raise InputError(f"--output_dir {path}: cannot be written ({error.strerror}); pass another") from error
            if wandb:
                from utils.wandb_run import WandbRun

                self.wandb = WandbRun(self.path, _plain(settings))
        fabric.barrier()

    def say(self, line: str, printer: Any = print) -> None:
        """Print a line, and keep it with the time in train.log."""
        if self.writes:
            printer(line)
            sys.stdout.flush()  # a log file is read while the run goes on
            with open(self.path / "train.log", "a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")

    def log(self, row: dict[str, float]) -> None:
        """Append a row to metrics.csv; a column that is new rewrites the table."""
        if not self.writes:
            return
        table = self.path / "metrics.csv"
        columns, rows = _read_table(table)
        if set(row) <= set(columns):
            with open(table, "a", newline="") as file:
                csv.DictWriter(file, columns).writerow(row)
        else:
            _write_table(table, columns + [name for name in row if name not in columns], [*rows, row])
        if self.wandb:
            self.wandb.log(row)

    def picture(self, image: Any, step: int) -> None:
        """Write pictures/step_<N>.png from (h, w, 3) uint8."""
        if not self.writes:
            return
        from utils.plots import save_picture

        path = self.path / "pictures" / f"step_{step:06}.png"
        save_picture(image, path)
        if self.wandb:
            self.wandb.picture(path, step)

    def save(self, state: dict[str, Any]) -> None:
        """Write checkpoints/step_<N>.ckpt and ema_<N>.safetensors, then drop the oldest beyond `keep`."""
        step, average = state["step"], state["ema"]
        temporary = self.checkpoints / f".step_{step}.ckpt"
        try:
            # Fabric's own temporary file lies elsewhere, perhaps on another disk.
            self.fabric.save(temporary, {**state, "scaler": self.fabric.strategy.precision.state_dict()})
            if self.writes:
                average.swap()
                save_weights(state["model"].module, self.checkpoints / f"ema_{step}.safetensors", kind="ema")
                average.swap()
                os.replace(temporary, self._file(step))  # last: a checkpoint is whole with all that belongs to it
        except (OSError, RuntimeError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise RuntimeError(f"{self._file(step)}: cannot be written ({error}); the ones before it stay") from error
        if self.writes:
            for old in self._steps()[: -self.keep]:
                self._file(old).unlink()
                (self.checkpoints / f"ema_{old}.safetensors").unlink(missing_ok=True)
        self.fabric.barrier()

    def resume(self, state: dict[str, Any], which: str) -> None:
        """Load a checkpoint into `state` in place, and drop what an earlier run logged beyond it.

        Args:
            which: "auto" takes the newest that is whole, if there is one; "never"; or a checkpoint.

        Raises:
            InputError: a checkpoint asked for by path is not whole, or one is of another model.
        """
        path, problem = self.fabric.broadcast(self._choose(which) if self.writes else None)
        if problem:
            raise InputError(problem)
        if path:
            try:
                # To the CPU first, whatever device it was saved from; plain values and tensors alone.
                rest = self.fabric.load(path, state, weights_only=True)
            except Exception as error:
                raise InputError(
                    f"--resume {which}: {path} does not fit this run ({' '.join(str(error).split())[:300]}); "
                    "it needs the model options that it was saved with, else another --output_dir or --resume never"
                ) from error
            if rest.get("scaler"):
                self.fabric.strategy.precision.load_state_dict(rest["scaler"])
            self.say(f"resumed from {path}")
        if self.writes:
            self._set_aside([step for step in self._steps() if step > state["step"]])
            table = self.path / "metrics.csv"
            columns, rows = _read_table(table)
            kept = [row for row in rows if row["step"].isdecimal() and int(row["step"]) <= state["step"]]
            if columns:  # also where no row goes: the last line may be cut off
                _write_table(table, columns, kept)
        self.fabric.barrier()

    def files(self, step: int) -> dict[str, Any]:
        """The checkpoint of a step: weights to use, and what a resumed run reads."""
        weights = self.checkpoints / f"ema_{step}.safetensors"
        return {"step": step, "checkpoint": str(weights), "resume": str(self._file(step))}

    def close(self) -> None:
        """Finish what goes on in the background."""
        if self.wandb:
            self.wandb.finish()

    def _choose(self, which: str) -> tuple[str | None, str | None]:
        """(checkpoint to load, what is wrong)."""
        if which not in ("auto", "never"):
            if _is_whole(Path(which)):
                return which, None
            return None, f"--resume {which}: not a whole checkpoint; give a step_<N>.ckpt, auto or never"
        for step in self._steps()[::-1] if which == "auto" else []:
            if _is_whole(self._file(step)):
                return str(self._file(step)), None
            self.say(f"warning: {self._file(step)} is damaged and passed over; trying the one before it")
        return None, None

    def _set_aside(self, steps: list[int]) -> None:
        """Move checkpoints that this run will write anew, or cannot read, into a folder beside the others."""
        for step in steps:
            for file in (self._file(step), self.checkpoints / f"ema_{step}.safetensors"):
                if file.exists():
                    (self.checkpoints / "set_aside").mkdir(exist_ok=True)
                    os.replace(file, self.checkpoints / "set_aside" / file.name)
            self.say(f"checkpoint of step {step} moved to {self.checkpoints / 'set_aside'}")

    def _steps(self) -> list[int]:
        names = (path.stem.removeprefix("step_") for path in self.checkpoints.glob("step_*.ckpt"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}.ckpt"


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint, which is a zip archive, has all its bytes as they were written."""
    try:
        if not path.is_file():  # a device never ends
            return False
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError):
        return False


def _read_table(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and whole rows; what a kill cut off is left out."""
    if not path.exists():
        return [], []
    text = path.read_text(errors="replace")
    reader = csv.DictReader(StringIO(text[: text.rfind("\n") + 1], newline=""))
    rows = [row for row in reader if None not in row and None not in row.values()]
    columns = list(reader.fieldnames or [])
    if columns and "step" not in columns:
        raise InputError(f"{path}: no table of this script, it has no column step; move it away")
    return columns, rows


def _write_table(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(f".{path.name}")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML needs no tags."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
