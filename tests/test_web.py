"""The server of the page, without a browser: what it does, what it refuses, and that it lives on."""

import gzip
import http.client
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("uvicorn", reason="needs requirements-web.txt")
pytest.importorskip("httpx", reason="needs requirements-dev.txt")

import demo
from data.masks import write_mask
from data.video import open_frames
from tests.web_server import FRAMES, ROOT, SIZE, WEIGHTS, Tab, first_mask, picture, running, wait_for, write_clip
from utils.cli import run
from web.sessions import Sessions


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> tuple[Path, Path]:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def address(clip) -> Iterator[str]:
    with running(*clip, upload_limit=200_000, sessions=3) as address:
        yield address


@pytest.fixture
def tab(address) -> Iterator[Tab]:
    with Tab(address) as tab:
        yield tab


def tracked(clip: tuple[Path, Path], given: dict[int, np.ndarray], order) -> dict[int, np.ndarray]:
    """What the tracker itself says."""
    from models import Tracker
    from utils.checkpoint import load_model

    images = [frame.image for frame in open_frames(clip[0])]
    tracker = Tracker(load_model(WEIGHTS))
    return {i: tracker.step(images[i], given.get(i)).labels for i in order}


def test_a_session_begins_with_the_clip_and_its_mask(tab, clip):
    assert tab.state["video"]["length"] == FRAMES
    assert [item["id"] for item in tab.state["objects"]] == [1, 7]
    assert tab.state["marked"] == [0] and tab.state["labelled"] == [[0, 0]]
    assert np.array_equal(tab.labels(0), first_mask())
    images = [frame.image for frame in open_frames(clip[0])]
    for i in (5, 0, 7):
        shown = np.asarray(Image.open(io.BytesIO(tab.call("GET", f"frames/{i}").content)))
        assert np.abs(shown.astype(int) - images[i]).mean() < 4
    for frame in ("8", "-1", "x", "99999999999"):
        assert "frames 0 to 7" in tab.refused(400, "GET", f"frames/{frame}")


def test_what_is_drawn_is_kept_and_nothing_else(tab):
    labels = np.zeros(SIZE, np.int32)
    labels[5:9, 5:9], labels[50:60, 5:9] = 7, 4321  # the second is no object
    state = tab.draw(3, labels)
    assert state["marked"] == [0, 3]
    assert np.array_equal(tab.labels(3), np.where(labels == 7, 7, 0))
    assert tab.draw(3, labels * 0)["marked"] == [0]  # taken back
    body = gzip.compress(bytes(10))
    assert "10 bytes in place of" in tab.refused(400, "PUT", "labels/3?revision=1", content=body)
    assert "damaged" in tab.refused(400, "PUT", "labels/3?revision=1", content=b"no gzip")
    assert "video before" in tab.refused(400, "PUT", "labels/3?revision=0", content=body)
    assert "larger" in tab.refused(413, "PUT", "labels/3?revision=1", content=os.urandom(100_000))
    bomb = gzip.compress(bytes(60_000_000))  # inflates to far more than a mask
    assert "in place of" in tab.refused(400, "PUT", "labels/3?revision=1", content=bomb)
    assert tab.do("DELETE", "labels/0")["labelled"] == []


def test_tracking_both_ways_is_what_the_tracker_says(tab, clip):
    job = tab.track(0)
    assert (job["state"], job["done"], job["message"]) == ("done", 7, "Tracked 7 frames.")
    assert job["notes"]["objects"] == 2 and job["notes"]["memory_bytes"] > 10**6 and job["rate"] > 0
    expected = tracked(clip, {0: first_mask()}, range(FRAMES))
    for i in range(FRAMES):
        assert np.array_equal(tab.labels(i), expected[i]), i
    assert tab.do("GET")["labelled"] == [[0, 7]]

    tab.do("DELETE", "labels/0")
    last = tab.labels(7)
    assert tab.track(7, backwards=True)["state"] == "done"
    expected = tracked(clip, {7: last}, range(FRAMES - 1, -1, -1))
    for i in range(FRAMES):
        assert np.array_equal(tab.labels(i), expected[i]), i


