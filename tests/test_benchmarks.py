"""The layouts of the benchmarks, the masks a model is given in each, and the archives their servers take."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.benchmarks import DATASETS, given_mask, open_benchmark
from data.masks import write_mask
from data.submission import check_submission, pack_submission
from utils.errors import InputError

SIZE = (24, 32)


def labels(*ids: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """One 4 x 4 square for each id, in a place of its own; 255 becomes void."""
    out = np.zeros(size, np.uint8)
    for i in ids:
        place = 0 if i == 255 else 5 * i
        out[2:6, place : place + 4] = i
    return out


def add_video(root: Path, name: str, masks: dict[int, tuple[int, ...]], count: int = 4, sub: str = "", step: int = 1):
    """Frames 0, step, ... and masks that hold the given ids, below JPEGImages and Annotations of `root`."""
    images, annotations = root / "JPEGImages" / sub / name, root / "Annotations" / sub / name
    images.mkdir(parents=True)
    annotations.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", SIZE[::-1]).save(images / f"{i * step:05}.jpg")
    for i, ids in masks.items():
        write_mask(annotations / f"{i:05}.png", labels(*ids))


def given(video) -> dict[str, list[int]]:
    """What a model is given over a whole video: frame -> ids."""
    known: set[int] = set()
    out = {}
    for path in video.frames:
        mask = given_mask(video, path.stem, known)
        if mask is not None:
            out[path.stem] = [i for i in np.unique(mask).tolist() if i]
            known |= set(out[path.stem])
    return out


@pytest.fixture
def davis(tmp_path: Path) -> Path:
    add_video(tmp_path, "a", {0: (1, 2, 255), 1: (1, 2), 2: (1, 2, 3), 3: (1,)}, sub="480p")
    add_video(tmp_path, "b", {0: (1,)}, sub="480p")
    for year in ("2016", "2017"):
        (tmp_path / "ImageSets" / year).mkdir(parents=True)
        (tmp_path / "ImageSets" / year / "val.txt").write_text("b\na\n")
    return tmp_path


def test_davis_gives_the_first_mask_alone(davis: Path) -> None:
    benchmark = open_benchmark("davis2017", davis)
    b, a = benchmark.videos
    assert [video.name for video in benchmark.videos] == ["b", "a"]
    assert [path.name for path in a.frames] == [f"0000{i}.jpg" for i in range(4)]
    assert given(a) == {"00000": [1, 2]}
    assert given_mask(a, "00000", set()).max() == 2  # void is background
    assert (a.output_size, benchmark.preset, benchmark.unlabelled) == (SIZE, "davis2017", ("b",))


def test_davis2016_merges_and_reads_its_own_lists(davis: Path) -> None:
    lines = [f"/JPEGImages/480p/a/0000{i}.jpg /Annotations/480p/a/0000{i}.png" for i in range(4)]
    (davis / "ImageSets/2016/val.txt").write_text("\n".join(lines))
    (video,) = open_benchmark("davis2016", davis).videos
    assert given(video) == {"00000": [1]}
    assert np.array_equal(given_mask(video, "00000", set()) > 0, (labels(1, 2) > 0))
    write_mask(video.masks["00000"], labels(1) * 255)  # a single object as it is shipped
    assert np.array_equal(given_mask(video, "00000", set()), labels(1))


def test_davis_at_full_resolution_is_written_at_480p(davis: Path) -> None:
    for name in ("a", "b"):
        images, masks = davis / "JPEGImages/Full-Resolution" / name, davis / "Annotations/Full-Resolution" / name
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        Image.new("RGB", (64, 48)).save(images / "00000.jpg")
        write_mask(masks / "00000.png", labels(1, size=(48, 64)))
    video = open_benchmark("davis2017", davis, resolution="full").videos[0]
    assert video.frames[0].parent.parent.name == "Full-Resolution"
    assert given_mask(video, "00000", set()).shape == (48, 64)
    assert video.output_size == SIZE


@pytest.fixture
def youtube(tmp_path: Path) -> Path:
    add_video(tmp_path / "valid", "v", {0: (1,), 10: (1, 2)}, count=5, step=5)
    dense = tmp_path / "valid_all_frames/JPEGImages/v"
    dense.mkdir(parents=True)
    for i in range(25):
        Image.new("RGB", SIZE[::-1]).save(dense / f"{i:05}.jpg")
    objects = {
        "1": {"category": "dog", "frames": ["00000", "00005", "00010", "00015"]},
        "2": {"category": "tractor", "frames": ["00010", "00015"]},
    }
    (tmp_path / "valid/meta.json").write_text(json.dumps({"videos": {"v": {"objects": objects}}}))
    return tmp_path


def test_youtubevos_gives_objects_when_they_appear(youtube: Path) -> None:
    benchmark = open_benchmark("youtubevos2019", youtube)
    (video,) = benchmark.videos
    assert [path.stem for path in video.frames] == ["00000", "00005", "00010", "00015"]  # 00020 is not in meta.json
    assert given(video) == {"00000": [1], "00010": [2]}
    assert benchmark.seen == {"v": {1: True, 2: False}}
    assert benchmark.unlabelled == ("v",)
    assert video.output_size is None


def test_youtubevos_all_frames_is_dense_and_asks_for_the_sparse_ones(youtube: Path) -> None:
    (video,) = open_benchmark("youtubevos2018", youtube, "valid_all_frames").videos
    assert [path.stem for path in video.frames] == [f"{i:05}" for i in range(16)]
    assert video.asked == ["00000", "00005", "00010", "00015"]
    assert given(video) == {"00000": [1], "00010": [2]}


@pytest.mark.parametrize("dataset", ["mose", "lvos"])
def test_folders_of_splits(tmp_path: Path, dataset: str) -> None:
    add_video(tmp_path / "valid", "x", {0: (1,), 1: (1,), 2: (1, 3), 3: (3,)})
    (tmp_path / "valid/unseen_videos.txt").write_text("x\n")
    benchmark = open_benchmark(dataset, tmp_path)
    assert given(benchmark.videos[0]) == {"00000": [1], "00002": [3]}
    assert benchmark.unlabelled == ()
    assert benchmark.seen.get("x", {}).get(3) == (False if dataset == "lvos" else None)


def test_vost_runs_the_annotated_frames(tmp_path: Path) -> None:
    add_video(tmp_path, "x", {0: (1,), 2: (1, 2)})
    (tmp_path / "ImageSets").mkdir()
    (tmp_path / "ImageSets/val.txt").write_text("x\n")
    (video,) = open_benchmark("vost", tmp_path).videos
    assert [path.stem for path in video.frames] == ["00000", "00002"]
    assert given(video) == {"00000": [1]}


def test_folder_takes_every_video_or_a_list(tmp_path: Path) -> None:
    for name in ("x", "y"):
        add_video(tmp_path, name, {0: (1,)})
    (tmp_path / "ImageSets").mkdir()
    (tmp_path / "ImageSets/mine.txt").write_text("y\n")
    assert [video.name for video in open_benchmark("folder", tmp_path).videos] == ["x", "y"]
    assert [video.name for video in open_benchmark("folder", tmp_path, "mine").videos] == ["y"]


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_folder_that_is_something_else_is_named_with_the_layout(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(InputError, match="needed is") as error:
        open_benchmark(dataset, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_errors_name_what_is_wrong(davis: Path, youtube: Path) -> None:
    for arguments, text in (
        (("davis", davis), "choose one of davis2016"),
        (("davis2017", davis, "vall"), "splits here: val"),
        (("davis2017", davis, "val", "4k"), "480p or full"),
        (("davis2017", davis / "nowhere"), "nowhere: no such folder"),
        (("davis2017", davis, "val", "full"), "JPEGImages/Full-Resolution: no such folder"),
        (("youtubevos2019", youtube, "test"), "test/JPEGImages: no such folder"),
    ):
        with pytest.raises(InputError, match=text):
            open_benchmark(*arguments)
    (davis / "Annotations/480p/a/00000.png").unlink()
    with pytest.raises(InputError, match=r"a/00000\.png: no such file"):
        open_benchmark("davis2017", davis)
    (youtube / "valid/JPEGImages/v/00010.jpg").unlink()
    with pytest.raises(InputError, match="lacks frame 00010"):
        open_benchmark("youtubevos2019", youtube)


def write_results(benchmark, folder: Path) -> Path:
    for video in benchmark.videos:
        (folder / video.name).mkdir(parents=True)
        for path in video.frames:
            write_mask(folder / video.name / f"{path.stem}.png", labels(1))
    return folder


def test_archives_hold_what_the_servers_want(youtube: Path, davis: Path, tmp_path: Path) -> None:
    benchmark = open_benchmark("youtubevos2019", youtube, "valid_all_frames")
    masks = write_results(benchmark, tmp_path / "dense")
    pack_submission(benchmark, masks, tmp_path / "submission.zip")
    with zipfile.ZipFile(tmp_path / "submission.zip") as file:
        assert file.namelist() == [f"Annotations/v/{frame}.png" for frame in ("00000", "00005", "00010", "00015")]
    benchmark = open_benchmark("davis2017", davis)
    masks = write_results(benchmark, tmp_path / "davis")
    pack_submission(benchmark, masks, tmp_path / "submission.zip")
    with zipfile.ZipFile(tmp_path / "submission.zip") as file:
        assert file.namelist()[:2] == ["b/00000.png", "b/00001.png"]


def test_a_bad_archive_is_refused_and_not_left_behind(davis: Path, tmp_path: Path) -> None:
    benchmark = open_benchmark("davis2017", davis)
    masks = write_results(benchmark, tmp_path / "masks")
    archive = tmp_path / "submission.zip"
    file = masks / "a/00002.png"
    for mask, text in ((labels(1, 3), "unknown object id 3"), (labels(1)[:12], "32 x 12 pixels instead of 32 x 24")):
        write_mask(file, mask)
        with pytest.raises(ValueError, match=text):
            pack_submission(benchmark, masks, archive)
    Image.fromarray(labels(1)).save(file)
    with pytest.raises(ValueError, match="no indexed 8-bit PNG"):
        pack_submission(benchmark, masks, archive)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"00002\.png"):
        pack_submission(benchmark, masks, archive)
    assert not list(tmp_path.glob("*submission*"))
    with zipfile.ZipFile(archive, "w") as made_by_hand:
        made_by_hand.write(masks / "a/00000.png", "a/00000.png")
    with pytest.raises(ValueError, match="lacks b/00000.png"):
        check_submission(benchmark, archive)
