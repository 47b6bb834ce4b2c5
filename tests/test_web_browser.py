"""The page in a real browser: headless Chromium, driven as a person would, with the mouse and with keys alone."""

import io
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("uvicorn", reason="needs requirements-web.txt")
pytest.importorskip("httpx", reason="needs requirements-dev.txt")
pytest.importorskip("playwright.sync_api", reason="needs playwright (requirements-dev.txt)")

import httpx
from playwright import sync_api

from data.video import VideoWriter
from tests.web_server import FRAMES, ROOT, SIZE, first_mask, running, write_clip

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
SMALL = 128  # long edge at which the model sees the bundled clip here

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or CHROMIUM=PATH")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def bundled() -> Iterator[str]:
    """The page as `python demo.py --web true` shows it."""
    assets = ROOT / "assets"
    with running(
        assets / "clip.mp4", assets / "clip_first.png", defaults={"max_long_edge": SMALL}, sessions=50
    ) as address:
        yield address


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[str]:
    with running(*write_clip(tmp_path_factory.mktemp("clip")), sessions=50) as address:
        yield address


@pytest.fixture
def visit(browser) -> Iterator:
    """Opens pages; in the end none of them has asked for anything elsewhere or failed."""
    contexts, troubles = [], []

    def open_page(address: str, width: int = 1280, height: int = 720) -> "Page":
        context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: request.url.startswith((address, "blob:")) or troubles.append(request.url))
        page.on("console", lambda line: "Content Security" in line.text and troubles.append(line.text))
        page.goto(address)
        page.wait_for_selector("body[data-ready=yes]")
        return Page(page)

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles


class Page:
    """What a person sees and does."""

    def __init__(self, page: "sync_api.Page"):
        self.page = page
        self.settle()
        self.session = "/api/sessions/" + page.evaluate("sessionStorage['vos-session']")
        self.http = httpx.Client(base_url=page.url, headers={"X-VOS": "1"})

    def settle(self) -> None:
        """Wait until what was done is saved and shown."""
        self.page.wait_for_timeout(60)
        self.until("document.body.dataset.busy !== 'yes'")
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until(self, expression: str) -> None:
        """Wait for an expression of the page; playwright's own way needs an eval, which the page forbids."""
        for _ in range(1200):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(expression)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def point(self, x: float, y: float, size: tuple[int, int]) -> tuple[float, float]:
        """Where a point of the picture, x and y in pixels of it, lies in the window; the whole picture is shown."""
        box = self.page.locator("#view").bounding_box()
        scale = min((box["width"] - 16) / size[1], (box["height"] - 16) / size[0])
        left = box["x"] + (box["width"] - size[1] * scale) / 2
        top = box["y"] + (box["height"] - size[0] * scale) / 2
        return left + x * scale, top + y * scale

    def drag(self, start: tuple, *ways: tuple, size: tuple[int, int]) -> None:
        self.page.mouse.move(*self.point(*start, size))
        self.page.mouse.down()
        for way in ways:
            self.page.mouse.move(*self.point(*way, size), steps=4)
        self.page.mouse.up()

    def shown(self) -> np.ndarray:
        """The canvas, as pixels."""
        self.settle()
        return np.asarray(Image.open(io.BytesIO(self.page.locator("#view").screenshot())).convert("RGB")).astype(int)

    def state(self) -> dict:
        return self.http.get(self.session).raise_for_status().json()

    def labels(self, frame: int, size: tuple[int, int]) -> np.ndarray:
        """What the server holds of a frame."""
        self.settle()
        data = self.http.get(f"{self.session}/labels/{frame}").raise_for_status().content
        return np.frombuffer(data, "<u2").reshape(size).astype(np.int32)

    def toast(self, text: str) -> None:
        self.page.locator("#toast", has_text=text).wait_for()

    def frame(self, number: int) -> None:
        self.until(f"document.getElementById('timeline').ariaValueNow == {number}")

    def download(self, *keys: str) -> bytes:
        with self.page.expect_download() as download:
            self.press(*keys)
        return Path(download.value.path()).read_bytes()