def test_a_correction_goes_on_from_its_frame(tab, clip):
    tab.track(0)
    before = {i: tab.labels(i) for i in range(FRAMES)}
    corrected = before[3].copy()
    corrected[corrected == 7] = 0
    corrected[2:26, 4:12] = 1
    tab.draw(3, corrected)
    tab.draw(6, np.where(before[6] == 1, 0, before[6]))  # object 1 was erased there
    tab.track(3)
    assert np.array_equal(tab.labels(3), corrected)
    assert all(np.array_equal(tab.labels(i), before[i]) for i in range(3))
    assert not np.array_equal(tab.labels(4), before[4]) and not (tab.labels(4) == 7).any()
    assert (tab.labels(5) == 1).any() and not (tab.labels(6) == 1).any() and not (tab.labels(7) == 1).any()


def test_objects_come_and_go(tab):
    item = tab.do("POST", "objects", json={"name": "  a   cup "})
    assert item == {"id": 8, "name": "a cup", "color": item["color"], "hidden": False}
    state = tab.do("PATCH", "objects/8", json={"name": "cup", "color": "#FF0080", "hidden": True})
    assert state["objects"][-1] == {"id": 8, "name": "cup", "color": "#ff0080", "hidden": True}
    assert "#rrggbb" in tab.refused(400, "PATCH", "objects/8", json={"color": "red;"})
    assert "no object 9" in tab.refused(400, "PATCH", "objects/9", json={"name": "x"})

    assert [item["id"] for item in tab.do("DELETE", "objects/7")["objects"]] == [1, 8]
    assert set(np.unique(tab.labels(0))) == {0, 1}
    tab.do("POST", "objects/7/restore")
    assert np.array_equal(tab.labels(0), first_mask())
    assert "was not removed" in tab.refused(400, "POST", "objects/7/restore")
    tab.do("DELETE", "objects/7")
    mask = io.BytesIO()
    Image.fromarray((first_mask() == 1).astype(np.uint8) * 7).save(mask, "PNG")
    tab.do("POST", "masks/2?name=2.png", content=mask.getvalue())  # a removed id begins anew
    assert set(np.unique(tab.labels(0))) == {0, 1} and set(np.unique(tab.labels(2))) == {0, 7}


def test_nothing_to_track_is_said(tab):
    tab.do("DELETE", "labels/0")
    for backwards, where in ((False, "an earlier one"), (True, "a later one")):
        job = tab.track(4, backwards=backwards)
        assert job["state"] == "failed" and where in job["message"] and "draw a mask" in job["message"]
    tab.draw(7, first_mask())
    assert "nothing to track" in tab.track(7)["message"]
    assert "an earlier one" in tab.track(4)["message"]
    assert tab.track(7, backwards=True)["state"] == "done"
    assert "max_long_edge is 1" in tab.refused(400, "POST", "track", json={"frame": 0, "max_long_edge": 1})
    assert "no weights" in tab.refused(400, "POST", "track", json={"frame": 0, "checkpoint": "../../etc/passwd"})
    assert "99" in tab.track(0, device="cuda:99")["message"]


def test_a_stopped_run_keeps_what_is_done_and_goes_on(tmp_path):
    clip = write_clip(tmp_path, 24)
    with running(*clip) as address, Tab(address) as tab:
        tab.do("POST", "track", json={"frame": 0})
        assert "already" in tab.refused(400, "POST", "track", json={"frame": 0})
        wait_for(lambda: tab.do("GET")["job"]["done"] >= 3)
        state = tab.do("POST", "stop")
        done = state["job"]["done"]
        assert state["job"]["state"] == "stopped" and 3 <= done < 23 and f"{done} of 23" in state["job"]["message"]
        assert state["labelled"] == [[0, done]]
        assert tab.track(done)["done"] == 23 - done
        assert tab.do("GET")["labelled"] == [[0, 23]]


def test_masks_come_back_from_the_zip(tab, address):
    tab.do("PATCH", "objects/7", json={"name": "blue", "color": "#0000ff"})
    tab.track(0)
    labels = [tab.labels(i) for i in range(FRAMES)]
    name, data = tab.export("masks")
    assert name == "clip_masks.zip"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for i in range(FRAMES):
            mask = Image.open(archive.open(f"masks/{i:05d}.png"))
            assert mask.mode == "P" and np.array_equal(np.asarray(mask), labels[i])
    check_return(address, "masks.zip", data, labels, "blue")


