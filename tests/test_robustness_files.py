"""Files that are damaged, of another kind or made to do harm: read as they were meant, or refused with one line."""

import io
import pickle
import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from robustness import attempt, count, damaged
from safetensors.torch import save
from torch import nn

from data.images import read_rgb
from data.labels import read_label_png
from data.masks import Mask, read_mask, write_mask
from data.video import VideoWriter, open_frames
from models import build_model
from utils.checkpoint import describe_weights, load_encoder, load_model, load_weights, save_weights
from utils.errors import InputError


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


@sizes(40, 1000)
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


@sizes(40, 1000)
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


@sizes(10, 200)
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


def test_a_video_larger_than_the_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="16384 a side at most"):
        VideoWriter(tmp_path / "out.mp4", (2, 16386))
    assert not list(tmp_path.iterdir())


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


@sizes(50, 1000)
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


@sizes(8, 60)
def test_own_weights_are_whole_or_refused(tmp_path: Path, cases: int) -> None:
    """Our files carry a checksum of their values; damage to the header alone may still be harmless."""
    rng = np.random.default_rng(4)
    network = build_model("aott", encoder="timm/test_efficientnet")
    path = tmp_path / "own.safetensors"
    save_weights(network, path, kind="ema")
    whole = path.read_bytes()
    for _ in range(cases):
        data = damaged(whole, rng)
        path.write_bytes(data)
        report = attempt("weights, own", hash(data), partial(load_weights, network, path))
        assert report is None or report.share == 1
    for place in (-1, -1000, len(whole) // 2):  # in the values
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(InputError, match="do not match their checksum"):
            load_model(path)


NOTES = [
    {},
    {"model": "aott"},
    {"settings": "{}"},
    {"model": "aott", "settings": ""},
    {"model": "aott", "settings": "[]"},
    {"model": "aott", "settings": "null"},
    {"model": "aott", "settings": "3"},
    {"model": "aott", "settings": "[" * 5000},
    {"model": "", "settings": "{}"},
    {"model": "../aott", "settings": "{}"},
    {"model": "aott", "settings": '{"layers": 1000000000}'},
    {"model": "aott", "settings": '{"layers": -1}'},
    {"model": "aott", "settings": '{"layers": "3"}'},
    {"model": "aott", "settings": '{"layers": null}'},
    {"model": "aott", "settings": '{"layers": true}'},
    {"model": "aott", "settings": '{"layers": 1e400}'},
    {"model": "aott", "settings": '{"family": "os.system"}'},
    {"model": "aott", "settings": '{"family": []}'},
    {"model": "aott", "settings": '{"encoder": "os.system"}'},
    {"model": "aott", "settings": '{"encoder": "timm/hf_hub:some/where"}'},
    {"model": "aott", "settings": '{"encoder": "timm/../../x"}'},
    {"model": "aott", "settings": '{"encoder": {"class_path": "os.system"}}'},
    {"model": "aott", "settings": '{"align_corners": 0}'},
    {"model": "aott", "settings": '{"group_size": 0}'},
    {"model": "aott", "settings": '{"group_size": 1000000}'},
    {"model": "aott", "settings": '{"max_long_edge": 100000000}'},
    {"model": "aott", "settings": '{"max_long_edge": NaN}'},
    {"model": "aott", "settings": '{"memory_gap_test": 0}'},
    {"model": "aott", "settings": '{"no_such": 1}'},
    {"model": "aott", "settings": '{"name": "x"}', "crc32": "0"},
]


def test_notes_on_the_model(tmp_path: Path) -> None:
    """What a file says of its model builds none that takes a machine's memory, and imports nothing."""
    path = tmp_path / "w.safetensors"
    for notes in NOTES:
        path.write_bytes(save({"weight": torch.zeros(2)}, notes))
        assert attempt("notes in weights", notes, lambda: load_model(path)) is None


class Payload:
    """Code that an unpickling would run."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_no_pickle_runs(tmp_path: Path) -> None:
    """In every place of every kind of file that is handed in."""
    trace, path = tmp_path / "was_run", tmp_path / "file"
    payload, state = Payload(trace), small().state_dict()
    contents = {
        "alone": payload,
        "in a list": [payload],
        "as a key's value": state | {"weight": payload},
        "beside the weights": {"state_dict": state, "args": payload},
        "deep inside": {"state_dict": state, "a": {"b": [{"c": (payload,)}]}},
        "in a checkpoint": {"model": state, "optimizer": {}, "ema": payload, "step": 1},
    }
    for name, content in contents.items():
        writers = {
            "zip": lambda content: torch.save(content, path),
            "old": lambda content: torch.save(content, path, _use_new_zipfile_serialization=False),
            **{f"pickle {n}": lambda content, n=n: path.write_bytes(pickle.dumps(content, n)) for n in range(6)},
        }
        for kind, write in writers.items():
            write(content)
            for read in (
                lambda: load_weights(small(), path),
                lambda: load_model(path, "aott"),
                lambda: load_encoder(small(), path),
                lambda: describe_weights(path),
                lambda: read_rgb(path),
                lambda: read_mask(path),
                lambda: read_label_png(path),
                lambda: open_frames(path),
            ):
                assert attempt("pickles that run code", (name, kind), read) is None
    assert not trace.exists()
    pickle.loads(pickle.dumps(payload))
    assert trace.exists()  # it would have worked


def test_resuming_runs_no_pickle(tmp_path: Path, monkeypatch) -> None:
    """Also where PyTorch is told to trust every file."""
    from training_cases import run, write_videos

    trace = tmp_path / "was_run"
    videos = write_videos(tmp_path / "videos")
    for number, place in enumerate(("step", "optimizer", "extra")):
        path = tmp_path / f"step_{number}.ckpt"
        content = {"model": {}, "optimizer": {}, "ema": {}, "step": 1} | {place: Payload(trace)}
        torch.save(content, path)
        with pytest.raises(InputError, match="does not fit this run"):
            run(videos, tmp_path / "out", total_steps=2, resume=str(path))
        count("pickles that run code", ("resume", place), "refused")
    assert not trace.exists()


# --- bombs and strangers ------------------------------------------------------------------------------------------


def png(width: int, height: int, pixels: bytes, depth: int = 8, color: int = 0, extra: bytes = b"") -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """So many zeros, compressed: the same block again and again, without the checksum of all that nobody gets to."""
    packer, block = zlib.compressobj(9), bytes(2**20)
    first, again = (packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * (count // 2**20 - 1)


def bombs() -> dict[str, bytes]:
    """Small files that stand for gigabytes."""
    gigabytes = zeros(4 * 2**30)
    out = {
        "PNG of 60000 x 60000": png(60000, 60000, gigabytes),
        "PNG of 2^31 x 2^31": png(2**31 - 1, 2**31 - 1, gigabytes),
        "PNG of 2^26 x 1, 16 bit": png(2**26 + 1, 1, gigabytes, 16),
        "PNG whose pixels go on": png(8, 8, gigabytes),
        "PNG, one pixel high": png(2**30, 1, gigabytes),
        "PNG without a size": png(0, 0, gigabytes),
    }
    text = struct.pack(">I", len(gigabytes) + 3) + b"zTXt" + b"a\0\0" + gigabytes
    out["PNG with gigabytes of text"] = png(
        8, 8, zlib.compress(bytes(72)), extra=text + struct.pack(">I", zlib.crc32(text[4:]))
    )
    bmp = bytearray(encoded(Image.new("L", (4, 4)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 2**30, 2**30)
    out["BMP of 2^30 x 2^30"] = bytes(bmp)
    gif = bytearray(encoded(Image.new("L", (4, 4)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    out["GIF of 65535 x 65535"] = bytes(gif)
    jpeg = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg[place : place + 4] = struct.pack(">HH", 65500, 65500)
    out["JPEG of 65500 x 65500"] = bytes(jpeg)
    tiff = encoded(Image.new("L", (4, 4)), "TIFF")
    for tag in (256, 257):
        entry = max(tiff.find(struct.pack("<HH", tag, kind)) for kind in (3, 4))
        tiff = tiff[:entry] + struct.pack("<HHII", tag, 4, 1, 2**30) + tiff[entry + 12 :]
    out["TIFF of 2^30 x 2^30"] = tiff
    return out


HARMLESS = {"PNG whose pixels go on", "PNG with gigabytes of text"}
STRANGERS = {
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n",
    "PPM": b"P6 2 2 255\n" + bytes(12),
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "PDF": b"%PDF-1.4\n%%EOF",
    "HTML": b"<!doctype html><title>404</title>",
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    "playlist": b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "SDP": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    "zip": b"PK\x05\x06" + bytes(18),
    "empty": b"",
    "null": b"\0",
    "zeros": bytes(5000),
    "text": b"frame\n" * 100,
    "UTF-16": "frame".encode("utf-16"),
}


def test_bombs_and_strangers(tmp_path: Path) -> None:
    """Under the names of frames, masks, videos and weights: refused before memory is taken, and nothing is started."""
    for name, data in (bombs() | STRANGERS).items():
        assert len(data) < 2**23, name
        for suffix in (".png", ".mp4", ".pth"):
            path = tmp_path / f"file{suffix}"
            path.write_bytes(data)
            for read in (
                lambda path=path: read_rgb(path),
                lambda path=path: read_mask(path),
                lambda path=path: read_label_png(path),
                lambda path=path: list(open_frames(path)),
                lambda path=path: load_weights(small(), path),
            ):
                result = attempt("bombs and strangers", (name, suffix), read)
                if isinstance(result, Mask):
                    result = result.labels
                # Eight by eight pixels can be read whatever lies behind them.
                assert result is None or (name in HARMLESS and np.size(result) <= 192), (name, suffix)


def test_weights_that_unpack_to_gigabytes(tmp_path: Path) -> None:
    """A zip archive whose entries are compressed, which PyTorch would unpack."""
    torch.save({"weight": torch.zeros(4)}, tmp_path / "whole.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for entry in whole.infolist():
            if not entry.filename.endswith("data/0"):
                bomb.writestr(entry, whole.read(entry))
                continue
            packed = zipfile.ZipInfo(entry.filename)
            packed.compress_type = zipfile.ZIP_DEFLATED
            with bomb.open(packed, "w", force_zip64=True) as file:
                for _ in range(64):
                    file.write(bytes(2**20))
    assert (tmp_path / "bomb.pth").stat().st_size < 2**17
    assert attempt("bombs and strangers", "weights", lambda: load_weights(small(), tmp_path / "bomb.pth")) is None


def test_the_limit_of_pixels_can_be_raised(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(png(300, 200, zlib.compress(bytes(200 * 301))))
    monkeypatch.setattr("data.images.MAX_PIXELS", 59_999)
    monkeypatch.setattr("data.labels.MAX_PIXELS", 59_999)
    for read in (read_rgb, read_mask, read_label_png, open_frames):
        with pytest.raises(InputError, match="VOS_MAX_PIXELS raises it"):
            read(path)
    monkeypatch.setattr("data.images.MAX_PIXELS", 60_000)
    assert read_rgb(path).shape == (200, 300, 3)
    assert read_label_png(path).shape == (200, 300)
