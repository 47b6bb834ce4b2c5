"""Sessions of the page: what one browser tab works on, in a temporary folder that goes when the tab has gone."""

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock, RLock
from typing import IO

from data.images import IMAGE_SUFFIXES
from data.masks import read_mask
from data.reader import FrameReader
from utils.errors import InputError
from web.jobs import Job
from web.labels import Labels

# Containers of pictures alone: a playlist could name other files of this machine.
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,gif,h264,hevc,ivf,mxf,yuv4mpegpipe"
)
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".mpg", ".mpeg", ".ogv", ".flv", ".wmv"),
    *(".gif", ".3gp", ".mxf", ".y4m"),
)
COLORS = (
    *("#e8604c", "#4aa3df", "#efb73e", "#55b98a", "#b184e8", "#e87fb2", "#8cc152", "#e58e4a", "#52c8cf", "#7f8fe8"),
    *("#c9c25a", "#d4a5a5"),
)
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt")
MASK_SUFFIXES = (*IMAGE_SUFFIXES, ".gif", ".zip", ".json", ".mov", ".webm")
MAX_FOLDER_FRAMES = 200_000
PREFIX, LOCK = "vos-page-", ".lock"
YOUNG = 60.0  # seconds in which the folder of a server that starts may have no lock yet
MAX_OBJECTS = 255
RELOAD = 10.0  # seconds for which a tab may be away without another taking its place
FREE_BYTES = 512 * 2**20  # of the disk, that uploads leave


class Gone(Exception):
    """There is no such session, or no longer."""