def test_masks_come_back_from_coco(tab, address):
    coco = pytest.importorskip("pycocotools.mask")
    tab.do("PATCH", "objects/7", json={"name": "blue", "color": "#0000ff"})
    tab.track(0)
    labels = [tab.labels(i) for i in range(FRAMES)]
    name, data = tab.export("coco")
    content = json.loads(data)
    assert name == "clip_coco.json" and [image["file_name"] for image in content["images"]][3] == "00003.png"
    assert {item["id"]: item["name"] for item in content["categories"]} == {1: "Object 1", 7: "blue"}
    read = [np.zeros(SIZE, np.int32) for _ in range(FRAMES)]
    for item in content["annotations"]:
        mask = coco.decode(item["segmentation"])
        assert item["area"] == mask.sum() and item["bbox"] == coco.toBbox(item["segmentation"]).tolist()
        read[item["image_id"]][mask > 0] = item["category_id"]
    assert all(map(np.array_equal, read, labels))
    check_return(address, "masks.json", data, labels, "blue")


def check_return(address: str, name: str, data: bytes, labels: list[np.ndarray], title: str) -> None:
    """A new session takes the export in; it then holds the same, and knows which frame was drawn."""
    with Tab(address) as other:
        other.do("DELETE", "labels/0")
        other.do("POST", f"masks/0?name={name}", content=data)
        job = other.finish()
        assert job["state"] == "done" and f"{FRAMES} masks" in job["message"], job
        assert all(np.array_equal(other.labels(i), labels[i]) for i in range(FRAMES))
        assert other.do("GET")["marked"] == [0]


def test_the_overlay_has_every_frame_and_its_time(tab, clip, tmp_path):
    tab.do("PATCH", "objects/7", json={"color": "#00ff00"})
    name, data = tab.export("overlay", opacity=1.0)
    (tmp_path / name).write_bytes(data)
    frames, source = list(open_frames(tmp_path / name)), list(open_frames(clip[0]))
    assert [frame.time for frame in frames] == [frame.time for frame in source]
    assert np.abs(frames[0].image[20, 70].astype(int) - (0, 255, 0)).max() < 24
    assert np.abs(frames[5].image.astype(int) - source[5].image).mean() < 4  # it has no mask


@pytest.mark.parametrize("kind", ["webm", "mov"])
def test_one_object_comes_back_from_its_alpha_video(tab, kind):
    tab.track(0)
    labels = [tab.labels(i) for i in range(FRAMES)]
    assert "choose the object" in failure(tab, kind, object=99)
    name, data = tab.export(kind, object=7)
    assert name == f"clip_Object_7.{kind}"
    tab.do("DELETE", "objects/7")
    new = tab.do("POST", "objects", json={})["id"]
    tab.do("POST", f"masks/0?name={name}&object={new}", content=data)
    assert tab.finish()["state"] == "done"
    for i in range(FRAMES):
        ours, theirs = tab.labels(i) == new, labels[i] == 7
        assert (ours & theirs).sum() > 0.97 * (ours | theirs).sum()
        assert np.array_equal(tab.labels(i) == 1, (labels[i] == 1) & ~ours)


def failure(tab: Tab, kind: str, **options: object) -> str:
    tab.do("POST", "exports", json={"kind": kind, **options})
    job = tab.finish()
    assert job["state"] == "failed"
    return job["message"]


def test_exports_without_a_mask_are_refused(tab):
    tab.do("DELETE", "labels/0")
    assert "no frame has a mask" in failure(tab, "masks")
    assert "no export" in tab.refused(400, "POST", "exports", json={"kind": "exe"})


