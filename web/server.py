"""The server of the page: every request that it knows, and how it starts and ends."""

import asyncio
import gzip
import json
import logging
import re
import shutil
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from data.images import IMAGE_SUFFIXES
from utils.errors import InputError
from web import files, proposals
from web.guard import Guard
from web.sessions import (
    FREE_BYTES,
    MASK_SUFFIXES,
    MAX_FOLDER_FRAMES,
    VIDEO_SUFFIXES,
    WEIGHT_SUFFIXES,
    Gone,
    Session,
    Sessions,
)
from web.tracking import Models, track

PAGE = Path(__file__).parent / "page"
MAX_JSON = 2**16
MAX_MASK_BYTES = 512 * 2**20
MAX_WEIGHTS_BYTES = 2 * 2**30
SESSIONS = 8
GRACE = 120.0  # seconds that a session outlives its tab: a reload, a machine that sleeps for a moment
JPEG_QUALITY = 92
PAUSE = 0.04  # seconds between two events at least
PING = 10.0  # seconds between signs of life, by which a closed tab is noticed

logger = logging.getLogger(__name__)


class TooLarge(Exception):
    """A body beyond its limit."""


def make_app(
    models: Models,
    *,
    video: Path,
    mask: Path | None = None,
    fps: float = 24,
    snap_colors: bool = False,
    defaults: dict | None = None,
    proposer: proposals.Proposer = proposals.propose,
    upload_limit: int = 4 * 2**30,
    hosts: Iterable[str] = ("127.0.0.1", "localhost", "::1"),
    sessions: int = SESSIONS,
    grace: float = GRACE,
) -> Starlette:
    """The page as an ASGI application.

    Args:
        models: weights and devices to choose from.
        video, mask, fps, snap_colors: what every session begins with.
        defaults: max_long_edge, max_memory_frames and long_term_gap that the page begins with.
        proposer: called as `web.proposals.propose`.
        upload_limit: bytes of a session's video or folder of frames.
        hosts: see `web.guard.Guard`.
        sessions: most at a time.
        grace: seconds that a session outlives its tab.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.sessions = Sessions(sessions, grace, lambda session: models.forget(session.folder))
        sweeper = asyncio.create_task(_sweep(app.state.sessions))
        try:
            yield
        finally:
            sweeper.cancel()
            app.state.sessions.close()

    site = "/api/sessions/{session}"

    def route(path: str, function: Callable, *methods: str) -> Route:
        return Route(site + path, _with_session(function), methods=list(methods))

    app = Starlette(
        routes=[
            Route("/", lambda request: FileResponse(PAGE / "index.html"), methods=["GET"]),
            Route("/api/sessions", _open, methods=["POST"]),
            Route("/api/choices", _choices, methods=["GET"]),
            route("", _state, "GET"),
            route("", _end, "DELETE"),
            route("/events", _events, "GET"),
            route("/frames/{frame}", _frame, "GET"),
            route("/labels/{frame}", _labels, "GET"),
            route("/labels/{frame}", _draw, "PUT"),
            route("/labels/{frame}", _clear, "DELETE"),
            route("/masks/{frame}", _mask, "POST"),
            route("/proposals/{frame}", _propose, "POST"),
            route("/objects", _add_object, "POST"),
            route("/objects/{object}", _change_object, "PATCH"),
            route("/objects/{object}", _remove_object, "DELETE"),
            route("/objects/{object}/restore", _restore_object, "POST"),
            route("/video", _video, "POST"),
            route("/bundled", _bundled, "POST"),
            route("/folder", _begin_folder, "POST"),
            route("/folder/{name}", _folder_file, "PUT"),
            route("/folder", _end_folder, "PUT"),
            route("/checkpoints", _checkpoint, "POST"),
            route("/track", _track, "POST"),
            route("/stop", _stop, "POST"),
            route("/exports", _export, "POST"),
            route("/exports/{name}", _download, "GET"),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(Guard, hosts=tuple(hosts))],
        exception_handlers={
            Gone: lambda request, error: _error(410, "This session has ended and its files are removed."),
            InputError: lambda request, error: _error(400, str(error)),
            TooLarge: lambda request, error: _error(413, str(error)),
            HTTPException: lambda request, error: _error(error.status_code, error.detail),
            ClientDisconnect: lambda request, error: _error(400, "the upload was cut off"),
            Exception: _failed,
        },
        lifespan=lifespan,
    )
    app.state.models, app.state.proposer = models, proposer
    app.state.upload_limit, app.state.defaults = upload_limit, defaults or {}
    app.state.video = video, mask, fps, snap_colors
    return app


def serve(app: Starlette, host: str, port: int, opened: Callable[[str], object]) -> None:
    """Serve until Ctrl-C or SIGTERM; sessions and their files end with it.

    Args:
        opened: called with the page's address once it can be reached.

    Raises:
        InputError: the address cannot be used.
    """
    import socket

    import uvicorn

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--host {host} --port {port}: cannot be used ({reason}); pass another, or port 0") from error
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"

    class Server(uvicorn.Server):
        async def startup(self, *args: Any, **kwargs: Any) -> None:
            await super().startup(*args, **kwargs)
            if self.started:
                opened(address)

        async def shutdown(self, *args: Any, **kwargs: Any) -> None:
            await run_in_threadpool(app.state.sessions.close)  # ends the streams of events, which would be waited for
            await super().shutdown(*args, **kwargs)

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False
    )
    with suppress(KeyboardInterrupt):  # Ctrl-C is how it is ended
        Server(config).run(sockets=[listener])


# What follows answers a request each; `_with_session` finds the session first.


def _with_session(function: Callable[[Request, Session], Any]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint of a session; plain functions run in a thread, and None becomes the state."""

    async def endpoint(request: Request) -> Response:
        session = request.app.state.sessions.get(request.path_params["session"])
        try:
            if asyncio.iscoroutinefunction(function):
                answer = await function(request, session)
            else:
                answer = await run_in_threadpool(function, request, session)
        except InputError as error:
            raise InputError(_without_folder(str(error), session)) from error
        except OSError:
            if session.closed:  # its files went while this was at work
                raise Gone from None
            raise
        if answer is not None:
            return answer
        if session.closed:
            raise Gone
        return JSONResponse(await run_in_threadpool(report, request, session))

    return endpoint


