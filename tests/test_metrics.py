"""Scores against the official toolkits' numbers, the truth table, and the errors that must give no score."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.labels import label_ids, read_label_png
from utils.errors import InputError
from utils.metrics import (
    PRESETS,
    Row,
    VOSMetric,
    boundary_f,
    boundary_radius,
    collect_scores,
    jaccard,
    per_sequence,
    score_folders,
    score_frame,
)

EXACT = 1e-9


def square(top: int = 10, left: int = 10, value: int = 1) -> np.ndarray:
    labels = np.zeros((40, 60), np.uint8)
    labels[top : top + 10, left : left + 10] = value
    return labels


EMPTY = np.zeros((40, 60), np.uint8)


def write(folder: Path, frames: list[np.ndarray], sequence: str = "s", colors: bool = False) -> Path:
    """Frames as `<folder>/<sequence>/00000.png` and so on; returns the folder."""
    (folder / sequence).mkdir(parents=True, exist_ok=True)
    for i, labels in enumerate(frames):
        image = Image.fromarray(labels)
        (image.convert("RGB") if colors else image).save(folder / sequence / f"{i:05}.png")
    return folder


@pytest.mark.parametrize(
    ("gt", "pred", "j", "f"),
    [
        (EMPTY, EMPTY, 1, 1),
        (EMPTY, square(), 0, 0),
        (square(), EMPTY, 0, 0),
        (square(), square(), 1, 1),
        (square(), square(left=15), 1 / 3, 0.4),
        (np.ones_like(EMPTY), EMPTY, 0, 1),  # an object that fills the image has no boundary
    ],
)
def test_truth_table(gt: np.ndarray, pred: np.ndarray, j: float, f: float) -> None:
    assert jaccard(gt > 0, pred > 0) == pytest.approx(j, abs=EXACT)
    assert boundary_f(gt > 0, pred > 0) == pytest.approx(f, abs=EXACT)


def test_masks_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 5\)"):
        jaccard(np.ones((4, 5)), np.ones((5, 4)))


def slow_boundary_f(gt: np.ndarray, pred: np.ndarray) -> float:
    """The definition, pixel by pixel."""

    def points(mask: np.ndarray) -> np.ndarray:
        padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
        differs = (padded[:-1, 1:] != mask) | (padded[1:, :-1] != mask)
        inside = np.zeros_like(mask)
        inside[:-1, :-1] = mask[:-1, :-1] != mask[1:, 1:]
        return np.argwhere(differs | inside)

    a, b = points(gt), points(pred)
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    near = ((a[:, None] - b[None]) ** 2).sum(-1) <= boundary_radius(*gt.shape) ** 2
    recall, precision = near.any(1).mean(), near.any(0).mean()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_boundaries_equal_the_definition_for_any_shape() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        height, width = rng.integers(2, 150, 2)
        coarse = rng.random((2, *rng.integers(1, 7, 2))) > rng.uniform(0.2, 0.8)
        rows = np.arange(height) * coarse.shape[1] // height
        columns = np.arange(width) * coarse.shape[2] // width
        gt, pred = coarse[:, rows][:, :, columns]
        if rng.random() < 0.5:
            pred = np.roll(gt, rng.integers(-3, 4, 2), (0, 1))
        assert boundary_f(gt, pred) == pytest.approx(slow_boundary_f(gt, pred), abs=1e-12)
        # cut out of its surroundings, as it is in a frame of several objects
        expected = {1: (jaccard(gt, pred), boundary_f(gt, pred))} if (gt | pred).any() else {}
        assert score_frame(gt.astype(np.uint8), pred.astype(np.uint8)) == expected


def test_equals_the_official_toolkits(shared: Path) -> None:
    expected = json.loads((shared / "golden/metrics/expected.json").read_text())
    folders = shared / "data/davis_mini/Annotations/480p", shared / "golden/metrics/predictions"
    names = list(expected["per_frame"])

    metric = collect_scores(*folders, "davis2017", names)
    scores = metric.compute()
    for name, value in expected["davis2017_semi_supervised"]["global"].items():
        assert scores[name] == pytest.approx(value, abs=EXACT), name
    assert scores["per_object"].keys() == expected["davis2017_semi_supervised"]["per_object"].keys()
    for key, values in expected["davis2017_semi_supervised"]["per_object"].items():
        assert {name: scores["per_object"][key][name] for name in values} == pytest.approx(values, abs=EXACT)
    for row in metric.rows:
        frame = expected["per_frame"][row.sequence][str(row.object)]
        at = int(row.frame) - 1
        assert (row.j, row.f) == pytest.approx((frame["J"][at], frame["F"][at]), abs=EXACT)

    merged = score_folders(*folders, "davis2016", names)
    assert merged["J-Mean"] == pytest.approx(expected["davis2016"]["J-Mean"], abs=EXACT)
    assert merged["F-Mean"] == pytest.approx(expected["davis2016"]["F-Mean"], abs=EXACT)
    for name, values in expected["davis2016"]["per_sequence"].items():
        for m in "JF":
            found = [merged["per_object"][f"{name}_1"][f"{m}-{statistic}"] for statistic in ("Mean", "Recall", "Decay")]
            assert found == pytest.approx(values[m], abs=EXACT)

    other = score_folders(*folders, "mose", names)
    assert 100 * other["J&F-Mean"] == pytest.approx(expected["vos_benchmark"]["J&F"], abs=100 * EXACT)
    for name, objects in expected["vos_benchmark"]["per_object"].items():
        for i, values in objects.items():
            row = other["per_object"][f"{name}_{i}"]
            assert [100 * row["J-Mean"], 100 * row["F-Mean"]] == pytest.approx(values, abs=100 * EXACT)


def test_void_is_background_or_left_out_but_never_an_object(tmp_path: Path) -> None:
    gt = square()
    gt[10:20, 20:25] = 255
    truth, result = write(tmp_path / "gt", [gt] * 4), write(tmp_path / "pred", [square(left=15)] * 4)
    assert score_folders(truth, result, "davis2017")["J-Mean"] == pytest.approx(1 / 3)
    assert score_folders(truth, result, "all")["J-Mean"] == pytest.approx(0.5)
    assert list(score_folders(truth, result, "all")["per_object"]) == ["s_1"]
    with pytest.raises(InputError, match="255"):
        score_folders(truth, write(tmp_path / "void", [gt] * 4), "davis2017")


def test_first_and_last_frame_count_in_preset_all_only(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square()] * 4)
    result = write(tmp_path / "pred", [EMPTY, square(), square(), EMPTY])
    assert score_folders(truth, result, "davis2017")["J&F-Mean"] == 1
    assert score_folders(truth, result, "all")["J&F-Mean"] == 0.5
    (result / "s/00000.png").unlink()  # a given mask need not be handed in
    assert score_folders(truth, result, "davis2017")["J&F-Mean"] == 1


def test_ids_with_gaps_make_no_phantom_objects(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square() + square(25, 30, 3)] * 4)
    result = write(tmp_path / "pred", [square()] * 4)
    for preset in PRESETS.keys() - {"davis2016"}:
        scores = score_folders(truth, result, preset)
        assert (scores["J-Mean"], list(scores["per_object"])) == (0.5, ["s_1", "s_3"])


def test_the_mean_is_over_objects(tmp_path: Path) -> None:
    three = square() + square(25, 10, 2) + square(25, 30, 3)
    truth = write(write(tmp_path / "gt", [three] * 4, "a"), [square()] * 4, "b")
    result = write(write(tmp_path / "pred", [EMPTY] * 4, "a"), [square()] * 4, "b")
    scores = score_folders(truth, result)
    assert scores["J-Mean"] == 1 / 4
    assert [row["J-Mean"] for row in per_sequence(scores).values()] == [0, 1]


def test_davis2016_takes_all_objects_as_one_and_255_as_an_object(tmp_path: Path) -> None:
    two = square() + square(25, 30, 2)
    truth = write(tmp_path / "gt", [two] * 4)
    assert score_folders(truth, write(tmp_path / "pred", [(two > 0).astype(np.uint8)] * 4), "davis2016")["J-Mean"] == 1
    binary = write(tmp_path / "binary", [square(value=255)] * 4)
    assert score_folders(binary, write(tmp_path / "ones", [square()] * 4), "davis2016")["J-Mean"] == 1


def test_objects_count_from_their_mask_or_appearance_on(tmp_path: Path) -> None:
    second = [EMPTY, EMPTY, square(25, 30, 2), square(25, 30, 2), square(25, 30, 2), square(25, 30, 2)]
    truth = write(tmp_path / "gt", [square() + s for s in second])
    wrong = [square() + (0 if i == 2 else 1) * s for i, s in enumerate(second)]  # nothing where the mask is given
    result = write(tmp_path / "pred", wrong)

    def frames(preset: str) -> list[str]:
        metric = collect_scores(truth, result, preset)
        return [row.frame for row in metric.rows if row.object == 2]

    assert frames("davis2017") == []
    assert frames("youtubevos") == ["00003", "00004", "00005"]
    assert frames("mose") == ["00002", "00003", "00004"]
    assert frames("all") == [f"{i:05}" for i in range(6)]


def test_seen_and_unseen_objects_weigh_alike(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square() + square(25, 10, 2) + square(25, 30, 3)] * 3)
    result = write(tmp_path / "pred", [square() + square(25, 10, 2)] * 3)
    scores = score_folders(truth, result, "youtubevos", seen={"s": {1: True, 2: False, 3: False}})
    assert [scores[name] for name in ("J-seen", "J-unseen", "F-seen", "F-unseen", "G")] == [1, 0.5, 1, 0.5, 0.75]
    assert scores["J-Mean"] == pytest.approx(2 / 3)
    assert score_folders(truth, result, "youtubevos", seen={"s": dict.fromkeys((1, 2, 3), True)})["G"] is None
    assert "G" not in score_folders(truth, result, "youtubevos")


def test_vost_also_scores_the_last_quarter(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square()] * 10)
    result = write(tmp_path / "pred", [square()] * 7 + [EMPTY] * 3)  # 8 frames count, 2 of them are the last quarter
    scores = score_folders(truth, result, "vost")
    assert (scores["J-last"], scores["J-Mean"]) == (0, 0.75)


def test_16_bit_masks_and_low_bit_depths(tmp_path: Path) -> None:
    wide = square().astype(np.uint16) * 1000
    truth = write(tmp_path / "gt", [wide] * 3)
    scores = score_folders(truth, write(tmp_path / "pred", [wide] * 3))
    assert (scores["J-Mean"], list(scores["per_object"])) == (1, ["s_1000"])
    few = tmp_path / "few/s"
    few.mkdir(parents=True)
    for i in range(3):
        _write_grey_png(few / f"{i:05}.png", square(value=3), bits=2)
    truth = write(tmp_path / "three", [square(value=3)] * 3)
    assert list(score_folders(truth, tmp_path / "few")["per_object"]) == ["s_3"]


def _write_grey_png(path: Path, labels: np.ndarray, bits: int) -> None:
    import struct
    import zlib

    height, width = labels.shape
    values = np.unpackbits(labels[..., None], axis=-1)[..., 8 - bits :].reshape(height, -1)
    lines = np.pad(np.packbits(values, axis=1), ((0, 0), (1, 0)))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes())),
    )
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (*chunks, (b"IEND", b""))
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


def test_masks_are_read_as_written_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "mask.png"
    for labels in (rng.integers(0, 4, (31, 17), np.uint8), np.tile(np.arange(200, dtype=np.uint8), (50, 1)), EMPTY):
        grey, indexed = Image.fromarray(labels), Image.fromarray(labels)
        indexed.putpalette(list(range(256)) * 3)
        for image, options in ((indexed, {}), (grey, {}), (grey, {"optimize": True}), (indexed, {"bits": 8})):
            image.save(path, **options)
            assert np.array_equal(read_label_png(path), labels)
            assert label_ids(labels) == set(np.unique(labels).tolist())
            data = bytearray(path.read_bytes())
            data[data.index(b"IDAT") + 8] ^= 1
            path.write_bytes(data)
            with pytest.raises(InputError, match=r"mask\.png"):
                read_label_png(path)


def _lose_frame(result: Path) -> str:
    (result / "a/00002.png").unlink()
    return "a/00002.png"


def _lose_last_frame(result: Path) -> str:
    (result / "b/00004.png").unlink()
    return "b/00004.png"


def _lose_sequence(result: Path) -> str:
    shutil.rmtree(result / "b")
    return "pred/b"


def _empty(result: Path) -> str:
    shutil.rmtree(result)
    result.mkdir()
    return "pred/a"


def _wrong_size(result: Path) -> str:
    Image.fromarray(square()[:, :30]).save(result / "b/00001.png")
    return "b/00001.png"


def _unknown_id(result: Path) -> str:
    Image.fromarray(square(value=9)).save(result / "b/00003.png")
    return "b/00003.png"


def _colors(result: Path) -> str:
    write(result, [square()] * 5, "a", colors=True)
    return "a/00000.png"


def _corrupt(result: Path) -> str:
    file = result / "a/00004.png"  # also a frame that does not count
    file.write_bytes(file.read_bytes()[:-30])
    return "a/00004.png"


def _jpeg(result: Path) -> str:
    Image.fromarray(square()).save(result / "a/00001.png", format="JPEG")
    return "a/00001.png"


@pytest.mark.parametrize(
    "spoil",
    [
        _lose_frame,
        _lose_last_frame,
        _lose_sequence,
        _empty,
        _wrong_size,
        _unknown_id,
        _colors,
        _corrupt,
        _jpeg,
    ],
)
def test_unusable_predictions_give_one_line_and_no_score(tmp_path: Path, spoil) -> None:
    frames = [square()] * 5
    truth = write(write(tmp_path / "gt", frames, "a"), frames, "b")
    result = write(write(tmp_path / "pred", frames, "a"), frames, "b")
    path = spoil(result)
    with pytest.raises(InputError) as error:
        score_folders(truth, result)
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_the_ground_truth_is_no_prediction(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square()] * 3)
    (tmp_path / "link").symlink_to(truth)
    for folder in (truth, tmp_path / "link"):
        with pytest.raises(InputError, match="ground truth itself"):
            score_folders(truth, folder)


def test_a_subset_is_scored_when_asked_for_and_extra_sequences_are_named(tmp_path: Path) -> None:
    truth = write(write(tmp_path / "gt", [square()] * 3, "a"), [square()] * 3, "b")
    result = write(write(tmp_path / "pred", [square()] * 3, "a"), [square()] * 3, "unasked")
    lines: list[str] = []
    scores = score_folders(truth, result, subset=True, warn=lines.append)
    assert list(scores["per_object"]) == ["a_1"]
    assert "unasked" in lines[0]
    assert "b" in lines[1]


def test_nothing_to_score_is_an_error(tmp_path: Path) -> None:
    truth = write(tmp_path / "gt", [square()] * 2)  # neither the first nor the last frame counts
    with pytest.raises(InputError, match="no frames to score"):
        score_folders(truth, write(tmp_path / "pred", [square()] * 2))


def some_rows() -> dict[str, list[Row]]:
    rng = random.Random(1)
    return {
        f"s{n}": [Row(f"s{n}", i, f"{t:05}", rng.random(), rng.random()) for i in (1, 2, 7) for t in range(n + 3)]
        for n in range(6)
    }


def test_every_split_and_order_gives_the_same_bits() -> None:
    sequences = some_rows()
    whole = VOSMetric("davis2017", sequences)
    for name, rows in sequences.items():
        whole.update(name, rows)
    rng = random.Random(2)
    for shards in range(1, 6):
        parts = [VOSMetric("davis2017", sequences) for _ in range(shards)]
        for name in rng.sample(list(sequences), len(sequences)):
            for part in rng.sample(parts, rng.randint(1, shards)):  # also twice
                part.update(name, rng.sample(sequences[name], len(sequences[name])))
        merged = VOSMetric("davis2017", sequences)
        for part in parts:
            merged.merge(part)
        assert json.dumps(merged.compute()) == json.dumps(whole.compute())
    merged.reset()
    assert merged.rows == []


def test_missing_sequences_are_reported_and_never_averaged_over() -> None:
    sequences = some_rows()
    metric = VOSMetric("davis2017", sequences)
    for name in ("s0", "s3"):
        metric.update(name, sequences[name])
    assert metric.missing == ["s1", "s2", "s4", "s5"]
    with pytest.raises(ValueError, match="s1, s2, s4, s5"):
        metric.compute()


def test_two_different_results_for_one_frame_are_an_error() -> None:
    a, b = VOSMetric(), VOSMetric()
    a.update("s", [Row("s", 1, "00001", 0.5, 0.5)])
    b.update("s", [Row("s", 1, "00001", 0.25, 0.5)])
    with pytest.raises(ValueError, match="different"):
        a.merge(b)
