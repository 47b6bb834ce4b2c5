"""Videos with transparency: one object cut out, for an editor (ProRes 4444, mov) or a browser (VP9, webm)."""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from data.video import _open_stream
from utils.errors import InputError

_KINDS = {
    "mov": ("prores_ks", "yuva444p10le", {"profile": "4444", "alpha_bits": "8", "vendor": "apl0"}),
    "webm": ("libvpx-vp9", "yuva420p", {"deadline": "realtime", "cpu-used": "8", "crf": "20", "b": "0"}),
}


class AlphaWriter:
    """A video of pictures with transparency; the file appears at `close`, or not at all.

    Args:
        path: ends in .mov (ProRes 4444) or .webm (VP9).
        size: (h, w); an odd side is padded by one transparent row or column.
        time_base: frame times are rounded to multiples of it.
        rate: mean frames per second.
    """

    def __init__(self, path: Path, size: tuple[int, int], time_base: Fraction, rate: Fraction):
        import av

        kind = path.suffix[1:]
        codec, self._format, options = _KINDS[kind]
        self.path, self._temporary = path, path.with_name(f".{path.name}.partial")
        self._time_base = Fraction(1, 1000) if kind == "webm" else max(time_base, Fraction(1, 10**5))
        self._last = -1
        self._shape = tuple(side + side % 2 for side in size)
        self._container = av.open(str(self._temporary), "w", format=kind)
        self._stream = self._container.add_stream(codec, rate=rate.limit_denominator(10**6))
        self._stream.options = options
        self._stream.height, self._stream.width = self._shape
        self._stream.pix_fmt = self._format
        self._stream.codec_context.time_base = self._time_base

    def write(self, image: np.ndarray, mask: np.ndarray, time: Fraction) -> None:
        """Append a picture (H, W, 3) uint8 of which only the mask (H, W) of booleans is seen."""
        import av

        picture = np.zeros((*self._shape, 4), np.uint8)
        height, width = mask.shape
        picture[:height, :width, :3] = image * mask[..., None]
        picture[:height, :width, 3] = mask * np.uint8(255)
        frame = av.VideoFrame.from_ndarray(picture, "rgba").reformat(format=self._format)
        self._last = max(self._last + 1, round(time / self._time_base))
        frame.pts, frame.time_base = self._last, self._time_base
        self._container.mux(self._stream.encode(frame))

    def __enter__(self) -> "AlphaWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._container.mux(self._stream.encode())
            self._container.close()
            if kind is None:
                os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


def read_alpha(path: Path, size: tuple[int, int], formats: str | None = None) -> Iterator[np.ndarray]:
    """The visible part, (H, W) booleans, of every frame of such a video, in order.

    Raises:
        InputError: no video, without transparency, or of another size than (h, w), made even.
    """
    import av

    with _open_stream(path, formats) as (container, stream):
        context = stream.codec_context
        if context.name == "vp9" and stream.metadata.get("alpha_mode") == "1":
            context = av.CodecContext.create("libvpx-vp9", "r")  # FFmpeg's own decoder drops transparency
            context.extradata = stream.codec_context.extradata
        try:
            for packet in container.demux(stream):
                for frame in context.decode(packet if packet.size else None):
                    if not any(component.is_alpha for component in frame.format.components):
                        raise InputError(f"{path}: the video has no transparency; give one that was exported here")
                    alpha = frame.to_ndarray(format="rgba")[..., 3] > 127
                    if alpha.shape != tuple(side + side % 2 for side in size):
                        raise InputError(
                            f"{path}: the video is {alpha.shape[1]}x{alpha.shape[0]}, the frames {size[1]}x{size[0]}"
                        )
                    yield alpha[: size[0], : size[1]]
        except av.FFmpegError as error:
            raise InputError(f"{path}: the video is damaged ({error.strerror})") from error