def report(request: Request, session: Session) -> dict:
    """The state of a session, as the page shows it."""
    state = request.app.state
    with session.lock:
        session.reports += 1
        out: dict = {
            "id": session.id,
            "serial": session.reports,
            "revision": session.revision,
            "objects": list(session.objects.values()),
            "checkpoints": [*state.models.checkpoints, *session.checkpoints],
            "defaults": state.defaults,
            "video": None,
            "job": None,
        }
        if reader := session.reader:
            height, width = reader.size
            out["video"] = {"title": session.title, "width": width, "height": height, "length": reader.length}
            out["video"]["rate"] = float(reader.rate)
            out |= {"labelled": session.labels.ranges(), "marked": session.labels.marked_frames()}
        if session.job:
            out["job"] = session.job.report()
            out["job"]["message"] = _without_folder(out["job"]["message"], session)
    return out


async def _open(request: Request) -> Response:
    sessions, state = request.app.state.sessions, request.app.state
    session = await run_in_threadpool(sessions.open)
    try:
        await run_in_threadpool(_load_first, state, session)
    except InputError:
        sessions.end(session)
        raise
    return JSONResponse(await run_in_threadpool(report, request, session))


def _load_first(state: Any, session: Session) -> None:
    video, mask, fps, snap_colors = state.video
    session.open_video(video, video.name, fps, trusted=True)
    if mask is None:
        session.add_object()
    elif mask.is_dir():
        from data.masks import read_mask_folder

        numbers = files.frame_numbers(session.reader)
        for name, file in read_mask_folder(mask, session.reader.names).items():
            if name in numbers:
                session.take_mask(numbers[name], file, snap_colors)
    else:
        session.take_mask(0, mask, snap_colors)
    session.changed()


