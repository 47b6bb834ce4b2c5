import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import demo
from data.masks import palette, read_mask, write_mask
from data.video import FrameSource, VideoWriter, open_frames
from utils.cli import run

ROOT = Path(__file__).resolve().parents[1]
SIZE = (64, 96)
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Frames this small gain nothing from threads, and lose much where other work shares the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    from models import build_model
    from utils.checkpoint import save_weights

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "aott.safetensors"
    save_weights(build_model("aott"), path)
    return path


def frames(count: int, size=SIZE) -> list[np.ndarray]:
    """Rectangles that move two pixels a frame over noise."""
    background = np.random.default_rng(0).integers(0, 90, (*size, 3), np.uint8)
    pictures = []
    for i in range(count):
        picture = background.copy()
        for k, color in enumerate([(250, 60, 60), (60, 250, 60), (60, 60, 250)]):
            picture[8 + 18 * k :, 4 + 2 * i :][:12, :16] = color
        pictures.append(picture)
    return pictures


def labels(ids, size=SIZE) -> np.ndarray:
    out = np.zeros(size, np.int32)
    for k, number in enumerate(ids):
        out[8 + 18 * k :, 4:][:12, :16] = number
    return out


def small_objects(count: int) -> np.ndarray:
    out = np.zeros(SIZE, np.int32)
    for i in range(count):
        y, x = divmod(i, 5)
        out[4 + 16 * y :, 4 + 16 * x :][:8, :8] = i + 1
    return out


