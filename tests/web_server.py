"""A running server of the page over a tiny clip, and a client that speaks as the page does."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import httpx
import numpy as np
import uvicorn

from data.masks import write_mask
from data.video import VideoWriter
from web.server import make_app
from web.tracking import Models

ROOT = Path(__file__).resolve().parents[1]
SIZE = (64, 96)
FRAMES = 8
WEIGHTS = ROOT / "assets" / "starter.safetensors"


def picture(i: int) -> np.ndarray:
    """A red and a blue square that move apart before grey noise."""
    image = np.random.default_rng(0).integers(60, 100, (*SIZE, 1), np.uint8).repeat(3, 2)
    image[20:44, 20 - i : 44 - i] = 220, 40, 40
    image[10:34, 60 + i : 84 + i] = 40, 60, 220
    return image


def first_mask() -> np.ndarray:
    """Ids 1 and 7 of the squares in frame 0."""
    labels = np.zeros(SIZE, np.int32)
    labels[20:44, 20:44] = 1
    labels[10:34, 60:84] = 7
    return labels


def write_clip(folder: Path, frames: int = FRAMES) -> tuple[Path, Path]:
    """Video and first mask."""
    with VideoWriter(folder / "clip.mp4", SIZE, Fraction(1, 24), crf=10) as video:
        for i in range(frames):
            video.write(picture(i), Fraction(i, 24))
    write_mask(folder / "first.png", first_mask())
    return folder / "clip.mp4", folder / "first.png"


@contextmanager
def running(video: Path, mask: Path | None, **options: object) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    app = make_app(Models({WEIGHTS.name: WEIGHTS}, None, {"accelerator": "cpu"}), video=video, mask=mask, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive() and not app.state.sessions.root.exists()


def wait_for(done, seconds: float = 60):
    """The first true value of `done()`."""
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


class Tab:
    """A session, as one tab of a browser has it."""

    def __init__(self, address: str):
        self.http = httpx.Client(base_url=address, headers={"X-VOS": "1"}, timeout=60)
        self.state = self.http.post("/api/sessions").raise_for_status().json()
        self.root = f"/api/sessions/{self.state['id']}"

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.delete(self.root)
        self.http.close()

    def call(self, method: str, path: str = "", **options: object) -> httpx.Response:
        return self.http.request(method, f"{self.root}/{path}" if path else self.root, **options)

    def do(self, method: str, path: str = "", **options: object) -> dict:
        answer = self.call(method, path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status: int, method: str, path: str, **options: object) -> str:
        """The message of a request that is refused."""
        answer = self.call(method, path, **options)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()["error"]

    def labels(self, frame: int) -> np.ndarray:
        data = self.call("GET", f"labels/{frame}").raise_for_status().content
        return np.frombuffer(data, "<u2").reshape(SIZE).astype(np.int32)

    def draw(self, frame: int, labels: np.ndarray) -> dict:
        revision = self.do("GET")["revision"]
        data = gzip.compress(labels.astype("<u2").tobytes())
        return self.do("PUT", f"labels/{frame}?revision={revision}", content=data)

    def finish(self) -> dict:
        """Wait for the job; its report."""
        return wait_for(lambda: (job := self.do("GET")["job"])["state"] != "running" and job)

    def track(self, frame: int, **options: object) -> dict:
        self.do("POST", "track", json={"frame": frame, **options})
        return self.finish()

    def export(self, kind: str, **options: object) -> tuple[str, bytes]:
        """Name and content of an export."""
        self.do("POST", "exports", json={"kind": kind, **options})
        job = self.finish()
        assert job["state"] == "done", job
        return job["notes"]["file"], self.call("GET", f"exports/{job['notes']['file']}").raise_for_status().content