def _choices(request: Request) -> Response:
    return JSONResponse(request.app.state.models.choices())


def _state(request: Request, session: Session) -> None:
    pass


async def _end(request: Request, session: Session) -> Response:
    await run_in_threadpool(request.app.state.sessions.end, session)
    return JSONResponse({})


async def _events(request: Request, session: Session) -> Response:
    """The state, whenever it changes, as server-sent events; a slow page gets the newest alone."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    news.set()

    def tell() -> None:
        with suppress(RuntimeError):  # the server ends
            loop.call_soon_threadsafe(news.set)

    async def stream() -> AsyncIterator[str]:
        session.listen(tell)
        try:
            while not session.closed:
                try:
                    await asyncio.wait_for(news.wait(), PING)
                except TimeoutError:
                    yield ": alive\n\n"
                    continue
                news.clear()
                if session.closed:
                    break
                state = await run_in_threadpool(report, request, session)
                yield f"data: {json.dumps(state)}\n\n"
                await asyncio.sleep(PAUSE)
            yield "event: gone\ndata: {}\n\n"
        finally:
            session.leave(tell)

    return StreamingResponse(stream(), media_type="text/event-stream")


def _frame(request: Request, session: Session) -> Response:
    import cv2

    image = session.reader.read(_number(request, session)).image
    good, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not good:
        raise InputError("the frame is too large for a JPEG")
    return Response(data.tobytes(), media_type="image/jpeg")


def _labels(request: Request, session: Session) -> Response:
    labels = session.labels.read(_number(request, session))
    return _packed(labels.astype("<u2"))


async def _draw(request: Request, session: Session) -> None:
    frame = _number(request, session)
    height, width = session.reader.size
    expected = 2 * height * width
    data = await _body(request, expected + 2**16)
    await run_in_threadpool(_keep, session, frame, data, expected, request.query_params.get("revision"))


def _keep(session: Session, frame: int, data: bytes, expected: int, revision: str | None) -> None:
    if revision != str(session.revision):
        raise InputError("this mask is of the video before")
    try:
        unpack = zlib.decompressobj(31)
        plain = unpack.decompress(data, expected + 1)
    except zlib.error as error:
        raise InputError("the mask is damaged") from error
    if len(plain) != expected:
        raise InputError(f"the mask has {len(plain)} bytes in place of {expected}")
    labels = np.frombuffer(plain, "<u2").reshape(session.reader.size).astype(np.int32)
    strangers = set(np.unique(labels).tolist()) - {0} - set(session.objects)
    if strangers:
        labels[np.isin(labels, list(strangers))] = 0  # of an object that was removed meanwhile
    session.labels.draw(frame, labels)
    session.changed()


def _clear(request: Request, session: Session) -> None:
    session.labels.clear(_number(request, session))
    session.changed()


async def _mask(request: Request, session: Session) -> None:
    frame = _number(request, session)
    path = _file(request, session, MASK_SUFFIXES, "a mask")
    snap = request.query_params.get("snap") == "true"
    text = request.query_params.get("object", "")
    await _save(request, session, path, MAX_MASK_BYTES)
    if path.suffix.lower() in (*IMAGE_SUFFIXES, ".gif"):
        try:
            await run_in_threadpool(session.take_mask, frame, path, snap)
        finally:
            session.discard(path)
        session.changed()
    else:
        object_id = int(text) if text.isdecimal() else None
        work = partial(files.take_in, session=session, path=path, frame=frame, object_id=object_id, snap_colors=snap)
        session.start("import", lambda job: work(job))


async def _propose(request: Request, session: Session) -> Response:
    frame = _number(request, session)
    body = await _json(request)
    return await run_in_threadpool(_proposal, request, session, frame, body)


def _proposal(request: Request, session: Session, frame: int, body: dict) -> Response:
    image = session.reader.read(frame).image
    points, box = proposals.check(image, body.get("points"), body.get("box"))
    mask = np.asarray(request.app.state.proposer(image, points, box))
    if mask.shape != image.shape[:2]:
        raise InputError(f"--proposer: returned {mask.shape} for a frame of {image.shape[:2]}")
    return _packed((mask > 0).astype(np.uint8))


async def _add_object(request: Request, session: Session) -> Response:
    body = await _json(request)
    item = session.add_object(name=str(body.get("name", "")), color=str(body.get("color", "")))
    session.changed()
    return JSONResponse(item)


async def _change_object(request: Request, session: Session) -> None:
    session.describe_object(_object(request), await _json(request))
    session.changed()


def _remove_object(request: Request, session: Session) -> None:
    session.remove_object(_object(request))
    session.changed()


def _restore_object(request: Request, session: Session) -> None:
    session.restore_object(_object(request))
    session.changed()


async def _video(request: Request, session: Session) -> None:
    path = _file(request, session, VIDEO_SUFFIXES, "a video")
    await _save(request, session, path, request.app.state.upload_limit)
    await run_in_threadpool(session.open_video, path, path.name)
    session.add_object()
    session.changed()


def _bundled(request: Request, session: Session) -> None:
    _load_first(request.app.state, session)


def _begin_folder(request: Request, session: Session) -> None:
    if session.incoming:
        session.discard(session.incoming)
    session.incoming = session.room("frames")
    session.incoming.mkdir()
    session.incoming_bytes = session.incoming_files = 0


async def _folder_file(request: Request, session: Session) -> Response:
    folder = session.incoming
    if folder is None:
        raise InputError("begin a folder first")
    name = _name(request.path_params["name"], IMAGE_SUFFIXES, "a folder of frames")
    if session.incoming_files >= MAX_FOLDER_FRAMES:
        raise TooLarge(f"a folder may hold {MAX_FOLDER_FRAMES} frames; make a video of them")
    session.incoming_files += 1
    rest = request.app.state.upload_limit - session.incoming_bytes
    session.incoming_bytes += await _save(request, session, folder / name, rest)
    return JSONResponse({})


async def _end_folder(request: Request, session: Session) -> None:
    folder, session.incoming = session.incoming, None
    if folder is None:
        raise InputError("begin a folder first")
    body = await _json(request)
    title = " ".join(str(body.get("title", "")).split())[:120] or "frames"
    await run_in_threadpool(session.open_video, folder, title)
    session.add_object()
    session.changed()


async def _checkpoint(request: Request, session: Session) -> None:
    path = _file(request, session, WEIGHT_SUFFIXES, "weights")
    await _save(request, session, path, MAX_WEIGHTS_BYTES)
    session.checkpoints[path.name] = path
    session.changed()


async def _track(request: Request, session: Session) -> None:
    body = await _json(request)
    start, backwards = session.number(str(body.get("frame"))), bool(body.get("backwards"))
    models = request.app.state.models
    checkpoints = models.checkpoints | session.checkpoints
    name = body.get("checkpoint") or next(iter(checkpoints))
    if name not in checkpoints:
        raise InputError(f"there are no weights {str(name)[:60]}; choose from the list")
    model = str(body.get("model") or "") or None
    if model is None and name == next(iter(models.checkpoints)):
        model = models.model
    settings = {"checkpoint": checkpoints[name], "model": model, "device": str(body.get("device") or "")}
    for key, least, most in (
        ("max_long_edge", 16, 8192),
        ("max_memory_frames", 1, 100_000),
        ("long_term_gap", 0, 100_000),
    ):
        value = body.get(key)
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise InputError(
                f"{key} is {str(value)[:20]}: give a whole number from {least} to {most}, or leave it empty"
            )
        settings[key] = value
    session.start("track", lambda job: track(job, session, models, start, -1 if backwards else 1, settings))


def _stop(request: Request, session: Session) -> None:
    session.stop()


async def _export(request: Request, session: Session) -> None:
    session.number("0")
    body = await _json(request)
    kind, object_id, opacity = body.get("kind"), body.get("object"), body.get("opacity", 0.5)
    if kind not in files.KINDS:
        raise InputError(f"there is no export {str(kind)[:20]}; choose from {', '.join(files.KINDS)}")
    if not isinstance(opacity, int | float) or not 0 <= opacity <= 1:
        raise InputError("opacity: a number from 0 to 1")
    session.start("export", lambda job: files.export(job, session, kind, object_id, opacity))


def _download(request: Request, session: Session) -> Response:
    session.number("0")
    folder = session.results / "exports"
    name = request.path_params["name"]
    if name not in [path.name for path in folder.iterdir()] or name.startswith("."):
        raise HTTPException(404, "there is no such export")
    return FileResponse(folder / name, filename=name, content_disposition_type="attachment")


async def _sweep(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(min(5.0, sessions.grace / 2))
        await run_in_threadpool(sessions.sweep)


def _number(request: Request, session: Session) -> int:
    return session.number(request.path_params["frame"])


def _object(request: Request) -> int:
    text = request.path_params["object"]
    if not (text.isdecimal() and len(text) < 6):
        raise InputError("an object id is a number")
    return int(text)


def _packed(array: np.ndarray) -> Response:
    """Raw values, compressed on the way; label maps are mostly flat."""
    return Response(
        gzip.compress(array.tobytes(), 1),
        media_type="application/octet-stream",
        headers={"Content-Encoding": "gzip"},
    )


def _name(name: str, suffixes: tuple[str, ...], what: str) -> str:
    """A file name that a person's browser sent: one part, no tricks, of an allowed type."""
    if Path(name).suffix.lower() not in suffixes:
        raise HTTPException(415, f"{name[:80]}: not a type of {what} that is taken ({' '.join(suffixes)})")
    foreign = any(letter in '/\\:*?"<>|' or letter < " " for letter in name)
    if foreign or len(name.encode()) > 200 or name.startswith("."):
        raise HTTPException(400, f"{name[:80]!r} is no plain file name; rename the file")
    return name