@pytest.fixture
def clip(tmp_path) -> Path:
    """Eight frames as a folder."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for i, picture in enumerate(frames(8)):
        Image.fromarray(picture).save(folder / f"{i}.png")
    return folder


def first_mask(tmp_path, ids=(1, 2)) -> Path:
    write_mask(tmp_path / "first.png", labels(ids))
    return tmp_path / "first.png"


def track(weights, source, mask, out, *options) -> dict:
    run(demo.main, arguments(weights, source, mask, out, *options))
    return json.loads((out / "summary.json").read_text())


def arguments(weights, source, mask, out, *options) -> list[str]:
    given = ["--input", source, "--mask", mask, "--checkpoint", weights, "--output_dir", out, "--accelerator", "cpu"]
    return [str(word) for word in [*given, *options]]


def results(out: Path) -> dict[str, np.ndarray]:
    return {path.stem: read_mask(path).labels for path in sorted((out / "masks").iterdir(), key=lambda p: int(p.stem))}


def refused(capsys, *words: object) -> str:
    """The one line of a run that ends with exit status 2."""
    with pytest.raises(SystemExit) as caught:
        run(demo.main, [str(word) for word in words])
    assert caught.value.code == 2
    err = capsys.readouterr().err.splitlines()
    (line,) = [line for line in err if line and "frames/s" not in line]
    assert line.startswith("error: ")
    return line


def test_the_script_tracks_a_video_and_keeps_its_timing(tmp_path, weights):
    times = [Fraction(tick, 1000) for tick in (40, 73, 93, 213, 463, 530, 570, 600)]
    with VideoWriter(tmp_path / "clip.mp4", (63, 95), Fraction(1, 1000)) as writer:
        for picture, moment in zip(frames(8, (63, 95)), times, strict=True):
            writer.write(picture, moment)
    write_mask(tmp_path / "first.png", labels((3, 7, 200), (64, 96)))  # the odd size was padded
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "demo.py"]
    command += arguments(weights, tmp_path / "clip.mp4", tmp_path / "first.png", out)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=ONE_THREAD)
    assert "8/8" in done.stderr and "frames/s" in done.stderr and "objects=3" in done.stderr
    assert "object 3 (192 px), object 7 (192 px), object 200 (192 px)" in done.stdout

    masks = results(out)
    assert list(masks) == [f"{i:05d}" for i in range(8)]
    assert np.array_equal(masks["00000"], labels((3, 7, 200), (64, 96)))
    assert all(set(np.unique(mask)) <= {0, 3, 7, 200} for mask in masks.values())
    assert Image.open(out / "masks/00000.png").getpalette() == palette()
    with open_frames(out / "overlay.mp4") as overlay:
        assert [frame.time for frame in overlay] == times

    assert sorted(path.name for path in out.iterdir()) == ["masks", "overlay.mp4", "summary.json"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["frames"] == 8 and summary["size"] == [64, 96] and summary["object_ids"] == [3, 7, 200]
    assert summary["fps_model"] > summary["fps_end_to_end"] > 0
    assert summary["device"].startswith("cpu") and summary["model"] == "aott"
    assert summary["weights"]["file"] == "aott.safetensors" and summary["colors"] is None


def test_frames_of_a_folder_keep_their_names_and_get_a_constant_rate(tmp_path, clip, weights):
    (clip / "10.JPG").write_bytes(b"")
    Image.fromarray(frames(8)[7]).save(clip / "10.JPG")
    (clip / "notes.txt").touch()
    summary = track(weights, clip, first_mask(tmp_path), tmp_path / "out", "--fps", "12.5")
    assert list(results(tmp_path / "out")) == [*"01234567", "10"] and summary["frames"] == 9
    times = [frame.time for frame in open_frames(tmp_path / "out/overlay.mp4")]
    assert times == [Fraction(2 * i, 25) for i in range(9)]


def test_one_frame_is_enough(tmp_path, clip, weights):
    summary = track(weights, clip / "0.png", first_mask(tmp_path), tmp_path / "out")
    assert summary["frames"] == 1
    assert np.array_equal(results(tmp_path / "out")["0"], labels((1, 2)))


def test_grey_0_255_is_the_object_255(tmp_path, clip, weights):
    Image.fromarray((labels((1,)) * 255).astype(np.uint8)).save(tmp_path / "first.png")
    assert track(weights, clip, tmp_path / "first.png", tmp_path / "out")["object_ids"] == [255]
    masks = results(tmp_path / "out")
    assert np.array_equal(masks["0"], labels((255,)))
    assert all(set(np.unique(mask)) <= {0, 255} for mask in masks.values())
    assert Image.open(tmp_path / "out/masks/1.png").mode == "P"


def test_colours_are_numbered_and_reported_over_all_masks(tmp_path, clip, weights):
    table = np.array([(0, 0, 0), (250, 0, 0), (0, 0, 250)], np.uint8)
    masks = tmp_path / "masks"
    masks.mkdir()
    Image.fromarray(table[labels((1,))]).save(masks / "0.png")
    Image.fromarray(table[labels((1, 2))]).save(masks / "4.png")
    summary = track(weights, clip, masks, tmp_path / "out")
    assert summary["colors"] == {"1": [250, 0, 0], "2": [0, 0, 250]} and summary["object_ids"] == [1, 2]
    assert np.array_equal(results(tmp_path / "out")["4"], labels((1, 2)))


def test_soft_masks_are_refused_or_snapped_with_the_count(tmp_path, clip, weights, capsys):
    Image.fromarray((labels((1, 1)) * 255).astype(np.uint8)).resize((384, 256)).resize(
        (96, 64), Image.Resampling.LANCZOS
    ).save(tmp_path / "soft.png")
    line = refused(capsys, *arguments(weights, clip, tmp_path / "soft.png", tmp_path / "out"))
    assert "soft.png: " in line and "distinct values" in line and not (tmp_path / "out").exists()
    summary = track(weights, clip, tmp_path / "soft.png", tmp_path / "out", "--snap_colors", "true")
    assert summary["object_ids"] == [255] and summary["changed_mask_pixels"] > 0


@pytest.mark.parametrize("count", [10, 11, 13])
def test_more_objects_than_one_batch_holds(tmp_path, clip, weights, count):
    write_mask(tmp_path / "first.png", small_objects(count))
    summary = track(weights, clip, tmp_path / "first.png", tmp_path / "out")
    assert summary["object_ids"] == list(range(1, count + 1))
    masks = results(tmp_path / "out")
    assert np.array_equal(masks["0"], small_objects(count))
    assert max(mask.max() for mask in masks.values()) <= count


def test_an_object_may_appear_later(tmp_path, clip, weights):
    track(weights, clip, first_mask(tmp_path), tmp_path / "without")
    masks = tmp_path / "masks"
    masks.mkdir()
    write_mask(masks / "0.png", labels((1, 2)))
    later = labels((0, 0, 5))
    write_mask(masks / "4.png", later)
    summary = track(weights, clip, masks, tmp_path / "out")
    assert summary["object_ids"] == [1, 2, 5]
    with_it, without = results(tmp_path / "out"), results(tmp_path / "without")
    assert all(np.array_equal(with_it[name], without[name]) for name in "0123")
    assert np.array_equal(with_it["4"] == 5, later == 5)


def test_a_mask_of_a_frame_behind_the_end_is_reported(tmp_path, weights, caplog):
    with VideoWriter(tmp_path / "clip.mp4", SIZE) as writer:
        for i, picture in enumerate(frames(3)):
            writer.write(picture, Fraction(i, 24))
    masks = tmp_path / "masks"
    masks.mkdir()
    write_mask(masks / "00001.png", labels((1,)))
    write_mask(masks / "00003.png", labels((2,)))
    summary = track(weights, tmp_path / "clip.mp4", masks, tmp_path / "out")
    assert summary["object_ids"] == [1]
    assert "1 masks are of frames that the video does not have, from 00003 on" in caplog.text
    assert not results(tmp_path / "out")["00000"].any()


def test_a_new_run_replaces_the_results_of_an_earlier_one(tmp_path, clip, weights):
    out = tmp_path / "out"
    track(weights, clip, first_mask(tmp_path), out)
    (out / "masks/notes.txt").write_text("mine")
    track(weights, clip / "3.png", first_mask(tmp_path), out)
    assert sorted(path.name for path in (out / "masks").iterdir()) == ["3.png", "notes.txt"]
    assert sum(1 for _ in open_frames(out / "overlay.mp4")) == 1


def test_files_that_the_script_did_not_make_are_not_overwritten(tmp_path, clip, weights, capsys):
    mask = first_mask(tmp_path)
    out = tmp_path / "out"
    (out / "masks").mkdir(parents=True)
    write_mask(out / "masks/0.png", labels((1,)))
    assert "not results of this script" in refused(capsys, *arguments(weights, clip, mask, out))
    assert "is an input" in refused(capsys, *arguments(weights, clip, out / "masks/0.png", out))
    assert np.array_equal(read_mask(out / "masks/0.png").labels, labels((1,)))


def test_a_bad_mask_midway_ends_the_run_without_a_summary(tmp_path, clip, weights, capsys):
    masks = tmp_path / "masks"
    masks.mkdir()
    write_mask(masks / "0.png", labels((1,)))
    write_mask(masks / "6.png", labels((1,), (64, 98)))
    out = tmp_path / "out"
    line = refused(capsys, *arguments(weights, clip, masks, out))
    assert f"{masks / '6.png'}: the mask is 98x64 pixels, the frames are 96x64" in line
    assert sorted(path.name for path in out.iterdir()) == ["masks", "unfinished.txt"]
    assert np.array_equal(results(out)["0"], labels((1,)))


def test_wrong_use_is_one_line_that_names_the_option(tmp_path, clip, weights, capsys):
    mask = first_mask(tmp_path)
    out = tmp_path / "out"
    empty = tmp_path / "empty.png"
    write_mask(empty, np.zeros(SIZE, int))
    stray = tmp_path / "stray"
    stray.mkdir()
    write_mask(stray / "99.png", labels((1,)))
    cases = {
        "--mask is missing": ["--input", clip],
        "--model aott: pass its weights": ["--input", clip, "--mask", mask, "--model", "aott"],
        "every pixel is background": arguments(weights, clip, empty, out),
        "99.png: no frame of that name": arguments(weights, clip, stray, out),
        "missing.mp4: no such file": arguments(weights, tmp_path / "missing.mp4", mask, out),
        "--devices 2: one video": arguments(weights, clip, mask, out, "--devices", 2),
        "long_term_gap is -1": arguments(weights, clip, mask, out, "--long_term_gap", -1),
        "fps 0": arguments(weights, clip, mask, out, "--fps", 0),
        "cannot be written": arguments(weights, clip, mask, mask / "out"),
        "missing.safetensors: no such file": arguments(tmp_path / "missing.safetensors", clip, mask, out),
    }
    for expected, words in cases.items():
        assert expected in refused(capsys, *words)
        assert not out.exists()


def test_without_the_bundled_files_the_line_says_what_to_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "ASSETS", tmp_path)
    assert "clip.mp4: this checkout lacks the bundled file; pass --input and --mask" in refused(capsys)


def test_an_interrupt_keeps_what_is_done_and_does_not_look_complete(tmp_path, weights):
    clip = tmp_path / "clip"
    clip.mkdir()
    picture = Image.fromarray(frames(1)[0])
    for i in range(3000):
        picture.save(clip / f"{i}.bmp")
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "demo.py", *arguments(weights, clip, first_mask(tmp_path), out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ONE_THREAD)
    deadline = time.monotonic() + 60
    while not (out / "masks/3.png").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    done = len(list((out / "masks").iterdir()))
    assert 4 <= done < 3000
    assert f"interrupted: {out} keeps the results of the first {done} frames" in stdout + stderr
    assert "Traceback" not in stderr
    assert sorted(path.name for path in out.iterdir()) == ["masks", "overlay_part.mp4", "unfinished.txt"]
    assert sum(1 for _ in open_frames(out / "overlay_part.mp4")) == done
    # The unfinished run is recognised, and a new one takes its place.
    assert track(weights, clip / "0.bmp", first_mask(tmp_path), out)["frames"] == 1
    assert not (out / "overlay_part.mp4").exists()


class Endless(FrameSource):
    """Frames made on the fly, which notes how far reading is ahead of writing."""

    def __init__(self, out: Path, count: int):
        super().__init__()
        self.size, self.length, self.time_base, self.rate = SIZE, None, Fraction(1, 24), Fraction(24)
        self.out, self.count, self.ahead = out, count, []

    def _frames(self):
        from data.video import Frame

        picture = frames(1)[0]
        for i in range(self.count):
            self.ahead.append(i - len(list((self.out / "masks").glob("*.png"))))
            yield Frame(picture, f"{i:05d}", Fraction(i, 24))


def test_results_appear_while_the_video_is_read(tmp_path, weights):
    from models import Tracker
    from utils.checkpoint import load_model
    from utils.fabric import make_fabric

    (tmp_path / "masks").mkdir()
    source = Endless(tmp_path, 40)
    tracker = Tracker(load_model(weights), long_term_gap=2, max_memory_frames=3)
    summary = demo.track_video(make_fabric("cpu", 1), tracker, source, {"00000": first_mask(tmp_path)}, tmp_path)
    assert summary["frames"] == 40 and tracker.memory_frames <= 4
    assert max(source.ahead) <= 2 * demo.AHEAD + 4
