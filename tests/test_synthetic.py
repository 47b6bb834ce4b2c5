"""Clips made from cut-outs: exact labels, what a clip promises, and that draws are a function of seed, epoch, index."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from data.clips import collate, worker_init
from data.synthetic import Layer, SyntheticClips, load_source, main, make_cutout, make_photo, paint
from utils.errors import InputError

SIZE = (65, 81)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of cut-outs (disc, box, star) and one of photographs with two instances each."""
    rng = np.random.default_rng(3)
    root = tmp_path_factory.mktemp("sources")
    (root / "cutouts").mkdir()
    for name in range(4):
        image = rng.integers(0, 255, (60, 50, 4), dtype=np.uint8)
        image[..., 3] = 0
        cv2.ellipse(image, (25, 30), (20, 12 + 4 * name), 30 * name, 0, 360, (200, 40 * name, 90, 255), -1)
        Image.fromarray(image).save(root / "cutouts" / f"{name}.png")
    for part in ("images", "masks"):
        (root / "photos" / part).mkdir(parents=True)
    for name in range(3):
        coarse = rng.integers(0, 255, (8, 10, 3), dtype=np.uint8)
        Image.fromarray(cv2.resize(coarse, (160, 120))).save(root / "photos" / "images" / f"{name}.jpg")
        mask = np.zeros((120, 160), np.uint8)
        mask[20:70, 15:60], mask[40:100, 90:140] = 1, 7
        Image.fromarray(mask).save(root / "photos" / "masks" / f"{name}.png")
    return root / "cutouts", root / "photos"


def same(a, b):
    return torch.equal(a["frames"], b["frames"]) and torch.equal(a["labels"], b["labels"])


def solid(color, h, w):
    return np.dstack([np.full((h, w, 3), color, np.uint8), np.full((h, w), 255, np.uint8)])


def layer(rgba, label, x, y, bends=None, shift=(0, 0), shadow=0.0):
    matrix = np.array([[[1.0, 0, x], [0, 1.0, y]]])
    return Layer(rgba, matrix, bends, np.array([shift], float), label, shadow)


def test_the_frontmost_layer_owns_a_pixel():
    red, blue, green = (255, 0, 0), (0, 0, 255), (0, 255, 0)
    layers = [layer(solid(red, 30, 30), 1, 5, 5), layer(solid(blue, 30, 30), 2, 20, 20)]
    layers.append(layer(solid(green, 10, 10), 0, 30, 30))  # a thing without a label hides objects too
    image, labels = np.zeros((60, 60, 3), np.uint8), np.zeros((60, 60), np.uint8)
    paint(image, labels, layers, 0, blur=False)
    assert np.array_equal(labels == 1, image[..., 0] == 255)
    assert np.array_equal(labels == 2, image[..., 2] == 255)
    assert (labels == 1).sum() == 900 - 15 * 15
    assert (labels == 2).sum() == 900 - 100


@pytest.mark.parametrize("blur", [False, True])
def test_labels_follow_bent_and_blurred_pixels(blur):
    rng = np.random.default_rng(0)
    rgba = cv2.copyMakeBorder(solid((255, 255, 255), 40, 40), 4, 4, 4, 4, cv2.BORDER_CONSTANT, value=0)
    bends = rng.normal(0, 3, (1, 9, 9, 2)).astype(np.float32)
    image, labels = np.zeros((80, 80, 3), np.uint8), np.zeros((80, 80), np.uint8)
    paint(image, labels, [layer(rgba, 1, 16.3, 12.8, bends, shift=(6, -3))], 0, blur)
    assert np.array_equal(labels == 1, image[..., 0] >= 128)
    straight = np.zeros_like(labels)
    paint(None, straight, [layer(rgba, 1, 16.3, 12.8)], 0, blur=False)
    assert 0 < (straight != labels).sum() < 800


def test_a_shadow_darkens_but_owns_nothing():
    rgba = solid((200, 200, 200), 20, 20)
    image, labels = np.full((60, 60, 3), 200, np.uint8), np.zeros((60, 60), np.uint8)
    paint(image, labels, [layer(rgba, 1, 10, 10, shadow=0.5)], 0, blur=False, sun=np.array([1.0, 0.0]))
    assert (labels > 0).sum() == 400
    assert image[20, 38].max() < 130 and image[20, 20].min() == 200


def test_things_outside_the_frame_draw_nothing():
    labels = np.zeros((40, 40), np.uint8)
    paint(
        None, labels, [layer(solid((9, 9, 9), 20, 20), 1, -25, 5), layer(solid((9, 9, 9), 20, 20), 2, 5, 60)], 0, True
    )
    assert not labels.any()


def test_samples_keep_their_promises(sources):
    dataset = SyntheticClips(sources, size=SIZE, frames=4, max_objects=3, min_pixels=30)
    seen, came_back = [], 0
    for index in range(60):
        sample = dataset[index]
        frames, labels, n = sample["frames"], sample["labels"], sample["num_objects"]
        assert frames.shape == (4, 3, *SIZE) and frames.dtype == torch.uint8
        assert labels.shape == (4, *SIZE) and labels.dtype == torch.uint8
        counts = torch.stack([(labels == k).sum((1, 2)) for k in range(1, n + 1)])
        assert 1 <= n <= 3 and labels.max() == n and (counts[:, 0] > 30).all()
        came_back += any(0 in c[1:-1].tolist() and c[-1] > 0 for c in counts)
        seen.append(n)
    assert set(seen) == {1, 2, 3}
    assert came_back, "no object left the picture and came back in 60 clips"


