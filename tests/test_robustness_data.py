"""Data sets, predictions, options and configuration that are not what they should be: one line and exit status 2."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from robustness import attempt, count, damaged

from data.benchmarks import given_mask, open_benchmark
from data.images import read_rgb
from data.labels import label_ids, read_label_png
from data.masks import write_mask
from data.training import open_training_data
from models import build_model
from utils.checkpoint import save_weights
from utils.errors import InputError
from utils.results import score_predictions

SIZE = (32, 48)


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A campaign of few cases always, and of many among the slow tests."""
    return pytest.mark.parametrize("cases", [short, pytest.param(long, marks=pytest.mark.slow)])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(build_model("aott", encoder="timm/test_efficientnet"), path)
    return path


def labels(t: int) -> np.ndarray:
    out = np.zeros(SIZE, np.uint8)
    out[4:16, 4 + t : 20 + t], out[18:30, 26 - t : 40 - t] = 1, 2
    return out


def write_video(images: Path, masks: Path, count: int = 4) -> None:
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    for t in range(count):
        picture = np.random.default_rng(t).integers(0, 60, (*SIZE, 3), np.uint8)
        picture[labels(t) == 1], picture[labels(t) == 2] = (250, 40, 40), (40, 40, 250)
        Image.fromarray(picture).save(images / f"{t:05}.png")
        write_mask(masks / f"{t:05}.png", labels(t))


def write_data(root: Path, layout: str) -> Path:
    """Two videos in the layout of a benchmark."""
    if layout == "davis2017":
        for name in ("cat", "dog"):
            write_video(root / "JPEGImages/480p" / name, root / "Annotations/480p" / name)
        (root / "ImageSets/2017").mkdir(parents=True)
        (root / "ImageSets/2017/val.txt").write_text("cat\ndog\n")
    elif layout == "folder":
        for name in ("cat", "dog"):
            write_video(root / "JPEGImages" / name, root / "Annotations" / name)
    else:
        for name in ("cat", "dog"):
            write_video(root / "valid/JPEGImages" / name, root / "valid/Annotations" / name)
        if layout.startswith("youtubevos"):
            objects = {str(i): {"category": "dog", "frames": [f"{t:05}" for t in range(4)]} for i in (1, 2)}
            meta = {"videos": {name: {"objects": objects} for name in ("cat", "dog")}}
            (root / "valid/meta.json").write_text(json.dumps(meta))
    return root


# --- folders ------------------------------------------------------------------------------------------------------

NAMES = ["..", "../cat", "/etc", "a/b", "cat\0", "dög", "", ".hidden", "x" * 300, "cat dog", "\udcff", "-h", "cat\\dog"]
JSON = [None, 0, -1.5, True, "text", [], {}, [[]], {"objects": None}, {"1": {"frames": [3]}}, {"frames": [[]]}, "../x"]


