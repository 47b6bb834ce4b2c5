"""Frames in and out: video files and frame folders as a stream, and a video writer that keeps their timing."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from data.images import IMAGE_SUFFIXES, check_pixels, list_images, read_rgb
from utils.errors import InputError

if TYPE_CHECKING:
    import av

T = TypeVar("T")

MAX_SIDE = 16384  # of what is written

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frame:
    """One picture of a video.

    Attributes:
        image: (H, W, 3) uint8 RGB, upright.
        name: file stem in a folder, five-digit number from 00000 in a video.
        time: when it is shown, in seconds, exact.
    """

    image: np.ndarray
    name: str
    time: Fraction


class FrameSource:
    """The frames of a video or folder: a context manager to iterate over, as often as wanted, decoding as it goes.

    Attributes:
        path: the video file or frame folder.
        kind: "video" or "folder".
        size: (h, w) of every frame.
        length: number of frames; for a video a hint from its header, None where that says nothing.
        names: names of all frames; None for a video.
        ignored: hidden and foreign files in a folder.
        rate: mean frames per second.
        time_base: every frame's time is a whole multiple of it.
    """

    path: Path
    kind: str
    size: tuple[int, int]
    length: int | None
    names: list[str] | None = None
    ignored: int = 0
    rate: Fraction
    time_base: Fraction

    def __init__(self) -> None:
        self._running: list[Iterator[Frame]] = []

    def __iter__(self) -> Iterator[Frame]:
        frames = self._frames()
        self._running.append(frames)
        return frames

    def _frames(self) -> Iterator[Frame]:
        raise NotImplementedError

    def close(self) -> None:
        """Close the files that unfinished iterations hold open."""
        for frames in self._running:
            frames.close()
        self._running.clear()

    def __enter__(self) -> "FrameSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_frames(path: str | Path, fps: float = 24) -> FrameSource:
    """Open a video, a folder of frames or a single image.

    Args:
        path: video in any format that FFmpeg reads, or a folder of images, taken in natural order (1, 2, 10).
        fps: frames per second of a folder; videos have their own timing.

    Raises:
        InputError: missing, no video, not one frame decodes, no image in the folder; while iterating: a frame that is
            damaged (folders) or of another size than the first.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give a video or a folder of frames")
    if path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        return _Folder(path, fps)
    if not path.is_file():
        raise InputError(f"{path}: is no regular file; give a video or a folder of frames")
    return _Video(path)


class _Folder(FrameSource):
    kind = "folder"

    def __init__(self, path: Path, fps: float) -> None:
        super().__init__()
        if not 0 < fps <= 1000:
            raise InputError(f"fps {fps}: must be above 0 and at most 1000")
        self.path = path
        self._files, self.ignored = list_images(path) if path.is_dir() else ([path], 0)
        self.names = [file.stem for file in self._files]
        self.length = len(self._files)
        self.rate = Fraction(fps).limit_denominator(1001)
        self.time_base = 1 / self.rate
        self.size = read_rgb(self._files[0]).shape[:2]

    def _frames(self) -> Iterator[Frame]:
        for i, file in enumerate(self._files):
            image = read_rgb(file)
            _same_size(file, image, self.size)
            yield Frame(image, file.stem, i * self.time_base)


