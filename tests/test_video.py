import json
import logging
import threading
import time
from contextlib import closing
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from data import images
from data.video import VideoWriter, open_frames, prefetch
from utils.errors import InputError


def picture(seed: int = 0, size: tuple[int, int] = (48, 64)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def smooth(size: tuple[int, int], shift: int = 0) -> np.ndarray:
    y, x = np.indices(size)
    return np.stack([x * 200 // size[1], y * 200 // size[0], np.full(size, 20 + shift)], axis=-1).astype(np.uint8)


def video_names(shared):
    return json.loads((shared / "data/videos/videos.json").read_text())


def test_every_shared_video_decodes_as_described_and_is_written_with_its_timing(shared, tmp_path):
    for name, facts in video_names(shared).items():
        if "error" in facts:
            continue
        with open_frames(shared / "data/videos" / name) as source:
            with VideoWriter(tmp_path / "out.mp4", source.size, source.time_base, source.rate) as writer:
                times, names, shapes = [], [], set()
                for frame in source:
                    writer.write(frame.image, frame.time)
                    times.append(frame.time)
                    names.append(frame.name)
                    shapes.add((frame.image.shape, frame.image.dtype))
        height, width = facts["height"], facts["width"]
        size = (width, height) if facts["rotation"] in (90, -90) else (height, width)
        assert source.size == size and shapes == {((*size, 3), np.dtype(np.uint8))}, name
        assert names == [f"{i:05d}" for i in range(facts["decoded_frames"])], name
        gaps = {round(1000 * (b - a)) for a, b in zip(times, times[1:], strict=False)}
        assert sorted(gaps) == facts["frame_gaps_ms"], name
        with open_frames(tmp_path / "out.mp4") as written:
            assert [frame.time for frame in written] == times, name
            assert written.size == (size[0] + size[0] % 2, size[1] + size[1] % 2), name


def test_rotated_videos_are_shown_upright(shared):
    folder = shared / "data/videos"
    plain = next(iter(open_frames(folder / "bbb_h264_bframes_gop.mp4"))).image
    clockwise = next(iter(open_frames(folder / "bbb_h264_rotate90.mp4"))).image
    assert np.array_equal(clockwise, np.rot90(plain, -1))
    upside_down = next(iter(open_frames(folder / "bbb_h264_rotate180.mp4"))).image
    assert np.array_equal(upside_down, np.rot90(plain, 2))


def test_a_truncated_video_gives_its_frames_and_one_warning(shared, caplog):
    path = shared / "data/videos/bad_truncated.mkv"
    with caplog.at_level(logging.WARNING), open_frames(path) as source:
        assert sum(1 for _ in source) == 17
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: the video is cut off at 1.40 of 3.26 s; 17 frames decoded"


def test_whole_videos_give_no_warning(shared, caplog):
    with caplog.at_level(logging.WARNING):
        for name in ("bbb_h264_vfr.mkv", "bbb_h264_720p.mp4", "tree_cinepak_320x240.avi", "bbb_vp8.webm"):
            for _ in open_frames(shared / "data/videos" / name):
                pass
    assert not caplog.records


def test_damaged_videos_decode_or_are_refused(shared, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("bbb_h264_bframes_gop.mp4", "bbb_h264_vfr.mkv", "bbb_vp9_odd_241x135.webm", "bbb_mpeg4_asp.avi"):
        data = (shared / "data/videos" / name).read_bytes()
        for case in range(6):
            damaged = bytearray(data)
            for position in rng.integers(0, len(data) if case % 2 else 2000, 8):
                damaged[position] ^= 1 << rng.integers(8)
            path = tmp_path / name
            path.write_bytes(damaged[: rng.integers(len(data))] if case % 3 == 0 else damaged)
            try:
                assert sum(1 for _ in open_frames(path)) > 0
            except InputError as error:
                assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


def test_what_is_no_video_is_named(shared, tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "playlist.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nhttp://localhost:1/a.ts\n#EXT-X-ENDLIST\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "strange:name%03d.mp4").write_text("text")
    paths = [shared / "data/videos/bad_not_a_video.mp4", tmp_path / "missing.mp4", *sorted(tmp_path.iterdir())]
    for path in paths:
        with pytest.raises(InputError) as caught:
            open_frames(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_name_that_looks_like_a_protocol_or_pattern_is_a_file(tmp_path):
    path = tmp_path / "http:clip%03d.mp4"
    with VideoWriter(path, (16, 16)) as writer:
        writer.write(smooth((16, 16)), Fraction(0))
    with open_frames(path) as source:
        assert len(list(source)) == 1


def test_too_large_a_video_is_refused_before_it_is_decoded(shared, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(InputError, match="480x270 pixels are more than the limit"):
        open_frames(shared / "data/videos/bbb_h264_1frame.mp4")


def test_sources_can_be_read_again_and_left_early(shared):
    with open_frames(shared / "data/videos/bbb_vp8.webm") as source:
        first = next(iter(source))
        again = list(islice(source, 3))
    assert np.array_equal(first.image, again[0].image)
    assert source.kind == "video" and source.names is None


def test_folders_are_read_in_natural_order_in_every_format(tmp_path, caplog):
    image = picture()
    names = ["2.jpg", "10.JPEG", "1.PNG", "3.bmp", "4.webp", "5.tif", "11.TIFF"]
    for name in names:
        Image.fromarray(image).save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    for name in (".DS_Store", "._1.PNG", "readme.txt"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    with open_frames(tmp_path, fps=10) as source:
        frames = list(source)
    assert source.names == ["1", "2", "3", "4", "5", "10", "11"] == [frame.name for frame in frames]
    assert (source.kind, source.size, source.length, source.ignored) == ("folder", (48, 64), 7, 4)
    assert [frame.time for frame in frames] == [Fraction(i, 10) for i in range(7)]
    for frame in frames:
        assert frame.image.dtype == np.uint8 and frame.image.shape == (48, 64, 3)
        assert frame.name in ("2", "10") or np.array_equal(frame.image, image)


def test_jpeg_frames_equal_pil(tmp_path):
    Image.fromarray(smooth((48, 65))).save(tmp_path / "0.jpg", quality=90)
    (frame,) = open_frames(tmp_path)
    assert np.array_equal(frame.image, np.asarray(Image.open(tmp_path / "0.jpg")))


def test_frames_of_any_kind_become_rgb(tmp_path):
    grey = picture()[..., 0]
    files = {
        "0.png": Image.fromarray(grey),
        "1.png": Image.fromarray(grey.astype(np.uint16) * 256 + 77),
        "2.png": Image.fromarray(np.dstack([grey, grey, grey, 255 - grey])),
        "3.png": Image.fromarray(np.dstack([grey, grey])),
        "4.png": Image.fromarray(grey).convert("P"),
    }
    for name, image in files.items():
        image.save(tmp_path / name)
    for frame in open_frames(tmp_path):
        assert np.array_equal(frame.image, np.dstack([grey] * 3)), frame.name


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_orientation_is_respected(tmp_path, suffix):
    image = smooth((48, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.fromarray(image).save(tmp_path / f"0.{suffix}", exif=exif, **({"quality": 95} if suffix == "jpg" else {}))
    (frame,) = open_frames(tmp_path)
    assert frame.image.shape == (64, 48, 3)
    assert np.abs(frame.image.astype(int) - np.rot90(image, -1)).mean() < 3


def test_unusable_frame_folders_name_the_file(tmp_path):
    with pytest.raises(InputError, match="holds no image"):
        open_frames(tmp_path)
    Image.fromarray(picture()).save(tmp_path / "0.png")
    Image.fromarray(picture(size=(48, 66))).save(tmp_path / "1.png")
    with pytest.raises(InputError, match=r"1\.png: is 66x48 pixels, the first frame is 64x48"):
        list(open_frames(tmp_path))
    Image.fromarray(picture()).save(tmp_path / "1.jpg", quality=90)
    with pytest.raises(InputError, match=r"1\.png: 1\.jpg has the same stem"):
        open_frames(tmp_path)
    (tmp_path / "1.png").unlink()
    data = (tmp_path / "1.jpg").read_bytes()
    (tmp_path / "1.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"1\.jpg: the image cannot be decoded"):
        list(open_frames(tmp_path))
    for fps in (0, -1, float("nan")):
        with pytest.raises(InputError, match="fps"):
            open_frames(tmp_path, fps=fps)


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (33, 50), (50, 33)])
def test_written_video_is_playable_and_looks_like_its_input(tmp_path, size):
    import av

    path = tmp_path / "out.mp4"
    with VideoWriter(path, size) as writer:
        for i in range(5):
            writer.write(smooth(size, 10 * i), Fraction(i, 24))
        assert not path.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out.mp4"]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.frames == 5
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # plays while it loads
    for i, frame in enumerate(open_frames(path)):
        shown = frame.image[: size[0], : size[1]]
        assert np.abs(shown.astype(int) - smooth(size, 10 * i)).mean() < 6
        if size[0] % 2:
            assert np.abs(frame.image[-1].astype(int) - frame.image[-2]).mean() < 4


def test_writing_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), VideoWriter(tmp_path / "out.mp4", (16, 16)) as writer:
        writer.write(smooth((16, 16)), Fraction(0))
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="a frame of"), VideoWriter(tmp_path / "out.mp4", (16, 16)) as writer:
        writer.write(smooth((16, 18)), Fraction(0))
    with VideoWriter(tmp_path / "out.mp4", (16, 16)):
        pass  # no frame, no file
    assert not list(tmp_path.iterdir())


def test_times_that_do_not_rise_are_moved_on(tmp_path):
    with VideoWriter(tmp_path / "out.mp4", (16, 16)) as writer:
        for tick in (0, 1, 1, 0, 5):
            writer.write(smooth((16, 16)), Fraction(tick, 24))
    assert [24 * frame.time for frame in open_frames(tmp_path / "out.mp4")] == [0, 1, 2, 3, 5]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_keeps_order_and_passes_exceptions():
    def items():
        yield from range(5)
        raise InputError("frame 5 is bad")

    received = []
    with pytest.raises(InputError, match="frame 5 is bad"):
        for item in prefetch(items(), depth=2):
            received.append(item)
    assert received == [0, 1, 2, 3, 4]
    assert list(prefetch(range(100), depth=1)) == list(range(100))
    assert not prefetch_threads()


def test_prefetch_runs_ahead_by_its_depth_only():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    with closing(prefetch(items(), depth=3)) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 5  # one taken, three waiting, one in the thread's hands
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_prefetch_closed_early_leaves_no_thread_and_closes_its_source(depth):
    closed = []

    def items():
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    with closing(prefetch(items(), depth)) as ahead:
        assert list(islice(ahead, 3)) == [0, 1, 2]
    assert not prefetch_threads() and closed == [True]