def test_the_bundled_clip_is_painted_tracked_corrected_and_exported(bundled, visit):
    size = (480, 854)
    page = visit(bundled)
    assert page.page.locator("#objects li").count() == 3, page.page.locator("#toast").inner_text()
    before = page.shown()

    page.press("n")  # a fourth object, painted
    page.page.locator("#objects li.chosen", has_text="Object 4").wait_for()
    page.drag((300, 250), (360, 280), size=size)
    painted = page.shown()
    x, y = page.point(330, 265, size)
    box = page.page.locator("#view").bounding_box()
    spot = int(y - box["y"]), int(x - box["x"])
    assert np.abs(painted[spot] - before[spot]).max() > 25
    labels = page.labels(0, size)
    assert labels[265, 330] == 4 and 600 < (labels == 4).sum() < 2500
    page.press("Control+z")
    page.settle()
    assert not (page.labels(0, size) == 4).any() and np.abs(page.shown()[spot] - before[spot]).max() < 10
    page.press("Control+Shift+z", "Delete")
    page.toast("removed from all frames")

    assert page.page.locator("#max_long_edge").input_value() == str(SMALL)
    page.press("r")  # frames appear as they are done
    page.page.locator("#job").wait_for()
    page.until("Number(document.getElementById('timeline').ariaValueNow) >= 2")
    assert (
        "frames/s" in page.page.locator("#figures").inner_text() and "MB" in page.page.locator("#figures").inner_text()
    )
    page.press("q")
    page.toast("What was done is kept")
    done = page.state()["job"]["done"]
    assert 2 <= done < 63 and page.state()["labelled"] == [[0, done]]
    assert np.abs(page.shown() - painted).mean() > 1  # another frame, another overlay

    page.press("Home", "3", "ArrowRight", "ArrowRight")  # the third object loses its head in frame 2
    page.frame(2)
    page.settle()
    mask = page.labels(2, size)
    ys, xs = np.nonzero(mask == 3)
    top, left, right = ys.min(), xs.min(), xs.max()
    page.press("e", *["]"] * 8)
    page.drag((left, top + 10), (right, top + 10), size=size)
    page.settle()
    corrected = page.labels(2, size)
    assert (corrected == 3).sum() < (mask == 3).sum() - 200 and page.state()["marked"] == [0, 2]
    after = page.labels(3, size)
    page.press("r")
    page.until("Number(document.getElementById('timeline').ariaValueNow) >= 3")
    page.press("q")
    page.toast("What was done is kept")
    assert np.array_equal(page.labels(2, size), corrected)
    assert not np.array_equal(page.labels(3, size), after)

    data = page.download("Shift+Digit1")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if name.endswith(".png")]
        assert len(names) == max(last for _, last in page.state()["labelled"]) + 1
        exported = np.asarray(Image.open(archive.open("masks/00002.png")))
    assert np.array_equal(exported, corrected)


def test_everything_is_done_with_keys_alone(tiny, visit):
    page = visit(tiny)
    page.press("Shift+Backspace")  # clears the mask
    page.settle()
    assert not page.labels(0, SIZE).any()
    page.press("r")
    page.toast("draw a mask first")
    page.press("Escape", "2", "F2")
    page.page.keyboard.type("blue one")
    page.press("Enter")
    page.page.locator("#objects li.chosen", has_text="blue one").wait_for()

    page.press("g")  # a polygon around the middle: from there to the right, down, and back
    page.press("Space", "d", "d", "d", "Shift+D", "Space", "Shift+S", "Space", "Enter")
    page.settle()
    first = page.labels(0, SIZE)
    assert set(np.unique(first)) == {0, 7} and (first == 7).sum() > 10
    page.press("1", "b", "Shift+A", "Shift+A")
    page.page.keyboard.down("Space")
    page.press("a", "a")
    page.page.keyboard.up("Space")
    page.settle()
    assert set(np.unique(page.labels(0, SIZE))) == {0, 1, 7}
    page.press("Control+z", "Control+y", *["Control+z"] * 3)
    assert np.array_equal(page.labels(0, SIZE), first_mask())
    page.press("r")
    page.toast("Tracked 7 frames")
    page.press("End")
    page.frame(FRAMES - 1)
    page.press(
        "Home", "PageDown", "v", "v", "v", "v", "o", "Shift+O", "+", "-", "Control+ArrowLeft", "0", "h", "h", "f", "f"
    )
    page.press("i")
    page.page.keyboard.type("5")
    page.press("Enter")
    page.frame(5)
    page.press("Shift+R")
    page.toast("Tracked 5 frames")
    page.press("p")
    page.frame(FRAMES - 1)
    assert b'"blue one"' in page.download("Shift+Digit2")
    page.press("?")
    keys = page.page.locator("#keys").inner_text()
    for action in page.page.locator("[data-action]").evaluate_all("all => all.map((one) => one.title)"):
        label, key = action.rsplit(" (", 1)
        assert label in keys and key.rstrip(")") in keys, action
    page.press("Escape")
    page.press("Tab")
    assert page.page.evaluate("document.activeElement.tagName") in ("BUTTON", "CANVAS", "INPUT", "SUMMARY")


def test_proposals_are_looked_at_and_taken(tiny, visit):
    page = visit(tiny)
    page.press("Shift+Backspace", "x")
    page.drag((15, 15), (50, 50), size=SIZE)
    page.page.locator("#hint", has_text="Enter takes the proposal").wait_for()
    assert not page.labels(0, SIZE).any()  # not yet
    page.press("Enter")
    page.settle()
    found, red = page.labels(0, SIZE) == 1, first_mask() == 1
    assert (found & red).sum() > 0.85 * (found | red).sum()
    page.press("2", "c")
    page.page.mouse.click(*page.point(72, 22, SIZE))
    page.page.locator("#hint", has_text="Enter takes the proposal").wait_for()
    page.press("Escape")
    page.settle()
    assert not (page.labels(0, SIZE) == 7).any()