class _Video(FrameSource):
    kind = "video"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with _open_stream(path) as (container, stream):
            self.length = stream.frames or None  # often 0, sometimes wrong
            self.rate = stream.average_rate or stream.guessed_rate or Fraction(24)
            self.time_base = stream.time_base
            if self.length is None and container.duration:
                self.length = round(container.duration / 10**6 * self.rate)
        with closing(self._frames()) as frames:
            first = next(frames, None)
        if first is None:
            raise InputError(f"{path}: not one frame can be decoded; give a whole video")
        self.size = first.image.shape[:2]

    def _frames(self) -> Iterator[Frame]:
        with _open_stream(self.path) as (container, stream):
            damage = _Damage(container, stream)
            shift = None
            size = None
            ticks = count = 0
            for frame in damage.decode():
                # Frames without a time of their own follow at the mean rate.
                ticks = ticks + round(1 / self.rate / self.time_base) if frame.pts is None else frame.pts
                if shift is None:
                    turn = _display_matrix(frame)
                    # A transport stream counts from anywhere; else only times before zero are moved.
                    shift = -ticks if container.format.name == "mpegts" else max(0, -ticks)
                image = turn(frame.to_ndarray(format="rgb24"))
                size = size or image.shape[:2]
                _same_size(f"{self.path}: frame {count:05d}", image, size)
                yield Frame(image, f"{count:05d}", (ticks + shift) * self.time_base)
                count += 1
            if count and (message := damage.report()):
                logger.warning("%s: %s; %d frames decoded", self.path, message, count)


@contextmanager
def _open_stream(
    path: Path, formats: str | None = None
) -> Iterator[tuple["av.container.InputContainer", "av.VideoStream"]]:
    import av

    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a video or a frame folder") from error
    if start == b"\x89PNG\r\n\x1a\n":  # FFmpeg would unpack it to no end; data.images has bounds
        raise InputError(f"{path}: is a PNG picture; give a video, or the picture as .png")
    options = {"protocol_whitelist": "file"} | ({"format_whitelist": formats} if formats else {})
    try:
        # "file:" keeps FFmpeg from reading a protocol or a number pattern into the name, the whitelist keeps playlists
        # from fetching anything.
        container = av.open(f"file:{path}", options=options, metadata_errors="replace")
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"{path}: not a readable video ({error.strerror}); give a video or a frame folder") from error
    with container:
        stream = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise InputError(f"{path}: holds no video stream of a known codec; give a video or a frame folder")
        check_pixels(path, stream.height, stream.width)
        stream.thread_type = "AUTO"
        yield container, stream