class Session:
    """One tab's video, masks, objects and running job.

    Attributes:
        id: 256 random bits; who knows it may use the session.
        folder: holds everything that it writes.
        reader, labels, results: of the video and the folder of what is made of it; None before there is one.
        revision: counts the videos loaded; reports: counts what was said of the session, for the order of it.
        objects: {id: {"id", "name", "color", "hidden"}} in the order they came.
        removed: objects taken out, to undo it.
        checkpoints: weights handed in, by file name.
        incoming: folder of frames that is being handed in.
        job: the running or last job.
        seen: when it was last used, in seconds of `time.monotonic`.
    """

    def __init__(self, root: Path):
        self.id = secrets.token_urlsafe(32)
        self.folder = Path(tempfile.mkdtemp(dir=root, prefix="session-"))
        self.lock = RLock()
        self.reader: FrameReader | None = None
        self.labels: Labels | None = None
        self.results: Path | None = None
        self.title = ""
        self.revision = 0
        self.objects: dict[int, dict] = {}
        self.removed: dict[int, dict] = {}
        self.checkpoints: dict[str, Path] = {}
        self.incoming: Path | None = None
        self.incoming_bytes = self.incoming_files = 0
        self.job: Job | None = None
        self._listeners: frozenset[Callable[[], None]] = frozenset()
        self.seen = time.monotonic()
        self.closed = False
        self.reports = 0
        self._last_id = self._jobs = 0

    @property
    def watched(self) -> bool:
        """Whether a tab listens."""
        return bool(self._listeners)

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a function called after every change, from any thread."""
        with self.lock:
            self._listeners |= {listener}

    def leave(self, listener: Callable[[], None]) -> None:
        """End `listen`."""
        with self.lock:
            self._listeners -= {listener}
            self.seen = time.monotonic()

    def changed(self) -> None:
        """Tell the listeners."""
        for listener in self._listeners:
            listener()

    def room(self, name: str) -> Path:
        """A new path in a new subfolder, `name` being its last part, for a file that a person hands in."""
        return Path(tempfile.mkdtemp(dir=self.folder, prefix="file-")) / name

    def open_video(self, path: Path, title: str, fps: float = 24, trusted: bool = False) -> None:
        """Take another video: masks, objects and results of the one before go.

        Args:
            path: file or folder; one inside the session's folder is deleted with the video.
            trusted: given on the command line, not uploaded.

        Raises:
            InputError: no readable video; the one before stays.
        """
        try:
            reader = FrameReader(path, fps, None if trusted else FORMATS)
        except InputError:
            self.discard(path)
            raise
        self.stop()
        with self.lock:
            before, kept = self.reader, self.results
            self.revision += 1
            self.results = self.folder / f"results-{self.revision}"
            (self.results / "labels").mkdir(parents=True)
            (self.results / "exports").mkdir()
            self.reader, self.title = reader, title
            self.labels = Labels(self.results / "labels", reader.size, reader.length)
            self.objects, self.removed, self._last_id, self.job = {}, {}, 0, None
        if before:
            before.close()
            self.discard(before.path)
            shutil.rmtree(kept, ignore_errors=True)
        self.changed()

    def discard(self, path: Path) -> None:
        """Delete something that was handed in; what lies outside the session's folder is left alone."""
        parent = path.parent
        if parent.parent == self.folder and parent.name.startswith("file-"):
            shutil.rmtree(parent, ignore_errors=True)

    def number(self, text: str) -> int:
        """A frame number from a request."""
        if self.reader is None:
            raise InputError("there is no video yet; load one first")
        if not re.fullmatch(r"\d{1,9}", text) or int(text) >= self.reader.length:
            raise InputError(f"frame {text[:12]}: the video has the frames 0 to {self.reader.length - 1}")
        return int(text)

    def add_object(self, object_id: int | None = None, name: str = "", color: str = "") -> dict:
        """A new object, with the next free id if none is named. A removed id begins anew."""
        with self.lock:
            if object_id in self.objects:
                return self.objects[object_id]
            if len(self.objects) >= MAX_OBJECTS:
                raise InputError(f"there are {MAX_OBJECTS} objects already, the most that the page can hold")
            if object_id is None:
                object_id = self._last_id + 1 if self._last_id < 65535 else self._gap()
            if object_id in self.removed:
                del self.removed[object_id]
            if self.labels:
                self.labels.readmit(object_id)
            self._last_id = max(self._last_id, object_id)
            first = COLORS[(object_id - 1) % len(COLORS)]
            self.objects[object_id] = {
                "id": object_id,
                "name": f"Object {object_id}",
                "color": first,
                "hidden": False,
            }
            self.describe_object(object_id, {"name": name, "color": color} if name or color else {})
            return self.objects[object_id]

    def describe_object(self, object_id: int, values: Mapping) -> None:
        """Set name, colour or hidden of an object."""
        item = self._object(object_id)
        name, color, hidden = (values.get(key) for key in ("name", "color", "hidden"))
        if name:
            item["name"] = " ".join(str(name).split())[:60] or item["name"]
        if color:
            if not re.fullmatch(r"#[0-9a-fA-F]{6}", str(color)):
                raise InputError(f"the colour {str(color)[:20]} is not of the form #rrggbb")
            item["color"] = str(color).lower()
        if hidden is not None:
            item["hidden"] = bool(hidden)

    def remove_object(self, object_id: int) -> None:
        """Take an object out of all frames."""
        with self.lock:
            self.removed[object_id] = self._object(object_id)
            del self.objects[object_id]
            if self.labels:
                self.labels.remove(object_id)

    def restore_object(self, object_id: int) -> None:
        """Undo `remove_object`."""
        with self.lock:
            if object_id not in self.removed:
                raise InputError(f"object {object_id} was not removed")
            self.objects[object_id] = self.removed.pop(object_id)
            self.objects = dict(sorted(self.objects.items()))
            if self.labels:
                self.labels.restore(object_id)

    def colors(self) -> dict[int, tuple[int, int, int]]:
        """(r, g, b) of every object."""
        return {i: tuple(bytes.fromhex(item["color"][1:])) for i, item in self.objects.items()}

    def take_mask(self, frame: int, path: Path, snap_colors: bool = False) -> None:
        """A frame gets the mask of an image file; new ids become objects."""
        mask = read_mask(path, size=self.reader.size, snap_colors=snap_colors, known_colors=self.colors())
        ids = sorted(set(mask.labels.ravel().tolist()) - {0})
        if not ids:
            raise InputError(f"{path.name}: every pixel is background; mark at least one object")
        for object_id in ids:
            color = (mask.colors or {}).get(object_id)
            self.add_object(object_id, color="#{:02x}{:02x}{:02x}".format(*color) if color else "")
        self.labels.draw(frame, mask.labels)
        self.labels.mark(frame, ids)

    def start(self, kind: str, work: Callable[[Job], object]) -> Job:
        """Start a job in a thread; one at a time.

        Raises:
            InputError: another is running.
        """
        with self.lock:
            if self.job and self.job.running:
                raise InputError("something is running already; stop it, or wait for its end")
            self._jobs += 1
            self.job = Job(self._jobs, kind, work, self.changed)
            self.job.start()
            return self.job

    def stop(self) -> None:
        """Stop the running job, and wait for its end."""
        if self.job:
            self.job.stop()

    def close(self) -> None:
        """The end: the job stops, the folder goes."""
        self.closed = True
        self.stop()
        if self.reader:
            self.reader.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.changed()

    def _object(self, object_id: int) -> dict:
        if object_id not in self.objects:
            raise InputError(f"there is no object {object_id}")
        return self.objects[object_id]

    def _gap(self) -> int:
        return next(i for i in range(1, 65536) if i not in self.objects and i not in self.removed)