def test_the_four_views_differ_and_show_the_same_mask(tiny, visit):
    page = visit(tiny)
    page.page.mouse.move(5, 5)
    views = {}
    for mode in ("overlay", "outline", "side", "cutout"):
        page.page.locator(f"[data-mode={mode}]").click()
        page.page.mouse.move(5, 5)
        views[mode] = page.shown()
    box = page.page.locator("#view").bounding_box()

    def at(view: str, x: float, y: float) -> np.ndarray:
        place = page.point(x, y, SIZE)
        return views[view][int(place[1] - box["y"]), int(place[0] - box["x"])]

    assert at("cutout", 5, 5).min() > 245 and at("cutout", 30, 30)[0] > 180 > at("cutout", 30, 30)[1]
    assert np.abs(at("overlay", 72, 20) - at("outline", 72, 20)).max() > 15
    assert np.abs(at("outline", 72, 20) - (60, 70, 220)).max() < 40
    middle = views["side"].shape[1] // 2
    left, right = views["side"][:, :middle], views["side"][:, middle:]
    assert np.abs(left - right[:, : left.shape[1]]).mean() > 1


def test_a_narrow_window_holds_everything(tiny, visit):
    for width, height in ((420, 860), (1280, 720)):
        page = visit(tiny, width, height)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.page.locator("button:visible, input:visible, select:visible, canvas:visible").evaluate_all(
            "(all, width) => all.filter((one) => { const area = one.getBoundingClientRect(); return area.left < 0 ||"
            " area.right > width + 0.5 || one.scrollWidth > one.clientWidth + 2; }).map((one) => one.outerHTML)",
            width,
        )
        assert wide == []
    page = visit(tiny, 420, 860)
    page.drag((5, 58), (40, 58), size=SIZE)
    page.settle()
    assert page.labels(0, SIZE)[58, 20] == 1


def test_bad_files_are_said_and_the_page_goes_on(tiny, visit, tmp_path):
    page = visit(tiny)

    def hand_in(picker: str, name: str, data: bytes) -> None:
        page.page.locator(picker).set_input_files({"name": name, "mimeType": "", "buffer": data})

    hand_in("#pick-video", "broken.mp4", os.urandom(2000))
    page.toast("broken.mp4: not a readable video")
    hand_in("#pick-video", "run.exe", b"MZ")
    page.toast("not a type")
    hand_in("#pick-mask", "mask.png", b"no")
    page.toast("mask.png")
    soft = io.BytesIO()
    picture = Image.fromarray(first_mask().astype(np.uint8) * 30).convert("RGB")
    picture.rotate(20, Image.Resampling.BICUBIC).save(soft, "PNG")
    hand_in("#pick-mask", "soft.png", soft.getvalue())
    page.toast("soft edges")
    page.press("Enter")  # the offer to snap has the focus
    page.toast("soft.png is the mask of frame 0")

    with VideoWriter(tmp_path / "three.mp4", (32, 48)) as video:
        for i in range(3):
            video.write(np.full((32, 48, 3), 40 * i, np.uint8), video.time_base * i)
    hand_in("#pick-video", "three.mp4", (tmp_path / "three.mp4").read_bytes())
    page.toast("three.mp4 is open")
    assert "48 × 32, 3 frames" in page.page.locator("#title").inner_text()
    page.press("r")
    page.toast("draw a mask first")


def test_two_tabs_and_a_session_that_has_ended(tiny, visit):
    one, two = visit(tiny), visit(tiny)
    one.press("Delete")
    one.toast("removed")
    assert one.page.locator("#objects li").count() == 1 and two.page.locator("#objects li").count() == 2
    one.page.reload()  # a reload comes back to its session
    one.page.wait_for_selector("body[data-ready=yes]")
    assert one.page.locator("#objects li").count() == 1
    one.http.delete(one.session)
    one.page.locator("#ended").wait_for()
    one.press("Enter")
    one.page.wait_for_selector("body[data-ready=yes]")
    one.until("document.querySelectorAll('#objects li').length == 2")


def test_another_site_cannot_use_the_page(tiny, browser, tmp_path):
    """A page of another origin (here: another port) tries what browsers allow without asking."""
    import http.server

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><p>hello")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        for options in (
            "{method: 'POST'}",
            "{method: 'POST', mode: 'no-cors'}",
            "{method: 'POST', headers: {'X-VOS': '1'}}",
        ):
            outcome = page.evaluate(
                f"fetch('{tiny}/api/sessions', {options}).then((a) => a.type + a.status, () => 'refused')"
            )
            assert outcome in ("refused", "opaque0")
        framed = page.evaluate(
            f"new Promise((done) => {{ const one = document.createElement('iframe'); one.src = '{tiny}/';"
            " one.onload = () => done(one.contentDocument === null ? 'foreign' : 'own'); document.body.append(one); })"
        )
        assert framed == "foreign"
        assert len(page.frames) == 2 and page.frames[1].locator("#view").count() == 0
    finally:
        context.close()
        server.shutdown()
        server.server_close()
