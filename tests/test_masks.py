import io
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageDraw

from data import images, masks
from data.masks import Mask, overlay, palette, read_mask, read_mask_folder, write_mask
from utils.errors import InputError


def scene(scale: int = 1, mode: str = "RGB", colors=((255, 0, 0), (0, 0, 250))) -> Image.Image:
    """A rectangle and a disc on black, 96x64 pixels times `scale`."""
    image = Image.new(mode, (96 * scale, 64 * scale))
    draw = ImageDraw.Draw(image)
    draw.rectangle([10 * scale, 10 * scale, 40 * scale, 40 * scale], fill=colors[0])
    draw.ellipse([50 * scale, 20 * scale, 80 * scale, 50 * scale], fill=colors[1])
    return image


def save(image: Image.Image | np.ndarray, path, **options):
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)
    return path


def read_array(labels: np.ndarray, tmp_path, **options) -> Mask:
    return read_mask(save(labels, tmp_path / "mask.png"), **options)


def test_palette_is_that_of_davis_results(shared):
    import json

    golden = json.loads((shared / "golden/sizes.json").read_text())["palette"]
    assert palette() == [value for color in golden for value in color]


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([1, 255, 256, 65535]).flatmap(
        lambda top: arrays(np.int32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, top))
    )
)
def test_any_label_map_comes_back(tmp_path_factory, labels):
    path = tmp_path_factory.mktemp("round") / "00000.png"
    write_mask(path, labels)
    assert np.array_equal(read_mask(path).labels, labels)
    assert [file.name for file in path.parent.iterdir()] == ["00000.png"]


def test_ids_up_to_255_are_written_with_the_davis_palette_and_above_in_16_bit(tmp_path):
    labels = np.zeros((4, 6), np.int64)
    labels[1] = 3
    write_mask(tmp_path / "small.png", labels)
    small = Image.open(tmp_path / "small.png")
    assert small.mode == "P" and small.getpalette() == palette()
    assert np.array_equal(np.asarray(small), labels)
    labels[2] = 300
    write_mask(tmp_path / "large.png", labels)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "large.png")), labels)


