"""Training runs small enough to be repeated: a folder of three short videos, a small encoder, clips of 33 x 33."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from data.masks import write_mask

OPTIONS: dict[str, Any] = {
    "datasets": [{"kind": "video", "max_gap": 2}],
    "encoder": "timm/test_efficientnet",
    "crop": (33, 33),
    "short_edge": 80,
    "frames": 3,
    "batch_size": 4,
    "total_steps": 6,
    "log_every": 2,
    "save_every": 3,
    "picture_every": 0,
    "workers": 0,
    "accelerator": "cpu",
}


def write_videos(root: Path) -> Path:
    """Three videos in DAVIS layout: two squares that move over noise."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for video in range(3):
        images, masks = root / "JPEGImages" / f"video{video}", root / "Annotations" / f"video{video}"
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        ground = rng.integers(0, 256, (96, 112, 3), np.uint8)
        for time in range(8):
            image, labels = ground.copy(), np.zeros((96, 112), np.uint8)
            for thing in range(2):
                y, x = 10 + 30 * thing + 2 * time, 20 + 5 * video + 3 * time
                image[y : y + 24, x : x + 24] = 50 + 100 * thing, 200, 60 * video
                labels[y : y + 24, x : x + 24] = thing + 1
            Image.fromarray(image).save(images / f"{time:05}.jpg")
            write_mask(masks / f"{time:05}.png", labels)
    return root


def run(data: Path, output: Path, **options: Any) -> Path:
    """A run of train.py in this process; its folder."""
    train.main(**OPTIONS | {"data_root": str(data), "output_dir": str(output)} | options)
    return output


def command_line(data: Path, output: Path, **options: Any) -> list[str]:
    """The options of the same run as words of a command line."""
    words = OPTIONS | {"data_root": data, "output_dir": output} | options
    words["datasets"] = "[{kind: video, max_gap: 2}]"
    words["crop"] = "[33, 33]"
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def checkpoint(folder: Path, step: int) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"step_{step}.ckpt", weights_only=True)


def tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors and numbers of a checkpoint by their place in it."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for name, item in items for key, value in tensors(item, f"{path}/{name}").items()}
    return {path: torch.as_tensor(tree)} if isinstance(tree, torch.Tensor | int | float) else {}


def difference(one: dict, other: dict) -> float:
    """Largest absolute difference of two trees of tensors with the same places."""
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


@contextmanager
def without_drops():
    """Models are built without drop path and dropout: their draws depend on how clips are grouped into passes."""
    import models

    build = models.build_model

    def built(*args: Any, **overrides: Any) -> torch.nn.Module:
        model = build(*args, **overrides)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout2d):
                module.p = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        return model

    models.build_model = built
    try:
        yield
    finally:
        models.build_model = build

