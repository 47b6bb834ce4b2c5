import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from data.reader import FrameReader
from data.video import open_frames
from utils.errors import InputError

ORDER = [0, 17, 16, 3, 29, 28, 4, 5, 6, 20, 0, 29]


def encode(
    path: Path, codec: str, count: int = 30, size=(48, 64), rate: Fraction = Fraction(24), **options: str
) -> Path:
    """A video whose frames all differ."""
    random = np.random.default_rng(1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.options = options
        for i in range(count):
            image = np.full((*size, 3), 8 * i % 256, np.uint8)
            image[:8, :8] = random.integers(0, 255, (8, 8, 3))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("long.mp4", "h264", {"g": "300"}),
        ("groups.mp4", "h264", {"g": "7", "bf": "2"}),
        ("open.ts", "h264", {"g": "7", "bf": "2", "x264-params": "open-gop=1"}),
        ("intra.avi", "mjpeg", {}),
        ("times.avi", "mpeg4", {"g": "7", "bf": "2"}),
        ("web.webm", "libvpx-vp9", {"g": "8", "deadline": "realtime", "cpu-used": "8"}),
        ("film.mkv", "mpeg4", {"g": "10"}),
    ],
)
def test_any_frame_is_the_one_that_comes_in_its_turn(tmp_path, name, codec, options):
    path = encode(tmp_path / name, codec, **options)
    frames = list(open_frames(path))
    reader = FrameReader(path)
    assert reader.length == len(frames) == 30 and reader.size == (48, 64)
    twin = reader.twin()
    for i in ORDER:
        frame = reader.read(i)
        assert np.array_equal(frame.image, frames[i].image), i
        assert (frame.name, frame.time) == (frames[i].name, frames[i].time)
    for i in range(29, -1, -1):
        assert np.array_equal(twin.read(i).image, frames[i].image), i
    with pytest.raises(InputError, match="0 to 29"):
        reader.read(30)
    reader.close()
    assert np.array_equal(reader.read(9).image, frames[9].image)  # opens again


def test_a_folder_is_read_in_natural_order(tmp_path):
    for i in (2, 10, 1):
        Image.new("RGB", (8, 6), (i, 0, 0)).save(tmp_path / f"{i}.png")
    reader = FrameReader(tmp_path, fps=10)
    assert [reader.read(i).image[0, 0, 0] for i in range(3)] == [1, 2, 10]
    assert (reader.read(2).name, reader.read(2).time, reader.size) == ("10", Fraction(1, 5), (6, 8))


def test_an_hour_does_not_lie_in_memory(tmp_path):
    path = encode(tmp_path / "hour.mp4", "mpeg4", count=1800, size=(96, 128), rate=Fraction(1, 2), g="60")
    tracemalloc.start()
    reader = FrameReader(path)
    for i in (1799, 900, 5, 1500, 1499, 1498):
        assert abs(int(reader.read(i).image[90, 100, 0]) - 8 * i % 256) < 30
    assert reader.time(1799) == 3598
    assert tracemalloc.get_traced_memory()[1] < 6 * 2**20  # all frames: 66 MB
    tracemalloc.stop()


def test_a_damaged_video_shows_what_it_has(tmp_path):
    data = encode(tmp_path / "a.ts", "mpeg2video", g="10").read_bytes()
    (tmp_path / "cut.ts").write_bytes(data[: len(data) * 2 // 3])
    reader = FrameReader(tmp_path / "cut.ts")
    assert 10 < reader.length < 30
    assert reader.read(reader.length - 1).image.shape == (48, 64, 3)
    for broken in (b"", b"no video", data[:100]):
        (tmp_path / "broken.mp4").write_bytes(broken)
        with pytest.raises(InputError, match="broken.mp4"):
            FrameReader(tmp_path / "broken.mp4")
    with pytest.raises(InputError, match="not a readable video"):
        FrameReader(tmp_path / "a.ts", formats="mov,matroska")