def test_masks_that_do_not_fit_are_refused(tab, tmp_path):
    def zipped(**entries: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return file.getvalue()

    def taken(name: str, data: bytes) -> str:
        tab.do("POST", f"masks/0?name={name}", content=data)
        job = tab.finish()
        assert job["state"] == "failed"
        return job["message"]

    write_mask(tmp_path / "small.png", np.ones((8, 8), np.int32))
    small = (tmp_path / "small.png").read_bytes()
    assert "small.png: the mask is 8x8" in tab.refused(400, "POST", "masks/0?name=small.png", content=small)
    blank = io.BytesIO()
    Image.new("L", SIZE[::-1]).save(blank, "PNG")
    assert "background" in tab.refused(400, "POST", "masks/0?name=a.png", content=blank.getvalue())
    assert "cannot be decoded" in tab.refused(400, "POST", "masks/0?name=a.png", content=b"GIF89a, not")
    soft = io.BytesIO()
    Image.fromarray(first_mask().astype(np.uint8) * 30).resize((96, 64)).convert("RGB").rotate(
        20, Image.Resampling.BICUBIC
    ).save(soft, "PNG")
    assert "snap_colors" in tab.refused(400, "POST", "masks/4?name=s.png", content=soft.getvalue())
    assert len(tab.do("POST", "masks/4?name=s.png&snap=true", content=soft.getvalue())["objects"]) >= 2
    assert np.array_equal(tab.labels(0), first_mask())

    assert "no whole zip" in taken("a.zip", b"PK no")
    assert "no image" in taken("a.zip", zipped(**{"readme.txt": b"hello"}))
    assert "no frame 00099" in taken("a.zip", zipped(**{"00099.png": small}))
    assert "no frame passwd" in taken("a.zip", zipped(**{"../../../etc/passwd.png": small}))
    assert "unpacks to more" in taken("a.zip", zipped(**{"00000.png": bytes(5_000_000)}))
    assert "more than the video has frames" in taken("a.zip", zipped(**{f"{i}.txt": b"" for i in range(50)}))
    assert "COCO" in taken("a.json", b"[" * 5000)
    image = {"id": 1, "file_name": "00000.png", "height": SIZE[0], "width": SIZE[1]}
    for counts in ("zz", [1, 2], [10**18], [-5, 64 * 96 + 5], {"a": 1}, "P" * 100):
        broken = {"image_id": 1, "category_id": 1, "segmentation": {"size": list(SIZE), "counts": counts}}
        content = {"images": [image], "categories": [], "annotations": [broken]}
        assert "RLE" in taken("a.json", json.dumps(content).encode())
    assert "not a readable video" in taken("a.webm", b"no video")


def test_videos_that_cannot_be_used_leave_the_one_before(tab, clip, tmp_path):
    data = clip[0].read_bytes()
    for name in ("../../x.mp4", "..%2f..%2fx.mp4", "a%00.mp4", ".mp4", "a%5Cb.mp4", "C%3A.mp4", "x" * 250 + ".mp4"):
        assert tab.call("POST", f"video?name={name}", content=data).status_code in (400, 415), name
    for name in ("run.sh", "page.html", "list.m3u8", "x.mp4.exe", ""):
        assert "not a type" in tab.refused(415, "POST", f"video?name={name}", content=data)
    assert "empty" in tab.refused(400, "POST", "video?name=a.mp4", content=b"")
    assert "larger than the limit" in tab.refused(413, "POST", "video?name=a.mp4", content=bytes(300_000))

    def endless() -> Iterator[bytes]:  # says nothing of its size
        for _ in range(30):
            yield bytes(10_000)

    assert "larger than the limit" in tab.refused(413, "POST", "video?name=a.mp4", content=endless())
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(data)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret.as_uri()}\n#EXT-X-ENDLIST\n"
    concat = f"ffconcat version 1.0\nfile '{secret}'\n"
    for broken in (data[:300], os.urandom(5000), b"GIF89a", playlist.encode(), concat.encode()):
        message = tab.refused(400, "POST", "video?name=a.mp4", content=broken)
        assert message.startswith("a.mp4: ") and "give a" in message, message
    state = tab.do("GET")
    assert state["revision"] == 1 and np.array_equal(tab.labels(0), first_mask())
    assert tab.track(0)["state"] == "done"


