import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data.coco import decode, decode_rle, encode_rle, read_coco, write_coco
from utils.errors import InputError

coco = pytest.importorskip("pycocotools.mask")
masks = arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40)))


@given(masks)
def test_rle_is_that_of_the_reference(mask):
    rle = encode_rle(mask)
    reference = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert rle == {"size": list(mask.shape), "counts": reference["counts"].decode()}
    assert np.array_equal(decode_rle(rle, mask.shape), mask)


def test_large_areas_are_those_of_the_reference():
    mask = np.zeros((700, 900), bool)
    mask[100:650, 3:890], mask[200:300, 100:500] = True, False
    reference = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert encode_rle(mask)["counts"] == reference["counts"].decode()
    runs = {"size": [4, 2], "counts": [2, 3, 3]}
    assert decode_rle(runs, (4, 2)).T.ravel().tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@settings(max_examples=40)
@given(st.one_of(st.text(max_size=12), st.lists(st.integers(-(10**20), 10**20), max_size=5), st.none(), st.floats()))
def test_broken_counts_are_refused(counts):
    try:
        mask = decode_rle({"size": [5, 7], "counts": counts}, (5, 7))
    except InputError:
        return
    assert mask.shape == (5, 7) and mask.dtype == bool


def test_a_file_holds_all_frames_and_comes_back(tmp_path):
    labels = {i: np.random.default_rng(i).choice([0, 3, 500], (20, 30)).astype(np.int32) for i in (0, 4)}
    labels[7] = np.zeros((20, 30), np.int32)
    objects = [{"id": 3, "name": "a"}, {"id": 500, "name": "b"}]
    frames = [(i, f"{i:05d}.png", mask) for i, mask in labels.items()]
    write_coco(tmp_path / "x.json", (20, 30), objects, frames, {"by": "me"})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    names = {f"{i:05d}": i for i in range(8)}
    info, categories, found = read_coco(tmp_path / "x.json", (20, 30), names)
    assert info["by"] == "me" and categories == {3: objects[0], 500: objects[1]}
    assert {i: decode(found[i], (20, 30)).tolist() for i in found} == {i: labels[i].tolist() for i in labels}
    for size, known in (((30, 20), names), ((20, 30), {"00000": 0})):
        with pytest.raises(InputError, match=r"x\.json"):
            read_coco(tmp_path / "x.json", size, known)


def test_polygons_of_other_programs_are_filled(tmp_path):
    content = {
        "images": [{"id": 9, "file_name": "dir/00001.jpg", "height": 10, "width": 12}],
        "categories": [{"id": 2, "name": "cat"}],
        "annotations": [{"image_id": 9, "category_id": 2, "segmentation": [[2, 1, 8, 1, 8, 5, 2, 5]]}],
    }
    (tmp_path / "x.json").write_text(json.dumps(content))
    _, categories, found = read_coco(tmp_path / "x.json", (10, 12), {"00001": 1})
    expected = np.zeros((10, 12), int)
    expected[1:6, 2:9] = 2
    assert categories[2]["name"] == "cat" and decode(found[1], (10, 12)).tolist() == expected.tolist()
    for polygon in ([1, 2, 3], [1e9, 0, 1, 1, 2, 2], ["a", "b"]):
        with pytest.raises(InputError, match="polygon"):
            decode([(1, [polygon])], (10, 12))