class _Damage:
    """Decodes what can be decoded, and notes what could not."""

    def __init__(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> None:
        self.container, self.stream = container, stream
        self.bad_packets = 0
        self.end = Fraction(0)
        self.stopped = False

    def decode(self) -> Iterator["av.VideoFrame"]:
        import av

        packets = self.container.demux(self.stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:
                self.stopped = True
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except av.FFmpegError:
                self.bad_packets += 1
                continue
            for frame in frames:
                self.bad_packets += frame.is_corrupt
                if frame.pts is not None:
                    self.end = (frame.pts + (frame.duration or 0)) * self.stream.time_base
                yield frame

    def report(self) -> str | None:
        """What is wrong with a file that has been read to its end, None if nothing is."""
        if self.bad_packets:
            return f"the video is damaged ({self.bad_packets} packets)"
        promised = Fraction(0)
        if self.stream.duration:
            promised = ((self.stream.start_time or 0) + self.stream.duration) * self.stream.time_base
        elif self.container.duration and len(self.container.streams) == 1:
            promised = Fraction(self.container.duration, 10**6)
        if self.stopped or promised - self.end > Fraction(1, 2):
            return f"the video is cut off at {float(self.end):.2f} of {float(promised):.2f} s"
        return None


def _display_matrix(frame: "av.VideoFrame"):
    """A function that turns and mirrors an image as the file's display matrix says; multiples of 90 degrees."""
    side_data = frame.side_data.get("DISPLAYMATRIX")
    if side_data is None:
        return lambda image: image
    # (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d = np.frombuffer(bytes(side_data), np.int32)[:5]

    def turn(image: np.ndarray) -> np.ndarray:
        if abs(b) > abs(a):
            image = image.transpose(1, 0, 2)[:: -1 if b < 0 else 1, :: -1 if c < 0 else 1]
        else:
            image = image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
        return np.ascontiguousarray(image)

    return turn


def _same_size(what: object, image: np.ndarray, size: tuple[int, int]) -> None:
    if image.shape[:2] != size:
        height, width = image.shape[:2]
        raise InputError(
            f"{what}: is {width}x{height} pixels, the first frame is {size[1]}x{size[0]}; give frames of one size"
        )


class VideoWriter:
    """An H.264 mp4 that browsers play (yuv420p, index in front), with exact frame times.

    The file appears at `close`; when its `with` block ends by an exception, nothing stays behind.

    Args:
        path: the file to write.
        size: (h, w); an odd side is padded by repeating its last row or column, as the format needs even ones.
        time_base: all frame times are multiples of it; that of the source keeps its timing exactly.
        rate: mean frames per second, for the encoder's rate control.
        crf: quality; lower is better, 18 looks lossless.

    Raises:
        InputError: a side is longer than the format takes.
    """

    def __init__(
        self,
        path: str | Path,
        size: tuple[int, int],
        time_base: Fraction = Fraction(1, 24),
        rate: Fraction = Fraction(24),
        crf: int = 20,
    ) -> None:
        import av

        self.path = Path(path)
        self.size = size
        if max(size) > MAX_SIDE:
            raise InputError(f"{path}: a video of {size[1]}x{size[0]} pixels; H.264 takes {MAX_SIDE} a side at most")
        # The mp4 format counts in whole fractions of a second below 2**31.
        self.time_base = time_base if time_base.denominator <= 10**7 else Fraction(1, 90000)
        self.frames = 0
        self._last = -1
        self._temporary = self.path.with_name(f".{self.path.name}.partial")
        self._container = av.open(str(self._temporary), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream = self._container.add_stream("h264", rate=rate.limit_denominator(10**6))
        self._stream.options = {"crf": str(crf), "preset": "superfast"}
        self._stream.pix_fmt = "yuv420p"
        self._stream.height, self._stream.width = (side + side % 2 for side in size)
        context = self._stream.codec_context
        context.time_base = self.time_base
        context.color_primaries = context.color_trc = 1  # those of sRGB (BT.709)
        context.colorspace, context.color_range = 6, 1  # BT.601, 16..235: what OpenCV converts to

    def write(self, image: np.ndarray, time: Fraction) -> None:
        """Append a picture, (H, W, 3) uint8 RGB, shown from `time` (seconds) on; times have to rise."""
        import av
        import cv2

        if image.shape[:2] != tuple(self.size):
            raise ValueError(f"{self.path}: a frame of {image.shape[:2]} in a video of {self.size}")
        if self._stream.height > image.shape[0] or self._stream.width > image.shape[1]:
            bottom, right = self._stream.height - image.shape[0], self._stream.width - image.shape[1]
            image = cv2.copyMakeBorder(image, 0, bottom, 0, right, cv2.BORDER_REPLICATE)
        frame = av.VideoFrame.from_ndarray(cv2.cvtColor(image, cv2.COLOR_RGB2YUV_I420), "yuv420p")
        self._last = max(self._last + 1, round(time / self.time_base))
        frame.pts, frame.time_base = self._last, self.time_base
        self._container.mux(self._stream.encode(frame))
        self.frames += 1

    def close(self) -> None:
        """Finish the file and give it its name; without a frame there is no file."""
        if self.frames == 0:
            return self.abort()
        try:
            self._container.mux(self._stream.encode())
            self._container.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop and leave nothing behind."""
        try:
            self._container.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.abort()


def prefetch(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """Yield what `items` yields, computed ahead in a thread, at most `depth` items.

    An exception of `items` is raised here. The thread ends with this generator: use `contextlib.closing` where the
    consumer may stop early.
    """
    queue: Queue = Queue(maxsize=depth)
    stop = Event()

    def fill() -> None:
        iterator = iter(items)
        try:
            for item in iterator:
                queue.put((item, None))
                if stop.is_set():
                    return
            queue.put((None, StopIteration()))
        except BaseException as error:
            queue.put((None, error))
        finally:
            if hasattr(iterator, "close"):
                iterator.close()

    thread = Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # a waiting put needs room before the thread can see that it is to stop
            while not queue.empty():
                queue.get_nowait()
            thread.join(timeout=0.05)