def test_another_video_takes_the_place(tab, clip, tmp_path):
    write_clip(tmp_path, 3)
    state = tab.do("POST", "video?name=other.mp4", content=(tmp_path / "clip.mp4").read_bytes())
    assert state["video"] | {"title": "other.mp4", "length": 3} == state["video"]
    assert state["marked"] == [] and [item["name"] for item in state["objects"]] == ["Object 1"]
    assert "begin a folder" in tab.refused(400, "PUT", "folder/a.png", content=b"x")
    tab.do("POST", "folder")
    for i in (2, 10, 1):
        file = io.BytesIO()
        Image.fromarray(picture(i)).save(file, "PNG")
        tab.do("PUT", f"folder/{i}.png", content=file.getvalue())
    tab.refused(415, "PUT", "folder/a.html", content=b"x")
    tab.refused(400, "PUT", "folder/.a.png", content=b"x")
    state = tab.do("PUT", "folder", json={"title": "frames"})
    assert state["video"]["length"] == 3 and state["video"]["title"] == "frames"
    shown = np.asarray(Image.open(io.BytesIO(tab.call("GET", "frames/2").content)))
    assert np.abs(shown.astype(int) - picture(10)).mean() < 4  # natural order
    tab.draw(0, first_mask() == 1)
    assert tab.track(0)["state"] == "done"
    assert tab.do("POST", "bundled")["video"]["title"] == "clip.mp4"
    assert np.array_equal(tab.labels(0), first_mask())


