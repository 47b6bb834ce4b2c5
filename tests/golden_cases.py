"""Reads the reference's numbers and fills models with the golden weights; used by the test_golden_* files."""

import importlib.util
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent
SHIPPED = ROOT / "golden"
SHARED = ROOT.parent.parent / "shared" / "golden"


def golden_path(name: str) -> Path:
    """The shipped copy of a golden file, else the shared one; skips the test where neither is there."""
    for folder in (SHIPPED, SHARED):
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"golden file {name} is neither in tests/golden nor in ../shared/golden")


def names(pattern: str) -> list[str]:
    """All golden files of a pattern, shipped or shared."""
    return sorted({path.name for folder in (SHIPPED, SHARED) for path in folder.glob(pattern)})


def golden_state(model: str) -> dict[str, torch.Tensor]:
    """The golden weights of a model under the published keys."""
    rule = golden_path("golden_weights.py")
    spec = importlib.util.spec_from_file_location("golden_weights", rule)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    keys = json.loads(golden_path(f"keys_{model}.json").read_text())["keys"]
    state = {key: torch.zeros(shape, dtype=getattr(torch, dtype)) for key, shape, dtype in keys}
    return module.fill_(state)


@lru_cache(maxsize=2)
def golden_model(name: str) -> torch.nn.Module:
    from models import build_model
    from utils.checkpoint import load_weights

    model = build_model(name)
    load_weights(model, golden_state(name))
    return model


class Case:
    """One golden archive."""

    def __init__(self, name: str):
        self.arrays = np.load(golden_path(name))
        self.meta = json.loads(str(self.arrays["meta"]))

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def __contains__(self, key: str) -> bool:
        return key in self.arrays.files

    def masks(self) -> dict[int, np.ndarray]:
        """Masks that come with frames, by frame."""
        return dict(zip(self["label_idx"].tolist(), self["labels"], strict=True))

    def near_tie(self, t: int) -> np.ndarray:
        """(H, W) bool for frame t >= 1: pixels whose label the reference leaves to rounding."""
        width = self["frames"].shape[2]
        return np.unpackbits(self["near_tie"][t - 1], axis=-1)[:, :width].astype(bool)