@pytest.mark.parametrize("labels", [np.full((2, 2), 65536), np.full((2, 2), -1), np.zeros((2, 2, 3), int)])
def test_a_label_map_that_no_png_holds_is_refused(tmp_path, labels):
    with pytest.raises(ValueError, match="label map"):
        write_mask(tmp_path / "m.png", labels)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.png"
    write_mask(path, np.ones((4, 4), int))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(masks.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_mask(path, np.zeros((4, 4), int))
    assert read_mask(path).labels.all() and [file.name for file in tmp_path.iterdir()] == ["m.png"]


def test_grey_values_are_ids(tmp_path):
    for top in (1, 255):
        binary = np.zeros((32, 40), np.uint8)
        binary[4:20, 4:20] = top
        assert np.array_equal(read_array(binary, tmp_path).labels, binary)
    many = np.zeros((64, 96), np.uint8)
    for i in range(13):
        many[4 + 16 * (i // 5) :, 4 + 16 * (i % 5) :][:8, :8] = i + 1
    assert np.array_equal(read_array(many, tmp_path).labels, many)
    wide = many.astype(np.uint16) * 5000
    assert np.array_equal(read_array(wide, tmp_path).labels, wide)
    assert read_array(many > 0, tmp_path).labels.max() == 1  # 1-bit PNG


def test_low_bit_depth_grey_is_not_stretched(tmp_path):
    labels = np.zeros((8, 8), np.uint8)
    labels[2:6, 2:6] = 2
    cv2 = pytest.importorskip("cv2")
    image = Image.fromarray(labels)
    image.putpalette([0, 0, 0, 85, 85, 85, 170, 170, 170, 255, 255, 255])
    image.save(tmp_path / "indexed.png", bits=2)
    data = bytearray((tmp_path / "indexed.png").read_bytes())
    # The same pixels as grey of 2 bits: change the colour type in the header, drop the palette.
    import zlib

    start, end = data.index(b"PLTE") - 4, data.index(b"IDAT") - 4
    del data[start:end]
    data[25] = 0
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    (tmp_path / "grey.png").write_bytes(data)
    assert cv2.imread(str(tmp_path / "grey.png"), cv2.IMREAD_UNCHANGED).max() == 170  # as decoders show it
    assert np.array_equal(read_mask(tmp_path / "grey.png").labels, labels)


def test_indexed_png_index_is_the_id_whatever_the_colours(tmp_path):
    labels = np.zeros((16, 16), np.uint8)
    labels[2:6], labels[8:12] = 7, 200
    image = Image.fromarray(labels)
    image.putpalette([5] * 768)
    assert np.array_equal(read_mask(save(image, tmp_path / "m.png")).labels, labels)


def test_indexed_png_with_a_palette_sorted_by_an_editor_is_read_by_its_colours(tmp_path):
    image = Image.fromarray(np.asarray(scene(1, "L", (0, 1))))
    image = image.point([2, 0] + [0] * 254)  # background is index 2
    image.putpalette([255, 0, 0, 9, 9, 9, 0, 0, 0])
    mask = read_mask(save(image, tmp_path / "m.png"))
    assert mask.colors == {1: (255, 0, 0)}
    assert np.array_equal(mask.labels, np.asarray(scene(1, "L", (0, 1))))


def test_colours_of_the_davis_and_voc_palettes_are_their_index(tmp_path, shared):
    source = shared / "data/davis_mini/Annotations/480p/vspw-1001/00000.png"
    labels = read_mask(source).labels
    assert len(np.unique(labels)) == 45
    voc = Image.open(source).convert("RGB")
    write_mask(tmp_path / "davis.png", labels)
    for image in (voc, Image.open(tmp_path / "davis.png").convert("RGB")):
        mask = read_mask(save(image, tmp_path / "rgb.png"))
        assert np.array_equal(mask.labels, labels)
        assert set(mask.colors) == set(np.unique(labels)) - {0}


def test_other_colours_are_numbered_in_their_order(tmp_path):
    image = scene(colors=((255, 0, 0), (0, 0, 250)))
    mask = read_mask(save(image, tmp_path / "m.png"))
    assert mask.colors == {1: (0, 0, 250), 2: (255, 0, 0)}
    assert np.array_equal(mask.labels == 2, np.asarray(image)[..., 0] == 255)
    assert np.array_equal(mask.labels == 1, np.asarray(image)[..., 2] == 250)


def test_transparent_and_black_are_background(tmp_path):
    rgba = np.zeros((20, 20, 4), np.uint8)
    rgba[:10] = (250, 10, 10, 0)
    rgba[12:15] = (250, 10, 10, 255)
    rgba[16:18] = (0, 0, 0, 255)
    mask = read_array(rgba, tmp_path)
    assert mask.colors == {1: (250, 10, 10)}
    assert np.array_equal(np.flatnonzero(mask.labels.any(axis=1)), [12, 13, 14])


def test_colours_of_earlier_masks_keep_their_ids(tmp_path):
    first = read_mask(save(scene(colors=((255, 0, 0), (255, 0, 0))), tmp_path / "a.png"))
    assert first.colors == {1: (255, 0, 0)}
    later = read_mask(save(scene(), tmp_path / "b.png"), known_colors=first.colors)
    assert later.colors == {1: (255, 0, 0), 2: (0, 0, 250)}
    assert later.labels[20, 20] == 1 and later.labels[35, 65] == 2


SOFT = {
    "lanczos": lambda: scene(4).resize((96, 64), Image.Resampling.LANCZOS),
    "half size": lambda: scene(2).resize((96, 64), Image.Resampling.BOX),
    "grey": lambda: scene(4, "L", (255, 255)).resize((96, 64), Image.Resampling.LANCZOS),
    "indexed": lambda: scene(4).resize((96, 64), Image.Resampling.LANCZOS).quantize(64),
    "jpeg in png": lambda: Image.open(_jpeg(scene(1, "L", (128, 255)))),
}


def _jpeg(image: Image.Image) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    return file


@pytest.mark.parametrize("kind", SOFT)
def test_soft_edges_are_refused_with_their_count_and_snapped_on_request(tmp_path, kind):
    image = SOFT[kind]()
    path = save(image, tmp_path / "soft.png")
    count = len(np.unique(np.asarray(image).reshape(image.height * image.width, -1), axis=0))
    with pytest.raises(InputError, match=rf"soft\.png: {count} distinct values") as caught:
        read_mask(path)
    assert "\n" not in str(caught.value)
    mask = read_mask(path, snap_colors=True)
    objects = np.asarray(scene(1, "L", (1, 2)))
    if kind == "grey":
        assert set(np.unique(mask.labels)) == {0, 255}
    else:
        assert len(np.unique(mask.labels)) == 3
    assert ((mask.labels > 0) != (objects > 0)).mean() < 0.01
    assert 0 < mask.changed_pixels < 0.3 * objects.size


@pytest.mark.parametrize("mode, colors", [("L", (128, 255)), ("RGB", ((255, 0, 0), (0, 0, 250)))])
def test_jpeg_masks_are_refused_and_snapped(tmp_path, mode, colors):
    path = tmp_path / "m.jpg"
    path.write_bytes(_jpeg(scene(1, mode, colors)).getvalue())
    with pytest.raises(InputError, match="distinct values"):
        read_mask(path)
    labels = read_mask(path, snap_colors=True).labels
    assert len(np.unique(labels)) == 3
    assert ((labels > 0) != (np.asarray(scene(1, "L", (1, 2))) > 0)).mean() < 0.01


def test_a_photograph_is_no_mask(tmp_path):
    from skimage import data

    for photo in (data.astronaut(), data.camera(), data.text(), data.moon()):
        with pytest.raises(InputError, match="distinct values"):
            read_array(photo, tmp_path)
    with pytest.raises(InputError, match="this is a picture"):
        read_array(data.astronaut(), tmp_path, snap_colors=True)


def test_clean_masks_with_tiny_objects_are_not_taken_for_soft_ones(tmp_path):
    labels = np.zeros((64, 96), np.uint8)
    for i in range(44):
        y, x = divmod(i, 11)
        labels[4 + 12 * y, 4 + 8 * x :][: 1 + i % 3] = 5 * i + 5  # one to three pixels
    assert np.array_equal(read_array(labels, tmp_path).labels, labels)


def test_wrong_size_is_refused_with_both_sizes(tmp_path):
    path = save(np.zeros((4, 6), np.uint8), tmp_path / "m.png")
    read_mask(path, size=(4, 6))
    with pytest.raises(InputError, match=r"m\.png: the mask is 6x4 pixels, the frames are 4x6"):
        read_mask(path, size=(6, 4))


def unusable(folder):
    whole = folder / "whole.png"
    write_mask(whole, np.arange(4096).reshape(64, 64) // 1024)
    data = whole.read_bytes()
    for cut in (1, 12, 20, 60, len(data) - 10):
        (folder / f"cut{cut}.png").write_bytes(data[:-cut])
    (folder / "flipped.png").write_bytes(data[:-30] + bytes([data[-30] ^ 4]) + data[-29:])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("not an image")
    (folder / "folder.png").mkdir()
    save(np.ones((4, 4), np.float32), folder / "float.tif")
    save(np.full((4, 4), 70000, np.int32), folder / "big.tif")
    whole.unlink()
    return sorted(folder.iterdir()) + [folder / "missing.png"]


def test_unusable_files_are_named_in_one_line(tmp_path):
    for path in unusable(tmp_path):
        with pytest.raises(InputError) as caught:
            read_mask(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_every_flipped_bit_of_a_png_is_noticed_or_harmless(tmp_path):
    labels = np.zeros((20, 30), np.uint8)
    labels[4:12, 5:15], labels[8:18, 18:28] = 3, 9
    path = tmp_path / "m.png"
    write_mask(path, labels)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert np.array_equal(read_mask(path).labels, labels)
        except InputError as error:
            assert "\n" not in str(error)


def test_decompression_bombs_are_refused_by_a_limit_that_can_be_raised(tmp_path, monkeypatch):
    path = save(np.zeros((300, 400), np.uint8), tmp_path / "m.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 300 * 400 - 1)
    with pytest.raises(InputError, match="400x300 pixels are more than the limit of 119999 .VOS_MAX_PIXELS"):
        read_mask(path)
    monkeypatch.setattr(images, "MAX_PIXELS", 300 * 400)
    assert read_mask(path).labels.shape == (300, 400)


def test_mask_folder_is_matched_to_frames_by_name(tmp_path, caplog):
    for name in ("frame2.PNG", "frame10.png"):
        save(np.zeros((4, 4), np.uint8), tmp_path / name)
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "notes.txt").touch()
    with caplog.at_level(logging.WARNING):
        found = read_mask_folder(tmp_path, ["frame1", "frame2", "frame10"])
    assert list(found) == ["frame2", "frame10"] and found["frame2"].name == "frame2.PNG"
    assert "2 entries" in caplog.text
    with pytest.raises(InputError, match=r"frame10\.png: no frame of that name \(1 of 2"):
        read_mask_folder(tmp_path, ["frame1", "frame2"])


def test_mask_folder_of_a_video_is_numbered(tmp_path):
    for name in ("00000.png", "00012.png", "123456.png"):
        save(np.zeros((4, 4), np.uint8), tmp_path / name)
    assert list(read_mask_folder(tmp_path, None)) == ["00000", "00012", "123456"]
    save(np.zeros((4, 4), np.uint8), tmp_path / "7.png")
    with pytest.raises(InputError, match=r"7\.png: no frame of that name"):
        read_mask_folder(tmp_path, None)


def test_mask_folder_without_masks_or_with_two_for_a_frame(tmp_path):
    with pytest.raises(InputError, match="holds no image"):
        read_mask_folder(tmp_path, ["a"])
    save(np.zeros((4, 4), np.uint8), tmp_path / "a.png")
    save(np.zeros((4, 4), np.uint8), tmp_path / "a.bmp")
    with pytest.raises(InputError, match="same stem"):
        read_mask_folder(tmp_path, ["a"])


def test_overlay_tints_objects_in_distinct_colours_and_leaves_the_rest(tmp_path):
    image = np.full((40, 120, 3), 100, np.uint8)
    for ids in ([3, 7, 200], [1, 255, 256, 65535]):
        labels = np.zeros((40, 120), np.int32)
        for i, number in enumerate(ids):
            labels[10:30, 5 + 25 * i : 25 + 25 * i] = number
        painted = overlay(image, labels)
        assert (painted[labels == 0] == 100).all() and (image == 100).all()
        assert len({tuple(painted[20, 15 + 25 * i]) for i in range(len(ids))} | {(100, 100, 100)}) == len(ids) + 1