def _file(request: Request, session: Session, suffixes: tuple[str, ...], what: str) -> Path:
    return session.room(_name(request.query_params.get("name", ""), suffixes, what))


async def _save(request: Request, session: Session, path: Path, limit: int) -> int:
    """Write the request's body to a file as it comes; what is too large or cut off leaves nothing."""
    try:
        declared = int(request.headers.get("content-length") or 0)
        if declared > limit:
            raise TooLarge(f"{path.name}: larger than the limit of {limit / 2**20:.0f} MB")
        if declared > shutil.disk_usage(session.folder).free - FREE_BYTES:
            raise TooLarge(f"{path.name}: the disk for temporary files has not enough room for it")
        size = 0
        with path.open("wb") as file:
            async for block in request.stream():
                size += len(block)
                if size > limit:
                    raise TooLarge(f"{path.name}: larger than the limit of {limit / 2**20:.0f} MB")
                await run_in_threadpool(file.write, block)
        if size == 0:
            raise InputError(f"{path.name}: the file is empty")
    except BaseException:
        path.unlink(missing_ok=True)
        session.discard(path)
        raise
    return size


async def _body(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for block in request.stream():
        data += block
        if len(data) > limit:
            raise TooLarge(f"the request is larger than {limit} bytes")
    return bytes(data)


async def _json(request: Request) -> dict:
    data = await _body(request, MAX_JSON)
    try:
        content = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InputError("the request is no JSON") from error
    if not isinstance(content, dict):
        raise InputError("the request is no JSON object")
    return content


def _without_folder(message: str, session: Session) -> str:
    """A message without the place of temporary files, which says nothing to a person."""
    return re.sub(re.escape(str(session.folder)) + r"/(file-[^/]+/)?", "", message)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"This failed in the server: {type(error).__name__}. It goes on running.")
