"""Files that are damaged, of another kind or made to do harm: read as they were meant, or refused with one line."""

import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from robustness import attempt, damaged
from safetensors.torch import save
from torch import nn

from data.images import read_rgb
from data.labels import read_label_png
from data.masks import read_mask, write_mask
from data.video import VideoWriter, open_frames
from utils.checkpoint import load_weights


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A campaign of few cases always, and of many among the slow tests."""
    return pytest.mark.parametrize("cases", [short, pytest.param(long, marks=pytest.mark.slow)])


def squares() -> np.ndarray:
    labels = np.zeros((24, 32), np.uint8)
    labels[4:14, 3:12], labels[8:22, 18:30] = 1, 7
    return labels


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


# --- pictures -----------------------------------------------------------------------------------------------------


@sizes(60, 3000)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"])
def test_damaged_frames(tmp_path: Path, kind: str, cases: int) -> None:
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(24) * 4, np.arange(32) * 3).astype(np.uint8)
    whole = encoded(Image.fromarray(np.stack([smooth, smooth // 2, 255 - smooth], 2)), kind)
    path = tmp_path / "00000.png"
    path.write_bytes(whole)
    expected = read_rgb(path)
    for _ in range(cases):
        data = damaged(whole, rng)
        path.write_bytes(data)
        image = attempt(f"frame, {kind}", data, lambda: read_rgb(path))
        if image is not None:
            assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8
        if image is not None and kind == "PNG":  # the one format with a checksum
            assert np.array_equal(image, expected)


@sizes(60, 3000)
@pytest.mark.parametrize("kind", ["PNG", "PNG 16 bit", "PNG RGB", "PNG grey", "BMP", "GIF", "TIFF"])
def test_damaged_masks(tmp_path: Path, kind: str, cases: int) -> None:
    rng = np.random.default_rng(1)
    path, labels = tmp_path / "mask.png", squares().astype(np.uint16)
    if kind == "PNG":
        write_mask(path, labels)
    elif kind == "PNG 16 bit":
        labels[labels > 0] += 300
        write_mask(path, labels)
    else:
        image = Image.fromarray(squares())
        image = Image.fromarray(np.stack([squares() * 30] * 3, 2)) if kind == "PNG RGB" else image
        path.write_bytes(encoded(image, kind.split()[0]))
        labels = read_mask(path).labels
    whole = path.read_bytes()
    for _ in range(cases):
        data = damaged(whole, rng)
        path.write_bytes(data)
        mask = attempt(f"mask, {kind}", data, lambda: read_mask(path, size=(24, 32)))
        assert mask is None or mask.labels.shape == (24, 32)
        if mask is not None and "PNG" in kind:
            assert np.array_equal(mask.labels, labels)
        if "PNG" in kind and kind != "PNG RGB":
            truth = attempt(f"label map, {kind}", data, lambda: read_label_png(path))
            assert truth is None or np.array_equal(truth, labels)


@settings(max_examples=40)
@given(
    labels=arrays.arrays(
        np.uint16, arrays.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.sampled_from([0, 1, 2, 9, 254])
    ),
    mode=st.sampled_from(["P", "L", "I;16", "davis", "RGB"]),
)
def test_drawn_masks_keep_their_ids(tmp_path_factory, labels, mode) -> None:
    """Whatever the file: the ids that were drawn, for colours that have no ids 1..n in their order, or a refusal."""
    path = tmp_path_factory.mktemp("mask") / "mask.png"
    expected = labels
    if mode == "davis":
        write_mask(path, labels)
    elif mode == "RGB":
        tones = np.array([10, 60, 120, 250])
        ids = np.unique(labels[labels > 0])
        picture, expected = np.zeros((*labels.shape, 3), np.uint8), np.searchsorted(ids, labels) + (labels > 0)
        for number, tone in zip(ids, tones, strict=False):
            picture[labels == number] = tone, 3, 5
        Image.fromarray(picture).save(path)
    elif mode == "I;16":
        Image.fromarray(labels).save(path)
    else:
        image = Image.fromarray(labels.astype(np.uint8))
        if mode == "P":
            image.putpalette(bytes(range(256)) * 3)
        image.save(path)
    mask = attempt(f"drawn mask, {mode}", (labels.tolist(), mode), lambda: read_mask(path))
    assert mask is None or np.array_equal(mask.labels, expected)


# --- videos -------------------------------------------------------------------------------------------------------


@sizes(15, 600)
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "webm", "mov", "ts", "gif"])
def test_damaged_videos(tmp_path: Path, suffix: str, cases: int) -> None:
    """Frames of one size that the writer can write again, or a refusal."""
    import av

    rng = np.random.default_rng(2)
    path = tmp_path / f"clip.{suffix}"
    codec = {"avi": "mjpeg", "webm": "libvpx", "gif": "gif"}.get(suffix, "h264")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24)
        stream.height, stream.width = 32, 48
        stream.pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
        for t in range(6):
            picture = np.full((32, 48, 3), 40 + 20 * t, np.uint8)
            picture[4 : 4 + 2 * t + 8, 6:20] = 250, 30, 60
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    whole = path.read_bytes()

    def again() -> int:
        with open_frames(path) as source:
            with VideoWriter(tmp_path / "out.mp4", source.size, source.time_base, source.rate) as out:
                for frame in source:
                    out.write(frame.image, frame.time)
        return out.frames

    for _ in range(cases):
        data = damaged(whole, rng)
        path.write_bytes(data)
        frames = attempt(f"video, {suffix}", data, again)
        assert frames is None or 1 <= frames <= 24
        assert not list(tmp_path.glob(".*"))


# --- weights ------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def weight_files(folder: Path) -> dict[str, bytes]:
    state = small().state_dict()
    torch.save({"state_dict": state}, folder / "zip.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    (folder / "safe.safetensors").write_bytes(save(state))
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@sizes(80, 4000)
@pytest.mark.parametrize("name", ["zip.pth", "old.pth", "safe.safetensors"])
def test_damaged_weights(tmp_path: Path, name: str, cases: int) -> None:
    """The values that were saved, or a refusal; formats without a checksum may come with other values."""
    rng = np.random.default_rng(3)
    whole, expected = weight_files(tmp_path)[name], small().state_dict()
    for _ in range(cases):
        model, data = small(), damaged(whole, rng)
        (tmp_path / name).write_bytes(data)
        report = attempt(f"weights, {name}", data, partial(load_weights, model, tmp_path / name))
        if report is not None and name == "zip.pth":
            assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
