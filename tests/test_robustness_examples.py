"""Every example in README.md, docs/, docstrings and configuration files, run with data of a few pixels in its place."""

import importlib
import json
import re
import shlex
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_robustness_data import write_data
from training_cases import write_videos

from data.masks import write_mask
from data.video import VideoWriter
from models import build_model
from utils.checkpoint import save_weights
from utils.cli import _parse, run
from utils.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ["*.md", "docs/*.md", "assets/*.md", "configs/**/*.yaml", "*.py", "data/*.py", "utils/**/*.py"]
TEXTS = sorted(path for pattern in [*PATTERNS, "benchmarks/*.py"] for path in ROOT.glob(pattern))
COMMAND = re.compile(r"(?:python (?:-m [\w.]+|\w+\.py)|torchrun .*?train\.py|fabric run .*?train\.py)(?: [^`#\n|\"]*)?")


def commands(path: Path) -> list[list[str]]:
    """The words of all command lines that a text shows, up to where prose begins; a backslash goes on."""
    text = re.sub(r" *\\\n[ #]*", " ", path.read_text())
    found = []
    for match in COMMAND.findall(text):
        line = match.partition("$(")[0].partition(" && ")[0].rstrip(" .,;:)").replace("...", "")
        words = shlex.split(line)
        start = 3 if words[1] == "-m" else next(i for i, word in enumerate(words) if word.endswith(".py")) + 1
        options = []
        for word in words[start:]:
            if not word.startswith("--") and not (options and options[-1].startswith("--")):
                break
            options.append(word)
        found.append(words[:start] + (options[:-1] if options and options[-1].startswith("--") else options))
    return found


def main_of(words: list[str]) -> tuple[object, list[str]] | None:
    """The function of a command of this repository, and its options; None where they are not those of a function."""
    place = 2 if words[1] == "-m" else next(i for i, word in enumerate(words) if word.endswith(".py"))
    name = words[place].removesuffix(".py")
    if name in ("pytest", "utils.plots", "utils.workers"):
        return None
    return importlib.import_module(name).main, words[place + 1 :]


@pytest.mark.parametrize("path", [p for p in TEXTS if commands(p)], ids=lambda path: str(path.relative_to(ROOT)))
def test_options_of_every_command_exist(path: Path, monkeypatch) -> None:
    """Scripts, modules, option names and values of commands, those that take hours among them."""
    monkeypatch.chdir(ROOT)
    for words in commands(path):
        if (found := main_of(words)) is not None:
            try:
                _parse(*found)
            except InputError as error:
                # The text may leave out what is not its subject.
                assert str(error).startswith("required: "), (words, error)


# --- what a text says is run, with files of a few pixels -----------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the examples name."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("assets", "configs"):
        (folder / name).symlink_to(ROOT / name)
    torch.manual_seed(0)
    weights = build_model("aott", encoder="timm/test_efficientnet")
    for name in ("FILE", "PRE.safetensors", "small.safetensors"):
        save_weights(weights, folder / name)
    for name in ("DIR", "FOLDER", "DATA"):
        write_videos(folder / name)
    write_data(folder / "DAVIS", "davis2017")
    shutil.copytree(folder / "DAVIS/Annotations/480p", folder / "MASKS")
    with VideoWriter(folder / "video.mp4", (32, 48)) as writer:
        for t in range(3):
            writer.write(np.full((32, 48, 3), 40 * t, np.uint8), Fraction(t, 24))
    for name in ("first_frame.png", "first.png"):
        write_mask(folder / name, np.pad(np.ones((12, 12), np.uint8), ((4, 16), (8, 28))))
    (folder / "CUTOUTS").mkdir()
    cutout = np.zeros((200, 200, 4), np.uint8)
    cutout[20:180, 30:170] = 200, 80, 20, 255
    Image.fromarray(cutout).save(folder / "CUTOUTS/thing.png")
    (folder / "PHOTOS/images").mkdir(parents=True)
    (folder / "PHOTOS/masks").mkdir()
    shutil.copy(folder / "DIR/JPEGImages/video0/00000.jpg", folder / "PHOTOS/images/00000.jpg")
    shutil.copy(folder / "DIR/Annotations/video0/00000.png", folder / "PHOTOS/masks/00000.png")
    for name in ("CUTOUTS", "PHOTOS"):
        (folder / "DIR" / name).symlink_to(folder / name)
    (folder / "runs/mine/checkpoints").mkdir(parents=True)
    shutil.copy(folder / "FILE", folder / "runs/mine/checkpoints/ema_5000.safetensors")
    return folder


TINY = {
    "total_steps": 1,
    "batch_size": 1,
    "crop": [33, 33],
    "short_edge": 64,
    "frames": 2,
    "workers": 0,
    "val_datasets": None,
    "accelerator": "cpu",
    "devices": 1,
}
VIDEOS = {"datasets": [{"kind": "video", "max_gap": 2}]}
SMALL = {
    "train": TINY,
    "demo": {"accelerator": "cpu", "max_long_edge": 64},
    "eval": {"threads": 1},
    "data.synthetic": {"rows": 1, "size": [65, 65]},
}


def readme(kind: str) -> str:
    return "\n".join(re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def whole_commands() -> list[list[str]]:
    lines = readme("bash").splitlines() + re.findall(r"`(python demo[^`]*)`", (ROOT / "README.md").read_text())
    found = [shlex.split(line.rpartition(" && ")[2], comments=True) for line in lines]
    whole = [words for words in found if words and words[0] == "python" and "..." not in words]
    return [words for words in whole if main_of(words) is not None]


def test_commands_of_the_readme(desk: Path, monkeypatch, capsys) -> None:
    """As they stand; only that there is less of everything, and what is continual has its own tests."""
    monkeypatch.chdir(desk)
    done = 0
    for words in whole_commands():
        main, rest = main_of(words)
        script = main.__module__
        small = SMALL.get(script, {})
        if script == "train":
            small = small | ({} if "--datasets" in rest else VIDEOS)
        if "continual" in " ".join(rest) or "--web" in rest:
            continue
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in small.items()}
        run(main, [*rest, *(f"--{name}={text}" for name, text in texts.items())])
        done += 1
    assert done >= 9
    for result in ("out/summary.json", "runs/aott/metrics.csv", "runs/mine/metrics.csv", "runs/synthetic/metrics.csv",
                   "sheet.png", "results/scores.json"):
        assert (desk / result).exists(), result


def test_python_of_the_readme(desk: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(desk)
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        code = code.replace('devices="0,1"', "**small").replace("runs/aott", "runs/python")
        names: dict = {"small": TINY | VIDEOS}
        exec(compile(code, "README.md", "exec"), names)
        if "prediction" in names:
            assert names["prediction"].object_ids in ([7], [1])
    assert names["scores"]["J&F-Mean"] >= 0