def test_objects_move_modestly(sources):
    """Neighbouring frames are like those of a video: neither the same nor unrelated."""
    dataset = SyntheticClips(sources, size=SIZE, min_pixels=30)
    overlaps = []
    for index in range(40):
        labels = dataset[index]["labels"]
        for a, b in zip(labels[:-1] == 1, labels[1:] == 1, strict=True):
            overlaps.append(float((a & b).sum() / (a | b).sum().clamp(min=1)))
    assert 0.3 < np.median(overlaps) < 0.9


def test_draws_depend_on_seed_epoch_and_index_alone(sources):
    first, second = (SyntheticClips(sources, size=SIZE, seed=5) for _ in range(2))
    assert same(first[3], second[3])
    second[0], second[1]
    assert same(first[3], second[3])
    assert not same(first[3], first[4])
    assert not same(first[3], SyntheticClips(sources, size=SIZE, seed=6)[3])
    before = first[3]
    first.set_epoch(1)
    assert not same(before, first[3])
    first.set_epoch(0)
    assert same(before, first[3])


def test_workers_change_nothing_and_see_the_epoch(sources):
    dataset = SyntheticClips(sources, size=SIZE, length=8)

    def epoch(loader, number):
        dataset.set_epoch(number)
        return torch.cat([batch["frames"] for batch in loader])

    options = {"batch_size": 2, "collate_fn": collate, "worker_init_fn": worker_init}
    alone = torch.utils.data.DataLoader(dataset, **options)
    pair = torch.utils.data.DataLoader(dataset, num_workers=2, persistent_workers=True, **options)
    for number in (0, 1):
        assert torch.equal(epoch(alone, number), epoch(pair, number))


def test_cutouts_are_premultiplied_and_rimmed():
    rgba = np.zeros((90, 90, 4), np.uint8)
    rgba[20:60, 30:70] = (200, 100, 50, 255)
    rgba[20:60, 30] = (200, 100, 50, 100)
    cutout = make_cutout(rgba)
    assert cutout.rgba.shape == (44, 44, 4) and cutout.corner == (28, 18)
    assert (cutout.rgba[[0, 1, -2, -1], :, 3] == 0).all()
    assert cutout.rgba[10, 2].tolist() == [78, 39, 20, 100]
    rgba[..., 3] //= 4
    assert make_cutout(rgba) is None  # hardly to be seen


def test_instances_cut_by_the_border_stay_where_they_are():
    labels = np.zeros((100, 100), np.uint8)
    labels[:40, 10:50], labels[50:90, 30:80] = 1, 2
    photo = make_photo(np.zeros((100, 100, 3), np.uint8), labels)
    assert [cutout.whole for cutout in photo.cutouts] == [False, True]
    with pytest.raises(InputError, match="must be equal"):
        make_photo(np.zeros((90, 100, 3), np.uint8), labels)


def test_what_was_asked_for_is_named_when_it_is_missing(tmp_path, sources):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        SyntheticClips([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no usable image"):
        SyntheticClips([tmp_path / "empty"])
    with pytest.raises(InputError, match="no object to cut out"):
        SyntheticClips([sources[1] / "images"])
    with pytest.raises(InputError, match="max_objects 11"):
        SyntheticClips(sources, max_objects=11)


def test_broken_files_are_skipped_up_to_a_limit(tmp_path, sources):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    good = (sources[0] / "1.png").read_bytes()
    (tmp_path / "9.png").write_bytes(good)
    with pytest.warns(UserWarning, match="skipped"):
        cutouts, photos = load_source(tmp_path)
    assert len(cutouts) == 1 and not photos
    with pytest.warns(UserWarning), pytest.raises(InputError, match="more than 2 files"):
        load_source(tmp_path, max_broken=2)


def test_contact_sheet(tmp_path, sources):
    main(f"{sources[0]},{sources[1]}", str(tmp_path / "deep" / "sheet.png"), rows=2, size=SIZE)
    with Image.open(tmp_path / "deep" / "sheet.png") as sheet:
        assert sheet.size == (5 * SIZE[1], 4 * SIZE[0])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sheet.png"]


def test_real_material(shared):
    pack = shared / "train_pack"
    dataset = SyntheticClips([pack / "tuxpaint", pack / "coco384"], size=(97, 97), max_photos=20)
    assert len(dataset.cutouts) > 10 and len(dataset.photos) == 20
    assert all((dataset[i]["labels"][0] == 1).sum() > 100 for i in range(5))


def test_the_bundled_clip_is_what_the_program_renders():
    pytest.importorskip("skimage")
    from data.masks import read_mask
    from data.render_clip import LENGTH, SIZE, render
    from data.video import open_frames

    assets = Path(__file__).resolve().parents[1] / "assets"
    images, labels = render()
    with open_frames(assets / "clip.mp4") as source:
        bundled = [frame.image for frame in source]
    first = read_mask(assets / "clip_first.png").labels
    assert len(bundled) == len(images) == LENGTH and first.shape == SIZE
    # Other versions of OpenCV may cut a little differently.
    assert all(np.abs(a.astype(int) - b).mean() < 3 for a, b in zip(bundled[::9], images[::9], strict=True))
    assert (first == labels[0]).mean() > 0.995 and set(np.unique(first)) == {0, 1, 2, 3}
    # The astronaut hides part of the cup, and all of them are there most of the time.
    cup = [(label == 2).sum() for label in labels]
    assert min(cup) < 0.75 * cup[0] and all(np.isin([1, 2, 3], label).all() for label in labels)