def spoil(root: Path, rng: np.random.Generator) -> str:
    """Change something in a folder; what it was."""
    paths = sorted(path for path in root.rglob("*") if not path.is_symlink())
    path = paths[rng.integers(len(paths))]
    name = str(path.relative_to(root))
    action = rng.integers(9)
    if path.suffix in (".txt", ".json") and action < 7:
        if path.suffix == ".json" and action < 4:
            content = json.loads(path.read_text())
            place, keys = content, []
            while isinstance(place, dict) and place and (not keys or rng.random() < 0.7):
                keys.append(sorted(place)[rng.integers(len(place))])
                parent, place = place, place[keys[-1]]
            parent[keys[-1]] = JSON[rng.integers(len(JSON))]
            path.write_text(json.dumps(content))
            return f"{name}: {content}"
        if action < 5:
            line = NAMES[rng.integers(len(NAMES))]
            path.write_bytes(path.read_bytes().replace(b"cat", line.encode("utf-8", "surrogateescape")))
            return f"{name}: cat is {line!r}"
        data = damaged(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{name}: {data!r}"
    if action == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return f"{name} is gone"
    if action == 1:
        other = path.with_name(("00007", "frame", "00001 (1)", "cat2", "00000.png")[rng.integers(5)] + path.suffix)
        if not other.exists():
            path.rename(other)
        return f"{name} is called {other.name}"
    if action == 2 and path.is_file():
        path.unlink()
        path.mkdir()
        return f"{name} is a folder"
    if action == 2:
        shutil.rmtree(path)
        path.write_bytes(b"text")
        return f"{name} is a file"
    if action == 3:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(path)
        return f"{name} is a link to itself"
    if action == 4 and path.is_file():
        path.unlink()
        os.mkfifo(path)
        return f"{name} is a pipe"
    if action == 5 and path.is_file() and path.suffix == ".png":
        shape = [(1, 1), (48, 32), (32, 47), (33, 48)][rng.integers(4)]
        Image.fromarray(np.full(shape, rng.integers(256), np.uint8)).save(path)
        return f"{name} has the shape {shape}"
    if action == 6 and path.is_file() and path.suffix == ".png":
        values = rng.integers(0, [2, 4, 256, 65536][rng.integers(4)], SIZE).astype(np.uint16)
        if "Annotations" in name or rng.random() < 0.5:
            write_mask(path, values)
        else:
            Image.fromarray(values).save(path)
        return f"{name} has values up to {values.max()}"
    if path.is_file():
        data = damaged(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{name} is damaged: {hash(data)}"
    for k in range(3):
        (path / [".DS_Store", "Thumbs.db", "._00000.png"][k]).write_bytes(b"\0\1")
    return f"{name} holds foreign files"


def read_everything(dataset: str, root: Path, with_frames: bool = True) -> int:
    """Frames and given masks of all videos, as an evaluation reads them."""
    benchmark = open_benchmark(dataset, root, with_frames=with_frames)
    frames = 0
    for video in benchmark.videos:
        known: set[int] = set()
        assert (root / video.name).resolve().parent == root.resolve()
        for path in video.frames:
            assert read_rgb(path).ndim == 3 or not with_frames
            mask = given_mask(video, path.stem, known)
            known |= set() if mask is None else label_ids(mask) - {0}
            frames += 1
    return frames


@sizes(30, 400)
@pytest.mark.parametrize("dataset", ["davis2017", "youtubevos2019", "mose", "folder"])
def test_spoilt_data_sets(tmp_path: Path, dataset: str, cases: int) -> None:
    rng = np.random.default_rng(0)
    write_data(tmp_path / "whole", dataset)
    for case in range(cases):
        root = tmp_path / str(case)
        shutil.copytree(tmp_path / "whole", root)
        what = [spoil(root, rng) for _ in range(rng.integers(1, 3))]
        frames = attempt(f"data set, {dataset}", what, lambda root=root: read_everything(dataset, root))
        assert frames is None or 1 <= frames <= 8, what
        shutil.rmtree(root)


@sizes(20, 200)
def test_spoilt_training_data(tmp_path: Path, cases: int) -> None:
    rng = np.random.default_rng(1)
    write_data(tmp_path / "whole", "folder")
    options = {"size": (33, 33), "short_edge": 40, "frames": 2, "min_pixels": 10, "max_broken": 2}

    def draw(root: Path) -> int:
        data = open_training_data([{"kind": "video", "max_gap": 1}], root, **options)
        samples = [data[i] for i in range(3)]
        return max(int(sample["labels"][sample["labels"] < 255].max()) for sample in samples)

    for case in range(cases):
        root = tmp_path / str(case)
        shutil.copytree(tmp_path / "whole", root)
        what = [spoil(root, rng) for _ in range(rng.integers(1, 3))]
        top = attempt("data set, training", what, lambda root=root: draw(root))
        assert top is None or 1 <= top <= 10, what
        shutil.rmtree(root)


@sizes(30, 400)
def test_spoilt_predictions(tmp_path: Path, cases: int) -> None:
    """A score of 1 for masks that are whole, another or none for others; no file of scores where there is none."""
    rng = np.random.default_rng(2)
    root = write_data(tmp_path / "data", "folder")
    benchmark = open_benchmark("folder", root, with_frames=False)
    shutil.copytree(root / "Annotations", tmp_path / "whole")
    for case in range(cases):
        masks, out = tmp_path / f"masks{case}", tmp_path / f"out{case}"
        shutil.copytree(tmp_path / "whole", masks)
        what = [spoil(masks, rng) for _ in range(rng.integers(1, 3))]
        scores = attempt("predictions", what, lambda m=masks, o=out: score_predictions(benchmark, m, o, "all"))
        assert (out / "scores.json").exists() == (scores is not None), what
        same = all(
            np.array_equal(read_label_png(masks / path.relative_to(tmp_path / "whole")), read_label_png(path))
            for path in (tmp_path / "whole").rglob("*.png")
        ) if scores else False
        assert scores is None or (scores["J-Mean"] == 1.0) == same, what
        for folder in (masks, out):
            shutil.rmtree(folder, ignore_errors=True)


def test_names_stay_inside_the_output_folder(tmp_path: Path) -> None:
    """Results go to `<output_dir>/Annotations/<video>`: no list and no meta.json may name a video that leads out."""
    for number, name in enumerate(("../../../escaped", "/tmp/escaped", "..", "a/../../escaped", "a\\..\\b", "cat\0")):
        for dataset in ("davis2017", "youtubevos2019"):
            root = write_data(tmp_path / f"{dataset}_{number}", dataset)
            for path in (root / "ImageSets/2017/val.txt", root / "valid/meta.json"):
                if path.exists():
                    replaced = json.dumps(name)[1:-1] if path.suffix == ".json" else name
                    path.write_text(path.read_text().replace("cat", replaced))
            with pytest.raises(InputError, match="is no name of a video"):
                open_benchmark(dataset, root)
            count("names that lead out of the output folder", (dataset, name), "refused")