class Sessions:
    """All sessions of a server, and the folder that theirs lie in.

    Args:
        limit: most sessions at a time.
        grace: seconds that a session outlives its tab.
        ended: called with every session that has ended.
    """

    def __init__(self, limit: int, grace: float, ended: Callable[[Session], object]):
        self.limit, self.grace, self._ended = limit, grace, ended
        _remove_leftovers()
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock_file = _lock(self.root / LOCK)
        self._sessions: dict[str, Session] = {}
        self._lock = Lock()

    def open(self) -> Session:
        """A new session; where there are too many, the one whose tab has been away longest makes room.

        Raises:
            InputError: all of them are in use.
        """
        self.sweep()
        if len(self._sessions) >= self.limit:
            left = [s for s in self._sessions.values() if not s.watched and time.monotonic() - s.seen > RELOAD]
            if left:
                self.end(min(left, key=lambda session: session.seen))
        with self._lock:
            if len(self._sessions) >= self.limit:
                raise InputError(
                    f"{self.limit} sessions are open, the most at a time; close another tab and wait {RELOAD:.0f} s"
                )
            session = Session(self.root)
            self._sessions[session.id] = session
            return session

    def get(self, session_id: str) -> Session:
        """The session of an id.

        Raises:
            Gone: there is none.
        """
        session = self._sessions.get(session_id)
        if session is None or session.closed:
            raise Gone
        session.seen = time.monotonic()
        return session

    def end(self, session: Session) -> None:
        """Close a session."""
        with self._lock:
            self._sessions.pop(session.id, None)
        session.close()
        self._ended(session)

    def sweep(self) -> None:
        """Close the sessions that nobody has used for a while."""
        for session in list(self._sessions.values()):
            if not session.watched and time.monotonic() - session.seen > self.grace:
                self.end(session)

    def close(self) -> None:
        """Close all of them and remove the folder."""
        for session in list(self._sessions.values()):
            self.end(session)
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


def _remove_leftovers() -> None:
    """Remove the folders of servers that were killed: those that nobody holds locked any more."""
    for root in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            young = time.time() - root.stat().st_mtime < YOUNG
            lock = None if young or not (root / LOCK).exists() else _lock(root / LOCK)
        except OSError:  # of another user, or just gone
            continue
        if lock is not None:
            shutil.rmtree(root, ignore_errors=True)
            lock.close()


def _lock(path: Path) -> IO | None:
    """A file that is locked while it is open; None where another process has it, or where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