def test_weights_are_taken_in_without_running_code(tab, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    tab.refused(415, "POST", "checkpoints?name=evil.py", content=b"x")
    state = tab.do("POST", "checkpoints?name=evil.pth", content=(tmp_path / "evil.pth").read_bytes())
    assert state["checkpoints"] == ["starter.safetensors", "evil.pth"]
    job = tab.track(0, checkpoint="evil.pth", model="aott")
    assert job["state"] == "failed" and "could run code" in job["message"] and not (tmp_path / "ran").exists()
    tab.do("POST", "checkpoints?name=mine.safetensors", content=b"short")
    assert "mine.safetensors: is no weights file" in tab.track(0, checkpoint="mine.safetensors")["message"]
    name = f"mine/{'x' * 9}.safetensors".replace("/", "%2F")
    tab.refused(400, "POST", f"checkpoints?name={name}", content=b"x")
    tab.do("POST", "checkpoints?name=again.safetensors", content=WEIGHTS.read_bytes())
    assert tab.track(0, checkpoint="again.safetensors", max_long_edge=48)["state"] == "done"


def test_proposals_find_what_is_clicked(tab):
    box = tab.call("POST", "proposals/0", json={"box": [15, 15, 50, 50]}).content
    click = tab.call("POST", "proposals/0", json={"points": [[32, 32, True]]}).content
    for data in (box, click):
        found = np.frombuffer(data, np.uint8).reshape(SIZE) > 0
        red = first_mask() == 1
        assert (found & red).sum() > 0.85 * (found | red).sum()
    for body in ({}, {"points": [[1, 1, False]]}, {"points": [[500, 1, True]]}, {"box": [1, 2]}, {"box": [9, 9, 9, 9]}):
        assert tab.call("POST", "proposals/0", json=body).status_code == 400, body
    assert "no JSON" in tab.refused(400, "POST", "proposals/0", content=b"{")


def test_a_proposer_of_ones_own_takes_the_place(clip, tmp_path):
    from utils.errors import InputError
    from web.proposals import load_proposer

    example = (ROOT / "web" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "sam.py").write_text(example)
    with running(*clip, proposer=load_proposer(f"{tmp_path}/sam.py:propose")) as address, Tab(address) as tab:
        data = tab.call("POST", "proposals/0", json={"points": [[30, 30, True]]}).content
        image = next(iter(open_frames(clip[0]))).image
        assert np.array_equal(np.frombuffer(data, np.uint8).reshape(SIZE) > 0, image[..., 0] > 200)
    for name in ("sam.py", f"{tmp_path}/none.py:guess", f"{tmp_path}/sam.py:other"):
        with pytest.raises(InputError, match="--proposer"):
            load_proposer(name)


def test_sessions_do_not_see_each_other_and_leave_nothing(clip, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with running(*clip, sessions=2) as address:
        (root,) = tmp_path.glob("vos-page-*")
        one, two = Tab(address), Tab(address)
        assert root.stat().st_mode & 0o077 == 0
        one.draw(2, first_mask())
        name, _ = one.export("masks")
        assert not two.labels(2).any() and two.do("GET")["job"] is None
        two.refused(404, "GET", f"exports/{name}")
        assert "most at a time" in one.http.post("/api/sessions").json()["error"]
        raw = http.client.HTTPConnection(address.removeprefix("http://"))  # sends paths as they are
        hosts_file = "%2e%2e%2f" * 12 + "etc/hosts"
        ways_out = (
            "..%2f..%2fclip",
            "../../../../etc/hosts",
            hosts_file,
            name + "%00",
            "%2fetc%2fhosts",
            "//etc/hosts",
        )
        for path in [*(f"{one.root}/exports/{way}" for way in ways_out), *(f"/page/{way}" for way in ways_out)]:
            raw.request("GET", path)
            answer = raw.getresponse()
            answer.read()
            assert answer.status in (404, 405), path
        assert one.http.get("/api/sessions/guess").status_code == 410
        assert len(list(root.glob("session-*"))) == 2
        one.do("DELETE")
        assert one.call("GET").status_code == 410 and len(list(root.glob("session-*"))) == 1
        two.do("POST", "track", json={"frame": 0})
    assert list(tmp_path.glob("vos-page-*")) == []  # also with a run under way


def test_what_a_killed_server_left_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age in (("killed", 100), ("starting", 0)):
        (tmp_path / f"vos-page-{name}" / "session-1").mkdir(parents=True)
        (tmp_path / f"vos-page-{name}" / ".lock").touch()
        os.utime(tmp_path / f"vos-page-{name}", (time.time() - age,) * 2)
    one = Sessions(1, 1.0, print)
    os.utime(one.root, (1, 1))
    two = Sessions(1, 1.0, print)
    assert {path.name for path in tmp_path.iterdir()} == {"vos-page-starting", one.root.name, two.root.name}
    one.close()
    two.close()
    assert [path.name for path in tmp_path.iterdir()] == ["vos-page-starting"]


def test_a_closed_tab_ends_its_session(clip):
    with running(*clip, grace=4.0) as address:
        tab = Tab(address)
        with tab.http.stream("GET", f"{tab.root}/events") as events:
            lines = events.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["video"]["length"] == FRAMES
            time.sleep(5)
            tab.do("POST", "track", json={"frame": 0})  # still there
            seen = [
                json.loads(line[6:]) for line, _ in zip(lines, range(12), strict=False) if line.startswith("data: ")
            ]
            assert any(state["job"] and state["job"]["done"] > 0 for state in seen)
        time.sleep(5)
        wait_for(lambda: tab.call("GET").status_code == 410 or time.sleep(8))  # asking keeps it alive
        other = Tab(address)  # and the server lives on
        assert np.array_equal(other.labels(0), first_mask())


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"X-VOS": None},
    ],
)
def test_other_sites_are_refused(address, headers):
    import httpx

    mine = {"X-VOS": "1"} | headers
    request = httpx.Request("POST", f"{address}/api/sessions", headers={k: v for k, v in mine.items() if v is not None})
    with httpx.Client() as http:
        answer = http.send(request)
    assert answer.status_code in (400, 403), headers
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_asks_for_nothing_from_elsewhere(address):
    import httpx

    answer = httpx.get(address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy
    for path in (ROOT / "web" / "page").iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "//cdn" not in text, path
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["x-content-type-options"] == "nosniff"


def refused(capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as caught:
        run(demo.main, ["--web", "true", *map(str, words)])
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    return line


def test_what_the_page_cannot_start_with_is_one_line(capsys, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: cannot be used" in refused(capsys, "--port", port)
    assert "--host 1.2.3.4" in refused(capsys, "--host", "1.2.3.4", "--port", 0)
    assert "no such file" in refused(capsys, "--input", tmp_path / "none.mp4")
    assert "--upload_limit 0" in refused(capsys, "--upload_limit", 0)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "pip install -r requirements-web.txt" in refused(capsys)


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_script_serves_until_it_is_ended(clip, tmp_path, end):
    command = [sys.executable, ROOT / "demo.py", "--web", "true", "--port", "0", "--input", clip[0]]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    address = process.stdout.readline().split()[0]
    assert address.startswith("http://127.0.0.1:")
    tab = Tab(address)
    assert tab.state["marked"] == [] and len(tab.state["objects"]) == 1
    with tab.http.stream("GET", f"{tab.root}/events"):
        process.send_signal(end)
        assert process.wait(20) == (0 if end == signal.SIGINT else -signal.SIGTERM)
    assert list(tmp_path.glob("vos-page-*")) == []
