"""The folder of a training run: configuration, metrics, log and checkpoints."""

import csv
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from utils.checkpoint import save_weights
from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from models.network import VOSNetwork
    from utils.schedule import WeightAverage


class RunFolder:
    """Args: the run's Fabric, its folder, the resolved options, how many checkpoints to keep.

    SIGTERM, SIGINT and SIGUSR1 (SLURM's warning) set `stop_requested`: the run saves and stops after its step.
    """

    def __init__(self, fabric: "Fabric", path: str | Path, settings: dict[str, Any], keep: int):
        self.fabric, self.path, self.keep = fabric, Path(path), max(1, keep)
        self._stop = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._request_stop)
        if fabric.global_rank == 0:
            import yaml

            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(yaml.safe_dump(_plain(settings), sort_keys=False))
        fabric.barrier()

    @property
    def stop_requested(self) -> bool:
        """True on every process once any of them was asked to stop."""
        if self.fabric.world_size == 1:
            return self._stop
        return bool(self.fabric.all_reduce(torch.tensor(float(self._stop)), reduce_op="sum") > 0)

    def log(self, row: dict[str, float]) -> None:
        """Append a row to metrics.csv and a line to train.log; a new column rewrites the table."""
        if self.fabric.global_rank != 0:
            return
        table = self.path / "metrics.csv"
        rows: list[dict[str, Any]] = []
        columns = list(row)
        if table.exists():
            with open(table, newline="") as file:
                reader = csv.DictReader(file)
                columns = list(reader.fieldnames or [])
                if not set(row) <= set(columns):
                    rows = list(reader)
                    columns += [name for name in row if name not in columns]
                    table.unlink()
        new = not table.exists()
        with open(table, "a", newline="") as file:
            writer = csv.DictWriter(file, columns)
            if new:
                writer.writeheader()
                writer.writerows(rows)
            writer.writerow(row)
        with open(self.path / "train.log", "a") as file:
            file.write(json.dumps(row) + "\n")

    def save(self, state: dict[str, Any], raw: "VOSNetwork", average: "WeightAverage") -> None:
        """Write checkpoints/step_<N>.ckpt and ema_<N>.safetensors, then drop the oldest beyond `keep`."""
        folder, step = self.path / "checkpoints", state["step"]
        temporary = folder / f".step_{step}.ckpt"
        self.fabric.save(temporary, {**state, "scaler": self.fabric.strategy.precision.state_dict()})
        if self.fabric.global_rank == 0:
            average.swap()
            save_weights(raw, folder / f"ema_{step}.safetensors", kind="ema")
            average.swap()
            os.replace(temporary, folder / f"step_{step}.ckpt")  # last: a checkpoint is whole with all that belongs to it
            for old in self._checkpoints()[: -self.keep]:
                old.unlink()
                (folder / f"ema_{_step(old)}.safetensors").unlink(missing_ok=True)
        self.fabric.barrier()

    def resume(self, state: dict[str, Any], which: str) -> bool:
        """Load a checkpoint into `state` in place: auto takes the newest that can be read.

        Raises:
            InputError: a checkpoint asked for by path cannot be read.
        """
        if which == "never":
            return False
        candidates = self._checkpoints()[::-1] if which == "auto" else [Path(which)]
        for path in candidates:
            try:
                rest = self.fabric.load(path, state)
            except Exception as error:
                message = f"{path} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})"
                if which != "auto":
                    raise InputError(f"--resume {message}: give a checkpoint of this model, auto or never") from error
                self.fabric.print(f"warning: {message}; trying the one before it")
                continue
            self.fabric.strategy.precision.load_state_dict(rest.get("scaler", {}))
            return True
        return False

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step_*.ckpt"), key=_step)

    def _request_stop(self, *_: object) -> None:
        self._stop = True


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML needs no tags."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
