"""Any frame of a video or folder by its number, decoded when asked for; an hour of video costs its list of times."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from fractions import Fraction
from pathlib import Path
from threading import Lock

import numpy as np

from data.images import IMAGE_SUFFIXES, read_rgb
from data.video import Frame, _Damage, _display_matrix, _Folder, _open_stream, _same_size
from utils.errors import InputError

CACHE_BYTES = 128 * 2**20  # of decoded frames; makes going backwards through a video cheap
CACHE_FRAMES = 48
NEAR = 24  # so many frames are rather decoded than jumped over


class FrameReader:
    """Random access to the frames of a video file or a folder of images. Safe to use from several threads.

    A video is read once without decoding, for the times of its frames; the number of a frame is its place in time.
    A frame that cannot be decoded shows the one before it.

    Args:
        path: video file or folder of images.
        fps: frames per second of a folder.
        formats: comma-separated FFmpeg demuxers that may open the file, None: all.

    Attributes:
        path, size, length, rate, time_base: as those of `data.video.FrameSource`; length is always known.
        names: of all frames, None for a video.

    Raises:
        InputError: as `data.video.open_frames`; `read` raises it for a frame that is damaged or of another size.
    """

    def __init__(self, path: str | Path, fps: float = 24, formats: str | None = None):
        self.path = Path(path)
        self._lock = Lock()
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._stack = ExitStack()
        self._frames: Iterator[tuple[int, np.ndarray]] | None = None
        self._next = 0
        if not self.path.exists():
            raise InputError(f"{path}: no such file or folder; give a video or a folder of frames")
        if self.path.is_dir() or self.path.suffix.lower() in IMAGE_SUFFIXES:
            folder = _Folder(self.path, fps)
            self._files, self.names, self.length = folder._files, folder.names, folder.length
            self.rate, self.time_base, self.size = folder.rate, folder.time_base, folder.size
            self._times = None
            return
        self.names = self._files = None
        self._formats = formats
        self._index()

    def read(self, number: int) -> Frame:
        """Frame `number`, 0 being the first."""
        if not 0 <= number < self.length:
            raise InputError(f"frame {number}: the video has the frames 0 to {self.length - 1}")
        with self._lock:
            if self._files:
                image = read_rgb(self._files[number])
                _same_size(self._files[number], image, self.size)
                return Frame(image, self.names[number], number * self.time_base)
            return Frame(self._image(number), f"{number:05d}", self.time(number))

    def name(self, number: int) -> str:
        """The name of a frame, without reading it."""
        return self.names[number] if self.names else f"{number:05d}"

    def time(self, number: int) -> Fraction:
        """When a frame is shown, in seconds."""
        ticks = number if self._times is None else int(self._times[number])
        return (ticks + (0 if self._times is None else self._shift)) * self.time_base

    def twin(self) -> "FrameReader":
        """A reader of the same frames with a place of its own, without reading the file's times again."""
        other = copy(self)
        other._lock, other._cache, other._stack = Lock(), OrderedDict(), ExitStack()
        other._frames, other._next = None, 0
        return other

    def close(self) -> None:
        """Close the video file."""
        with self._lock:
            self._frames = None
            self._stack.close()
            self._cache.clear()

    def _open(self):
        self._frames = None
        self._stack.close()
        container, stream = self._stack.enter_context(_open_stream(self.path, self._formats))
        return container, stream

    def _index(self) -> None:
        """Times of all frames, which of them can be jumped to, and the first frame, which shows that it is a video."""
        import av

        container, stream = self._open()
        times, keys = [], []
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:  # a file that is cut off
                break
            if packet is None:
                break
            if packet.size and not packet.is_discard:
                times.append(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        self.rate = stream.average_rate or stream.guessed_rate or Fraction(24)
        self.time_base = stream.time_base
        # Without times, or with one time for two frames, frames are counted from the start of the file.
        self._counted = None in times or len(set(times)) < len(times)
        if self._counted:
            step = max(1, round(1 / self.rate / self.time_base))
            times, keys = [i * step for i in range(len(times))], []
        self._times = np.array(sorted(times), np.int64)
        self._keys = np.array(sorted(keys), np.int64)
        self.length = len(times)
        if not times:
            raise InputError(f"{self.path}: not one frame can be decoded; give a whole video")
        first = int(self._times[0])
        self._shift = -first if container.format.name == "mpegts" else max(0, -first)
        container, stream = self._open()
        frame = next(_Damage(container, stream).decode(), None)
        if frame is None:
            raise InputError(f"{self.path}: not one frame can be decoded; give a whole video")
        self._turn = _display_matrix(frame)
        self.size = self._turn(frame.to_ndarray(format="rgb24")).shape[:2]

    def _image(self, number: int) -> np.ndarray:
        if number in self._cache:
            return self._cache[number]
        if self._frames is None or not self._next <= number <= self._ahead(number):
            self._seek(number)
        image = self._decode_to(number)
        if image is None:  # the container jumped behind it
            self._seek(0)
            image = self._decode_to(number)
        if image is None:
            raise InputError(f"{self.path}: frame {number} cannot be decoded")
        return image

    def _ahead(self, number: int) -> int:
        """The last frame that is reached sooner by decoding on than by a jump."""
        if not len(self._keys):
            return self.length
        key = self._keys[max(0, np.searchsorted(self._keys, self._times[number], "right") - 1)]
        return max(self._next + NEAR, self.length if key <= self._times[self._next] else 0)

    def _seek(self, number: int) -> None:
        """Start decoding at the last key frame that is not behind a frame."""
        container, stream = self._open()
        place = np.searchsorted(self._keys, self._times[number], "right") - 1 if len(self._keys) else 0
        if place > 0 and number > 0:
            container.seek(int(self._keys[place]), stream=stream, backward=True)
        self._frames = self._decode(_Damage(container, stream))
        self._next = 0

    def _decode(self, damage: _Damage) -> Iterator[tuple[int, np.ndarray]]:
        for count, frame in enumerate(damage.decode()):
            number = count
            if not self._counted:
                if frame.pts is None:
                    continue
                number = int(np.searchsorted(self._times, frame.pts))
            if number >= self.length:
                return
            image = self._turn(frame.to_ndarray(format="rgb24"))
            _same_size(f"{self.path}: frame {number}", image, self.size)
            yield number, image

    def _decode_to(self, wanted: int) -> np.ndarray | None:
        """Decode on to a frame; None if decoding began behind it."""
        room = max(2, min(CACHE_FRAMES, CACHE_BYTES // (3 * self.size[0] * self.size[1])))
        last = self._cache.get(self._next - 1)
        for number, image in self._frames:
            self._next = number + 1
            self._cache[number] = image
            while len(self._cache) > room:
                self._cache.popitem(last=False)
            if number == wanted or number > wanted and last is not None:
                return image if number == wanted else last
            if number > wanted:
                return None if wanted > 0 else image
            last = image
        self._frames = None
        return last
