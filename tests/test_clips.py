"""Training clips from videos and still images: which frames, which geometry, which objects, and what can go wrong."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from data.clips import Mixture, StillClips, VideoClips, collate, read_labels, reflect, worker_init
from data.training import describe, known_names, open_training_data
from data.transforms import (
    FILL,
    STRONG,
    ClipTransform,
    ColorJitter,
    StillTransform,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    choose_objects,
    count_labels,
    merge_clips,
    resize_window,
)
from utils.errors import InputError

H, W = 48, 64
# Everything at its own size, unmoved: what comes out shows which frames were taken.
PLAIN = ClipTransform(size=(H, W), short_edge=H, scale=(1.0, 1.0), flip=0.0)


def write_video(root: Path, name: str, length: int = 20, ids=(1, 2), first_two: int = 0) -> None:
    """Frames as lossless PNG whose grey value is 10 x their number; object 1 from the start, 2 from `first_two` on."""
    for part in ("JPEGImages", "Annotations"):
        (root / part / name).mkdir(parents=True)
    for i in range(length):
        mask = np.zeros((H, W), np.uint8)
        mask[5:25, i : i + 20] = ids[0]
        if i >= first_two:
            mask[28:44, 20:40] = ids[1]
        Image.fromarray(np.full((H, W, 3), 10 * i, np.uint8)).save(root / "JPEGImages" / name / f"{i:05d}.png")
        image = Image.fromarray(mask, "P")
        image.putpalette([i for i in range(256) for _ in range(3)])
        image.save(root / "Annotations" / name / f"{i:05d}.png")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    root = tmp_path_factory.mktemp("davis")
    write_video(root, "a")
    write_video(root, "b", ids=(3, 9))
    (root / "train.txt").write_text("b\n\n")
    return root


@pytest.fixture(scope="module")
def stills(tmp_path_factory):
    """Images in which an object is bright, and its number is its green value."""
    root = tmp_path_factory.mktemp("stills")
    for part in ("images/set", "masks/set"):
        (root / part).mkdir(parents=True)
    for name in range(3):
        mask = np.zeros((120, 160), np.uint8)
        mask[20:60, 20:70], mask[50:110, 80:140] = 4, 6 + name
        image = np.dstack([np.where(mask > 0, 250, 0), mask * 20, np.zeros_like(mask)]).astype(np.uint8)
        Image.fromarray(image).save(root / "images/set" / f"{name}.png")
        Image.fromarray(mask).save(root / "masks/set" / f"{name}.png")
    return root


def numbers(sample) -> list[int]:
    """Which frames of a video of `write_video` a sample shows."""
    return [int(value) // 10 for value in sample["frames"][:, 0, 0, 0]]


# --- which frames -------------------------------------------------------------------------------------------------


def test_reflection_is_that_of_numpy():
    for length in (2, 3, 7):
        padded = np.pad(np.arange(length), (0, 40), mode="reflect")
        assert [reflect(i, length) for i in range(length + 40)] == padded.tolist()
    assert [reflect(i, 1) for i in range(4)] == [0, 0, 0, 0]


def test_frames_of_a_clip(videos):
    dataset = VideoClips(videos, transform=PLAIN, max_gap=3, merge=0.0)
    steps, forward = set(), 0
    for index in range(80):
        sample = dataset[index]
        shown = numbers(sample)
        assert sample["name"] == "ab"[index % 2] and len(shown) == 5
        for i, labels in zip(shown, sample["labels"], strict=True):  # image and mask are of one moment
            assert labels[10, i] == 1 and (i == 0 or labels[10, i - 1] == 0)
        gaps = np.diff(shown)
        steps |= set(np.abs(gaps).tolist())
        forward += gaps[0] > 0
        # Past the end the order turns, once at most here.
        turns = np.flatnonzero(np.sign(gaps[1:]) * np.sign(gaps[:-1]) < 0)
        assert len(turns) <= 1
        for turn in turns:
            assert {0, 19} & set(range(shown[turn + 1] - 3, shown[turn + 1] + 4))
    assert steps <= {0, 1, 2, 3} and {1, 2, 3} <= steps
    assert 25 < forward < 55, "forward and backward clips should be equally frequent"


def test_the_reference_shows_all_objects_where_it_can(tmp_path):
    write_video(tmp_path, "late", first_two=12)
    dataset = VideoClips(tmp_path, transform=PLAIN, max_gap=4, merge=0.0)
    both = []
    for index in range(60):
        shown, count = numbers(dataset[index]), dataset[index]["num_objects"]
        assert count == (2 if shown[0] >= 12 else 1)
        both.append(count == 2 or max(shown) < 12)
    # A clip of independent frames would break the rule in more than a third of the cases.
    assert np.mean(both) > 0.9


def test_the_reference_is_not_nearly_empty(tmp_path):
    write_video(tmp_path, "thin")
    for i in range(0, 20, 2):
        mask = np.zeros((H, W), np.uint8)
        mask[:10, :15] = 1  # 150 pixels: enough for the crop, too few for a reference
        Image.fromarray(mask).save(tmp_path / "Annotations/thin" / f"{i:05d}.png")
    dataset = VideoClips(tmp_path, transform=PLAIN, merge=0.0)
    assert all(numbers(dataset[i])[0] % 2 == 1 for i in range(40))


def test_sequence_lists(videos):
    assert [name for name, _ in VideoClips(videos, sequences="train.txt").videos] == ["b"]
    assert [name for name, _ in VideoClips(videos, sequences=["a"]).videos] == ["a"]
    (videos / "2016.txt").write_text("/JPEGImages/480p/a/00000.jpg /x\n/JPEGImages/480p/a/00001.jpg /x\n")
    assert [name for name, _ in VideoClips(videos, sequences="2016.txt").videos] == ["a"]


def test_one_resolution_folder_in_between(tmp_path):
    write_video(tmp_path / "raw", "a", length=3)
    for part in ("JPEGImages", "Annotations"):
        (tmp_path / part).mkdir()
        (tmp_path / "raw" / part).rename(tmp_path / part / "240p")
    assert len(VideoClips(tmp_path, transform=PLAIN).videos[0][1]) == 3


# --- determinism --------------------------------------------------------------------------------------------------


def test_workers_change_nothing(videos, stills):
    def mixture():
        video = VideoClips(videos, transform=ClipTransform((33, 33), H, color=STRONG), seed=1, cache_megabytes=0.02)
        still = StillClips(
            stills / "images", stills / "masks", transform=StillTransform((33, 33), color=STRONG), min_pixels=20
        )
        return Mixture([video, still], repeats=[3, 2])

    def read(workers):
        dataset = mixture()
        dataset.set_epoch(4)
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=3, num_workers=workers, collate_fn=collate, worker_init_fn=worker_init
        )
        return list(loader)

    alone, pair = read(0), read(2)
    assert sum(len(batch["names"]) for batch in alone) == 3 * 2 + 2 * 3
    for a, b in zip(alone, pair, strict=True):
        assert a["names"] == b["names"] and torch.equal(a["num_objects"], b["num_objects"])
        assert torch.equal(a["frames"], b["frames"]) and torch.equal(a["labels"], b["labels"])


def test_the_cache_changes_nothing_and_keeps_its_bound(videos):
    plain, cached = VideoClips(videos), VideoClips(videos, cache_megabytes=0.1)
    used = sum(image.nbytes + labels.nbytes for image, labels in cached.reader.cache.values())
    assert 0 < used <= 0.1 * 2**20 and len(cached.reader.cache) < 40
    for index in range(4):
        assert torch.equal(plain[index]["frames"], cached[index]["frames"])


def test_repeats_are_drawn_anew(videos):
    mixture = Mixture([VideoClips(videos, transform=PLAIN)], repeats=[4])
    clips = [numbers(mixture[i]) for i in range(0, 8, 2)]
    assert len(mixture) == 8 and len({tuple(clip) for clip in clips}) > 1


def test_weights_are_shares(videos, stills):
    still = StillClips(stills / "images", stills / "masks", transform=StillTransform((H, W)), min_pixels=20)
    mixture = Mixture([VideoClips(videos, transform=PLAIN), still], weights=[3, 1], length=120)
    assert len(mixture) == 120
    share = np.mean([mixture[i]["name"] in "ab" for i in range(120)])
    assert 0.6 < share < 0.9
    with pytest.raises(InputError, match="not both"):
        Mixture([still], weights=[1], repeats=[1])
    with pytest.raises(InputError, match="weights"):
        Mixture([still], weights=[1, 2])


# --- geometry and objects -----------------------------------------------------------------------------------------


def picture(seed=0, h=60, w=90):
    """A smooth image in which object 1 is bright red, and its label map."""
    rng = np.random.default_rng(seed)
    image = cv2.resize(rng.integers(0, 90, (6, 9, 3), dtype=np.uint8), (w, h), interpolation=cv2.INTER_CUBIC)
    labels = np.zeros((h, w), np.uint8)
    labels[15:45, 30:65] = 1
    image[labels == 1] = (255, 0, 0)
    return image, labels


def in_register(frames, labels):
    """Whether label 1 is where red is, but for the pixels at its edge."""
    for frame, label in zip(frames, labels, strict=True):
        inside = cv2.erode((label == 1).astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
        outside = cv2.dilate((label == 1).astype(np.uint8), np.ones((5, 5), np.uint8)) == 0
        if (frame[inside][:, 0] < 200).any() or (frame[outside][:, 0] > 150).any():
            return False
    return True


def test_clip_transform_moves_image_and_labels_alike():
    image, labels = picture()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        transform = ClipTransform((51, 71), 60, (0.4, 1.6), min_pixels=20)
        frames, maps, count = transform(rng, [image] * 3, [labels] * 3)
        assert frames.shape == (3, 51, 71, 3) and maps.shape == (3, 51, 71)
        assert (frames[0] == frames[1]).all() and (maps[0] == maps[2]).all(), "one geometry for the clip"
        if count:
            assert in_register(frames, maps)


def test_small_frames_are_padded_with_the_mean_colour():
    image, labels = np.full((20, 30, 3), 255, np.uint8), np.full((20, 30), 1, np.uint8)
    spots = set()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        frames, maps, _ = ClipTransform((40, 50), 20, (1, 1))(rng, [image], [labels])
        assert (maps == 1).sum() == 600
        assert (frames[0][maps[0] == 0] == FILL).all() and (frames[0][maps[0] == 1] == 255).all()
        spots.add(tuple(np.argwhere(maps[0])[0]))
    assert len(spots) > 5


def test_crop_keeps_objects_that_show_in_the_reference():
    image = np.zeros((60, 60, 3), np.uint8)
    first, later = np.zeros((2, 60, 60), np.uint8)
    first[:20, :20], first[30:50, 30:50], first[55:58, 55:58] = 5, 9, 7
    later[:] = first
    later[25:29] = 3  # not in the reference
    later[0, 0] = 255
    transform = ClipTransform((60, 60), 60, (1, 1), flip=0.0)
    _, maps, count = transform(np.random.default_rng(0), [image] * 2, [first, later])
    assert count == 2 and set(np.unique(maps[0])) == {0, 1, 2} and set(np.unique(maps[1])) == {0, 1, 2, 255}
    assert (maps[0] == 1).sum() == 400 and maps[0, 10, 10] == 1 and maps[0, 40, 40] == 2


def test_balanced_crop_looks_for_an_object():
    image, labels = np.zeros((100, 100, 3), np.uint8), np.zeros((100, 100), np.uint8)
    labels[:30, :30] = 1

    def hits(tries):
        transform = ClipTransform((40, 40), 100, (1, 1), crop_tries=tries)
        return np.mean([transform(np.random.default_rng(s), [image], [labels])[2] for s in range(60)])

    assert hits(1) < 0.5 and hits(5) > hits(1) + 0.25


def test_at_most_ten_objects_chosen_at_random():
    counts = np.zeros(256, int)
    counts[1:15], counts[20], counts[255] = 200, 100, 5000
    kept = set()
    for seed in range(20):
        table, count = choose_objects(np.random.default_rng(seed), counts, 100, 10)
        ids = np.flatnonzero(table[:255])
        assert count == 10 and table[ids].tolist() == list(range(1, 11))
        assert table[20] == 0 and table[0] == 0 and table[255] == 255
        kept |= set(ids.tolist())
    assert kept == set(range(1, 15))


@pytest.mark.parametrize("scale", [0.8, 1.0, 1.7])
def test_resizing_a_window_is_resizing_all(scale):
    image, _ = picture()
    image = cv2.GaussianBlur(image, (0, 0), 2)
    size = round(60 * scale), round(90 * scale)
    whole = cv2.resize(image, size[::-1], interpolation=cv2.INTER_CUBIC)[7:37, 11:50]
    window = resize_window(image, size, (7, 11, 30, 39))
    # cv2's warp knows 32 positions between two pixels
    assert np.abs(window.astype(int) - whole).max() <= 4


def test_still_transform_moves_image_and_labels_alike():
    image, labels = picture(h=90, w=120)
    plain = ColorJitter(0, 0, 0, 0, jitter=0, grey=0, blur=0)
    for size in ((61, 61), (33, 47), (160, 200)):
        transform = StillTransform(size, frames=4, color=plain)
        for seed in range(5):
            frames, maps, count = transform(np.random.default_rng(seed), image, labels)
            assert frames.shape == (4, *size, 3) and count == 1
            assert in_register(frames, maps)
            assert not (maps[0] == maps[1]).all()


def test_still_objects_are_those_of_the_first_frame(stills):
    dataset = StillClips(stills / "images", stills / "masks", transform=StillTransform((65, 65)), merge=0.0)
    orders = set()
    for index in range(12):
        sample = dataset[index]
        assert sample["num_objects"] == len(np.unique(sample["labels"][0])) - 1
        green = [int(sample["frames"][0, 1][sample["labels"][0] == k].float().median()) for k in (1, 2)]
        orders.add(green[0] < green[1])
    assert orders == {True, False}, "ids come in random order"


@pytest.mark.parametrize(
    "name, ours, factor",
    [
        ("brightness", adjust_brightness, 1.3),
        ("contrast", adjust_contrast, 0.6),
        ("saturation", adjust_saturation, 1.2),
        ("hue", adjust_hue, 0.1),
    ],
)
def test_colours_change_as_in_torchvision(name, ours, factor):
    from torchvision.transforms.v2 import functional

    image = cv2.resize(np.random.default_rng(1).integers(0, 255, (9, 9, 3), dtype=np.uint8), (80, 60))
    theirs = getattr(functional, f"adjust_{name}")(torch.from_numpy(image).permute(2, 0, 1), factor)
    difference = np.abs(ours(image, factor).astype(int) - theirs.permute(1, 2, 0).numpy())
    assert difference.mean() < 1 and difference.max() <= (10 if name == "hue" else 2)


def test_each_frame_gets_its_own_colours():
    image, labels = picture()
    frames, maps, _ = ClipTransform((60, 90), 60, color=STRONG)(np.random.default_rng(0), [image] * 3, [labels] * 3)
    assert (maps[0] == maps[1]).all() and not (frames[0] == frames[1]).all()


# --- merging ------------------------------------------------------------------------------------------------------


def test_merging_pastes_the_second_clip_over_the_first():
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (2, 30, 40, 3), dtype=np.uint8)
    labels, other = np.zeros((2, 2, 30, 40), np.uint8)
    labels[:, :, :20], labels[0, 0, 0] = 1, 255
    other[:, 5:25, 10:30], other[:, 26:29, 30:35], other[0, 29] = 1, 2, 255
    merged, maps, count = merge_clips(rng, frames, labels, 255 - frames, other)
    assert count == 2  # the 15 pixels of the small one are too few
    pasted = (other == 1) | (other == 2)
    assert (merged == np.where(pasted[..., None], 255 - frames, frames)).all()
    expected = np.where(other == 1, 2, np.where(other == 2, 0, labels))
    assert (maps == expected).all()


def test_a_merged_clip_holds_ten_objects_at_most():
    first, second = np.zeros((2, 1, 40, 160), np.uint8)
    for k in range(8):
        first[:, :20, 20 * k : 20 * k + 20] = k + 1
        second[:, 20:, 20 * k : 20 * k + 20] = k + 1
    frames = np.zeros((1, 40, 160, 3), np.uint8)
    _, maps, count = merge_clips(np.random.default_rng(0), frames, first, frames, second)
    assert count == 10 and count_labels(maps[0])[:12].tolist() == [6 * 400, *[400] * 10, 0]


def test_clips_are_merged_as_often_as_asked(videos):
    def merged(probability):
        dataset = VideoClips(videos, transform=PLAIN, merge=probability)
        return np.mean([len(np.unique(dataset[i]["frames"][0])) > 1 for i in range(40)])

    assert merged(0.0) == 0 and 0.1 < merged(0.3) < 0.5
    # Two clips can show the same frame number.
    assert merged(1.0) > 0.9


# --- what can go wrong --------------------------------------------------------------------------------------------


def test_missing_data_is_named_with_the_layout(tmp_path, videos):
    with pytest.raises(InputError, match=r"JPEGImages: no such folder; expected JPEGImages/<sequence>/<frame>.jpg and"):
        VideoClips(tmp_path)
    with pytest.raises(InputError, match="zebra: no such folder"):
        VideoClips(videos, sequences=["a", "zebra"])
    with pytest.raises(InputError, match="val.txt: no such file"):
        VideoClips(videos, sequences="val.txt")
    with pytest.raises(InputError, match="no such folder; expected images in"):
        StillClips(tmp_path / "x", tmp_path / "y")
    (tmp_path / "x").mkdir(), (tmp_path / "y").mkdir()
    with pytest.raises(InputError, match="no image has a mask"):
        StillClips(tmp_path / "x", tmp_path / "y")
    for part in ("JPEGImages", "Annotations"):
        (tmp_path / part).mkdir()
    with pytest.raises(InputError, match="no sequence"):
        VideoClips(tmp_path)


def test_a_video_without_a_pair_is_named(tmp_path):
    write_video(tmp_path, "a", length=2)
    (tmp_path / "Annotations/a/00000.png").rename(tmp_path / "Annotations/a/first.png")
    (tmp_path / "Annotations/a/00001.png").unlink()
    with pytest.raises(InputError, match="no mask is named like an image"):
        VideoClips(tmp_path)


def test_broken_files_cost_a_draw_up_to_a_limit(tmp_path):
    write_video(tmp_path, "good")
    write_video(tmp_path, "bad", length=4)
    for path in (tmp_path / "JPEGImages/bad").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    dataset = VideoClips(tmp_path, transform=PLAIN, merge=0.0, cache_megabytes=1)
    with pytest.warns(UserWarning, match="skipped.*bad"):
        names = {dataset[index]["name"] for index in range(6)}
    assert names == {"good"}
    strict = VideoClips(tmp_path, transform=PLAIN, merge=0.0, max_broken=0)
    with (
        pytest.warns(UserWarning),
        pytest.raises(InputError, match="more than 0 files cannot be used, the last: .*bad"),
    ):
        [strict[index] for index in range(6)]


def test_videos_without_an_object_are_an_error(tmp_path):
    write_video(tmp_path, "none", length=3, ids=(0, 0))
    with pytest.raises(InputError, match="20 clips in a row show no object of more than 100 pixels"):
        VideoClips(tmp_path, transform=PLAIN)[0]


def test_training_masks(tmp_path):
    def save(values, mode):
        image = Image.fromarray(np.array(values, np.uint16 if mode == "I;16" else np.uint8))
        if mode == "P":
            image = Image.fromarray(np.array(values, np.uint8), "P")
            image.putpalette([value for value in range(256) for _ in range(3)])
        image.save(tmp_path / "mask.png")
        return tmp_path / "mask.png"

    assert read_labels(save([[0, 255]], "L")).tolist() == [[0, 1]]
    assert read_labels(save([[0, 2, 255]], "L")).tolist() == [[0, 2, 255]]
    assert read_labels(save([[0, 255]], "P")).tolist() == [[0, 255]]
    assert read_labels(save([[0, 3]], "I;16")).tolist() == [[0, 3]]
    with pytest.raises(InputError, match="id 300"):
        read_labels(save([[0, 300]], "I;16"))
    Image.new("RGB", (4, 4)).save(tmp_path / "color.png")
    with pytest.raises(InputError, match="mode RGB"):
        read_labels(tmp_path / "color.png")


# --- data sets by name --------------------------------------------------------------------------------------------


def test_every_known_data_set_is_described():
    assert {"davis2017", "youtubevos2019", "mose", "lvos", "vost", "static"} <= set(known_names())
    for name in known_names():
        assert describe(name)["kind"] in ("video", "still")
    assert describe("davis2017")["repeats"] == 5 and describe("davis2017")["max_gap"] == 12
    assert describe({"name": "davis2017", "repeats": 2})["repeats"] == 2


def test_data_sets_from_descriptions(videos, stills):
    mixture = open_training_data(
        [
            {"root": videos.name, "max_gap": 2, "repeats": 3},
            {"kind": "still", "root": stills.name, "images": "images", "annotations": "masks"},
            {"kind": "synthetic", "root": stills.name, "sources": ["."], "length": 4},
        ],
        videos.parent,
        size=(41, 41),
        short_edge=H,
        min_pixels=20,
        frames=3,
        strong_augmentation=True,
    )
    assert len(mixture) == 3 * 2 + 3 + 4
    assert all(mixture[i]["frames"].shape == (3, 3, 41, 41) for i in range(len(mixture)))
    assert mixture[0]["name"] in "ab" and mixture[12]["name"].startswith("synthetic")


def test_unknown_data_sets_and_options(tmp_path):
    with pytest.raises(InputError, match="'davis2018' is no known data set; choose one of davis2016"):
        open_training_data(["davis2018"], tmp_path)
    with pytest.raises(InputError, match="a still data set has no option 'max_gap'"):
        open_training_data([{"kind": "still", "max_gap": 3}], tmp_path)
    with pytest.raises(InputError, match="kind 'film' is none of video"):
        open_training_data([{"kind": "film"}], tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        open_training_data(["davis2017"], tmp_path / "nowhere")
    with pytest.raises(InputError, match="DAVIS/JPEGImages/480p: no such folder"):
        open_training_data(["davis2017"], tmp_path)


def test_real_material(shared):
    mixture = open_training_data(
        [
            {"root": "davis240", "weight": 1},
            {"kind": "still", "root": "coco384", "images": "images", "annotations": "masks", "weight": 1},
        ],
        shared / "train_pack",
        size=(97, 97),
        short_edge=120,
        length=8,
    )
    batch = collate([mixture[i] for i in range(8)])
    assert batch["frames"].shape == (8, 5, 3, 97, 97) and batch["labels"].shape == (8, 5, 97, 97)
    assert batch["labels"].amax((1, 2, 3)).tolist() == batch["num_objects"].tolist()
