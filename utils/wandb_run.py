"""Weights & Biases, for those who ask for it with `--logger wandb`: it may fail, and the run goes on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WandbRun:
    """One run of wandb for one output folder: a resumed job goes on with it, by the id kept in `wandb_id.txt`.

    Without a key (WANDB_API_KEY or netrc) it records offline, to be sent later with `wandb sync`; it never asks for a
    login. The first thing that fails prints one line and turns the rest off.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._run = None
        self._do(lambda: self._start(folder, settings))

    def log(self, row: dict[str, float]) -> None:
        """Send one row; its "step" orders the curves."""
        if self._run:
            self._do(lambda: self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"]))

    def picture(self, path: Path, step: int) -> None:
        """Send an image file."""
        if self._run:
            import wandb

            self._do(lambda: self._run.log({"clips": wandb.Image(str(path))}, step=step))

    def finish(self) -> None:
        if self._run:
            self._do(self._run.finish)

    def _start(self, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        kept = folder / "wandb_id.txt"
        known = kept.read_text().strip() if kept.exists() else None
        quiet = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun", "shared")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vos"),
            dir=str(folder),
            config=settings,
            id=known,
            resume="allow" if known else None,
            mode=None if quiet or _has_key() else "offline",
            settings=wandb.Settings(init_timeout=20),
        )
        kept.write_text(self._run.id)

    def _do(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            message = " ".join(str(error).split())
            print(f"wandb is off from here: {type(error).__name__}: {message}", file=sys.stderr, flush=True)


def _has_key() -> bool:
    from requests.utils import get_netrc_auth

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    tokens = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    return any(os.environ.get(name) for name in tokens) or get_netrc_auth(server) is not None


@contextmanager
def without_wandb() -> Iterator[None]:
    """Within it wandb counts as not installed: timm imports it, for a second, wherever it finds it."""
    loaded = sys.modules.get("wandb")
    if loaded is None:
        sys.modules["wandb"] = None
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules["wandb"]
