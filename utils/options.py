"""The values that numeric options can have: a slip is named before it costs memory, time or a run of nothing."""

from collections.abc import Mapping
from typing import Any

from utils.errors import InputError

TRAINING = {  # least, most
    "total_steps": (1, 10**9),
    "batch_size": (1, 10**5),
    "accumulation": (1, 10**5),
    "crop": (16, 4096),
    "frames": (2, 100),
    "short_edge": (16, 8192),
    "scale": (0.05, 20),
    "merge": (0, 1),
    "cache_megabytes": (0, 1e7),
    "lr": (0, 100),
    "lr_min": (0, 100),
    "lr_encoder_ratio": (0, 100),
    "warm_up_ratio": (0, 1),
    "weight_decay": (0, 100),
    "reference_loss_ratio": (0, 1e6),
    "feed_predictions_ratio": (0, 1e6),
    "ema_ratio": (0, 1e6),
    "clip_norm": (1e-9, 1e9),
    "val_clips": (1, 10**6),
    "val_every": (1, 10**9),
    "log_every": (1, 10**9),
    "picture_every": (0, 10**9),
    "save_every": (1, 10**9),
    "keep": (1, 10**9),
    "stop_after": (0, 1e9),
    "workers": (0, 1024),
    "seed": (0, 2**32 - 1),
}
EVALUATION = {"threads": (1, 4096)}


def check_numbers(options: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise InputError for the first option out of its range, NaN included; None is left to defaults."""
    for name, (least, most) in ranges.items():
        value = options[name]
        values = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(least <= one <= most for one in values):
            raise InputError(f"--{name} {value}: must lie between {least:g} and {most:g}")
        if name == "scale" and list(values) != sorted(values):
            raise InputError(f"--scale {value}: the smaller factor comes first")
