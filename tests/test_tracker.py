"""The tracker's promises: ids, added, corrected and removed objects, sizes, memory, and state that never leaks.

Weights are the reference's test weights: the masks they give are no good, but hang on every part of the network.
"""

import gc
import itertools
import warnings
from functools import lru_cache

import numpy as np
import pytest
import torch
from golden_cases import golden_model as unfolded_model

from models import Tracker, build_model
from models.memory import LongTermMemory
from models.tracker import Prediction, enlargement
from utils.errors import InputError

MODELS = ["aott", "deaott"]


@lru_cache(maxsize=2)
def golden_model(name: str) -> torch.nn.Module:
    """Its encoder is folded once for all the trackers here: their weights never change."""
    model = unfolded_model.__wrapped__(name)
    folded = model.folded_encoder()
    model.folded_encoder = lambda: folded
    return model


def video(frames: int, size: tuple[int, int] = (48, 64), seed: int = 0) -> list[np.ndarray]:
    """Noise with two coloured squares that move two pixels a frame."""
    generator = np.random.default_rng(seed)
    clip = []
    for t in range(frames):
        frame = generator.integers(0, 90, (*size, 3), dtype=np.uint8)
        for y, x, color in ((4 + 2 * t, 6, (220, 30, 30)), (20, 8 + 2 * t, (30, 220, 90))):
            frame[y % size[0] :, x % size[1] :][:12, :14] = color
        clip.append(frame)
    return clip


def squares(ids: list[int], size: tuple[int, int] = (48, 64), side: int = 8, dtype: type = np.int32) -> np.ndarray:
    """A label map with a square for every id, from left to right and top to bottom."""
    labels = np.zeros(size, dtype)
    places = itertools.product(range(0, size[0] - side + 1, side), range(0, size[1] - side + 1, side))
    for object_id, (y, x) in zip(ids, places, strict=False):
        labels[y : y + side, x : x + side] = object_id
    assert set(np.unique(labels)) - {0} == set(ids)
    return labels


def track(tracker: Tracker, frames: list[np.ndarray], masks: dict[int, np.ndarray]) -> list[Prediction]:
    return [tracker.step(frame, masks.get(t)) for t, frame in enumerate(frames)]


def check(prediction: Prediction, size: tuple[int, int], ids: list[int]) -> None:
    """What holds for every prediction."""
    labels, probabilities = prediction.labels, prediction.probabilities
    assert labels.shape == size and labels.dtype == np.int32
    assert prediction.object_ids == ids
    assert set(np.unique(labels)) <= {0, *ids}
    assert probabilities.shape == (1 + len(ids), *size) and probabilities.dtype == torch.float32
    assert probabilities.isfinite().all() and probabilities.min() >= 0
    assert not probabilities.requires_grad
    torch.testing.assert_close(probabilities.sum(0), torch.ones(size), atol=1e-5, rtol=0)
    place = np.searchsorted(np.array([0, *ids]), labels) if ids == sorted(ids) else None
    if place is not None:  # the label is the most probable one
        chosen = probabilities.gather(0, torch.from_numpy(place)[None])[0]
        assert (probabilities.max(0).values - chosen).max() <= 1e-6
        assert (probabilities.argmax(0).numpy() == place).mean() > 0.999


def equal(first: list[Prediction], second: list[Prediction]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.labels, b.labels)
        and a.object_ids == b.object_ids
        and torch.equal(a.probabilities, b.probabilities)
        for a, b in zip(first, second, strict=True)
    )


# Ids and numbers of objects.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ids", [[1], [3, 7, 65535], [200, 201]], ids=str)
def test_ids_come_back_unchanged(name, ids):
    mask = squares(ids, side=16)
    predictions = track(Tracker(golden_model(name)), video(4), {0: mask})
    assert (predictions[0].labels == mask).all()
    for prediction in predictions:
        check(prediction, mask.shape, ids)
    assert len(np.unique(np.stack([p.labels for p in predictions[1:]]))) > 1  # something is tracked


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [10, 11, 13, 44])
def test_many_objects(name, count):
    """Ten share an identity bank; all of them share one pass of the encoder."""
    ids = list(range(1, count + 1))
    mask = squares(ids)
    tracker, passes = Tracker(golden_model(name)), []
    hook = golden_model(name).folded_encoder().register_forward_hook(lambda *_: passes.append(1))
    predictions = track(tracker, video(3), {0: mask})
    hook.remove()
    assert len(passes) == 3
    assert (predictions[0].labels == mask).all()
    for prediction in predictions:
        check(prediction, mask.shape, ids)
    assert len(tracker._sessions[0].groups) == -(-count // 10)
    assert predictions[-1].probabilities[1:].amax((1, 2)).min() > 0


def test_objects_of_a_group_do_not_depend_on_other_groups():
    """Right after the reference frame, the first ten have the odds among themselves that they have without others."""
    frames, mask = video(2), squares(list(range(1, 14)))
    many = track(Tracker(golden_model("aott")), frames, {0: mask})[1].probabilities
    few = track(Tracker(golden_model("aott")), frames, {0: np.where(mask <= 10, mask, 0)})[1].probabilities
    inside = ((few > 1e-3) & (few < 0.99))[1:].all(0)  # where the merge clamps nothing
    assert inside.sum() > 100
    # Merged groups: the logit of each probability within its group, then a softmax over all: differences remain.
    within, merged = torch.logit(few[1:, inside].double()), many[1:11, inside].double().log()
    torch.testing.assert_close(merged - merged[:1], within - within[:1], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_merged_background_is_where_every_group_sees_background():
    tracker, size = Tracker(golden_model("aott")), (48, 64)
    tracker.step(video(1)[0], squares(list(range(1, 14))))
    session = tracker._sessions[0]
    logits = {number: torch.randn(1, 11, 13, 17, generator=torch.Generator().manual_seed(number)) for number in (0, 1)}
    scores = session.merge(logits, size)
    assert scores.shape == (1, 14, *size)
    parts = [session.network.resize(logits[number][:, : 1 + n], size).softmax(1) for number, n in ((0, 10), (1, 3))]
    expected = torch.cat((parts[0][:, :1] * parts[1][:, :1], parts[0][:, 1:], parts[1][:, 1:]), dim=1)
    torch.testing.assert_close(scores.sigmoid(), expected.clamp(1e-5, 1 - 1e-5))


# Masks that come later.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "first, new", [([1, 2], 5), (list(range(1, 11)), 11), ([5, 9], 2)], ids=["1", "10", "lower id"]
)
def test_object_added_later(name, first, new):
    frames, mask = video(7), squares(first)
    later = np.zeros_like(mask)
    later[30:44, 40:60] = new
    model = golden_model(name)
    without = track(Tracker(model), frames, {0: mask})
    tracker = Tracker(model)
    predictions = track(tracker, frames, {0: mask, 4: later})
    assert equal(predictions[:4], without[:4])
    assert not any((p.labels == new).any() for p in predictions[:4])
    labels = predictions[4].labels
    assert ((labels == new) == (later == new)).all()
    assert (labels[later == 0] == without[4].labels[later == 0]).all()  # the others keep their predicted pixels
    for p in predictions[4:]:
        check(p, mask.shape, [*first, new])
    assert tracker.object_ids == [*first, new]
    # Memory of the first objects is kept: their group holds both reference frames.
    assert tracker._sessions[0].groups[0].long_term.frames == 2


@pytest.mark.parametrize("name", MODELS)
def test_correction(name):
    """The mask is the truth for the ids that it holds; the others keep their pixels where it is 0."""
    frames, mask = video(6), squares([1, 2, 3], side=16)
    model = golden_model(name)
    plain = track(Tracker(model), frames, {0: mask})
    before = plain[3].labels
    wrong = max((1, 2, 3), key=lambda i: (before == i).sum())
    assert (before == wrong).sum() > 7 * 20  # it has pixels to drop
    fix = np.zeros_like(mask)
    fix[2:9, 40:60] = wrong
    tracker = Tracker(model)
    predictions = track(tracker, frames, {0: mask, 3: fix})
    labels = predictions[3].labels
    assert ((labels == wrong) == (fix == wrong)).all()
    outside = fix == 0
    assert (labels[outside] == np.where(before == wrong, 0, before)[outside]).all()
    assert tracker.object_ids == [1, 2, 3]
    assert not equal(predictions[4:], plain[4:])  # and it is remembered
    for prediction in predictions:
        check(prediction, mask.shape, [1, 2, 3])


def test_mask_of_old_and_new_objects_together():
    frames, mask = video(4), squares([4, 6], side=16)
    both = squares([9, 4], side=16)
    predictions = track(Tracker(golden_model("aott")), frames, {0: mask, 2: both})
    labels = predictions[2].labels
    assert (labels[both > 0] == both[both > 0]).all()
    assert not np.isin(labels[both == 0], (4, 9)).any()
    check(predictions[2], mask.shape, [4, 6, 9])
    check(predictions[3], mask.shape, [4, 6, 9])


def test_the_same_mask_again_after_the_first_frame_is_a_correction():
    frames, mask = [video(1)[0]] * 3, squares([1, 2], side=16)
    tracker = Tracker(golden_model("aott"))
    predictions = track(tracker, frames, {0: mask, 1: mask, 2: mask})
    assert all((p.labels == mask).all() for p in predictions)
    assert tracker.object_ids == [1, 2] and tracker.memory_frames == 3


# Removal.


@pytest.mark.parametrize("name", MODELS)
def test_remove(name):
    ids = list(range(1, 14))
    frames, mask = video(6), squares(ids)
    tracker = Tracker(golden_model(name))
    track(tracker, frames[:2], {0: mask})
    tracker.remove([3, 12])
    left = [i for i in ids if i not in (3, 12)]
    assert tracker.object_ids == left
    check(tracker.step(frames[2]), mask.shape, left)
    full = memory_bytes(tracker)
    tracker.remove(i for i in (11, 13))  # the last two of the second group
    assert set(tracker._sessions[0].groups) == {0}
    assert memory_bytes(tracker) <= 0.58 * full  # queries of the last frame are shared
    check(tracker.step(frames[3]), mask.shape, left[:-2])
    tracker.remove(tracker.object_ids)
    assert tracker.object_ids == [] and memory_bytes(tracker) == 0 and tracker.memory_frames == 0
    empty = tracker.step(frames[4])
    check(empty, mask.shape, [])
    assert not empty.labels.any()
    again = np.where(mask == 3, mask, 0)
    prediction = tracker.step(frames[5], again)  # tracked again
    assert (prediction.labels == again).all()
    check(prediction, mask.shape, [3])
    check(tracker.step(frames[5]), mask.shape, [3])


def memory_bytes(tracker: Tracker) -> int:
    """Bytes of the storages behind everything that the sessions keep."""
    storages, seen, todo = {}, set(), [tracker._sessions]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, torch.nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple)):
            todo += thing
        elif hasattr(thing, "__dict__"):
            todo += vars(thing).values()
    return sum(storages.values())


def test_removed_object_is_gone_and_its_slot_is_no_trap():
    """Removed and added again many times: always one object, memory of one."""
    frames = video(2)
    tracker = Tracker(golden_model("aott"))
    sizes = set()
    for i in range(12):  # more than the slots of a group
        mask = squares([7], side=16)
        assert (tracker.step(frames[0], mask).labels == mask).all()
        check(tracker.step(frames[1]), mask.shape, [7])
        assert len(tracker._sessions[0].groups) == 1
        sizes.add(memory_bytes(tracker))
        tracker.remove([7])
        assert memory_bytes(tracker) == 0, i
    assert len(sizes) == 1


def test_removing_an_object_leaves_the_others_their_odds():
    frames, mask = video(3), squares([1, 2, 3], side=16)
    one, other = Tracker(golden_model("aott")), Tracker(golden_model("aott"))
    track(one, frames[:2], {0: mask})
    track(other, frames[:2], {0: mask})
    other.remove([2])
    with_it, without = one.step(frames[2]).probabilities, other.step(frames[2]).probabilities
    kept = with_it[[0, 1, 3]]
    torch.testing.assert_close(without, kept / kept.sum(0), atol=1e-5, rtol=1e-4)


# Sizes and short videos.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [(16, 16), (17, 33), (16, 200), (200, 16), (47, 50)], ids=str)
def test_frame_sizes(name, size):
    mask = squares([2, 9], size)
    predictions = track(Tracker(golden_model(name)), video(3, size), {0: mask})
    assert (predictions[0].labels == mask).all()
    for prediction in predictions:
        check(prediction, size, [2, 9])


@pytest.mark.parametrize("limits", [{"max_long_edge": 33}, {"max_short_edge": 17}], ids=str)
def test_size_limits(limits):
    frames, mask = video(2, (40, 90)), squares([1, 2], (40, 90), side=16)
    tracker, sizes = Tracker(golden_model("aott"), **limits), []
    encoder = golden_model("aott").folded_encoder()
    hook = encoder.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
    predictions = track(tracker, frames, {0: mask})
    hook.remove()
    assert sizes == [(17, 33)] * 2
    for prediction in predictions:
        check(prediction, (40, 90), [1, 2])
    assert (predictions[0].labels == mask).all()  # as given, not as shrunk


@pytest.mark.parametrize("name", MODELS)
def test_one_frame(name):
    mask = squares([6])
    prediction = Tracker(golden_model(name)).step(video(1)[0], mask)
    check(prediction, mask.shape, [6])
    assert (prediction.labels == mask).all()


@pytest.mark.parametrize("name", MODELS)
def test_first_object_comes_late(name):
    """Frames before it, with no mask or an empty one, are background and change nothing that follows."""
    frames, mask = video(6), squares([4, 5], side=16)
    tracker = Tracker(golden_model(name))
    predictions = track(tracker, frames, {1: np.zeros_like(mask), 3: mask, 4: np.zeros_like(mask)})
    for prediction in predictions[:3]:
        check(prediction, mask.shape, [])
        assert not prediction.labels.any() and (prediction.probabilities == 1).all()
    assert (predictions[3].labels == mask).all()
    assert equal(predictions[3:], track(Tracker(golden_model(name)), frames[3:], {0: mask}))


def test_empty_mask_is_no_mask():
    frames, mask = video(4), squares([4, 5], side=16)
    plain = track(Tracker(golden_model("aott")), frames, {0: mask})
    assert equal(plain, track(Tracker(golden_model("aott")), frames, {0: mask, 2: np.zeros_like(mask)}))


# State.


@pytest.mark.parametrize("name", MODELS)
def test_trackers_of_one_model_do_not_see_each_other(name):
    """Two videos of unlike size and objects, frame by frame in turns, and one after the other."""
    model = golden_model(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    clips = [
        (video(5), {0: squares([1, 2], side=16), 2: squares([8])}),
        (video(5, (33, 40), 7), {1: squares([3], (33, 40))}),
    ]
    apart = [track(Tracker(model, long_term_gap=2), *clip) for clip in clips]
    trackers, turns = [Tracker(model, long_term_gap=2) for _ in clips], [[], []]
    for t in range(5):
        for tracker, turn, (frames, masks) in zip(trackers, turns, clips, strict=True):
            turn.append(tracker.step(frames[t], masks.get(t)))
    assert equal(turns[0], apart[0]) and equal(turns[1], apart[1])
    one = Tracker(model, long_term_gap=2)
    for clip, expected in zip(clips, apart, strict=True):
        assert equal(track(one, *clip), expected)
        one.reset()
        assert one.object_ids == [] and one.memory_frames == 0 and memory_bytes(one) == 0
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key


def test_wrong_input_changes_nothing():
    frames, mask = video(4), squares([1, 2], side=16)
    tracker = Tracker(golden_model("aott"), long_term_gap=1)
    predictions = [tracker.step(frames[0], mask)]
    for t in range(1, 4):
        for frame, wrong in ((frames[t], mask[1:]), (frames[t], mask - 1), (frames[t][1:], None)):
            with pytest.raises(InputError):
                tracker.step(frame, wrong)
        with pytest.raises(InputError):
            tracker.remove([1, 99])  # one of them is tracked: neither is removed
        predictions.append(tracker.step(frames[t]))
    assert equal(predictions, track(Tracker(golden_model("aott"), long_term_gap=1), frames, {0: mask}))


FRAME = np.zeros((32, 40, 3), np.uint8)


@pytest.mark.parametrize(
    "frame, mask, words",
    [
        (FRAME.astype(np.float32), None, ["float32", "uint8"]),
        (FRAME[..., 0], None, ["(32, 40)", "(height, width, 3)"]),
        (FRAME.transpose(2, 0, 1), None, ["(3, 32, 40)"]),
        (np.zeros((32, 40, 4), np.uint8), None, ["(32, 40, 4)"]),
        (FRAME[:0], None, ["(0, 40, 3)"]),
        (torch.zeros(32, 40, 3), None, ["float32"]),
        (FRAME, np.zeros((40, 32), np.uint8), ["40x32", "32x40"]),
        (FRAME, np.zeros((32, 40), np.float32), ["float32", "integers"]),
        (FRAME, np.zeros((32, 40, 3), np.uint8), ["(32, 40, 3)"]),
        (FRAME, np.full((32, 40), 65536), ["65536", "65535"]),
        (FRAME, np.full((32, 40), -1), ["-1"]),
    ],
    ids=lambda value: None if isinstance(value, (np.ndarray, torch.Tensor)) else str(value)[:30],
)
def test_wrong_frames_and_masks(frame, mask, words):
    tracker = Tracker(golden_model("aott"))
    with pytest.raises(InputError) as error:
        tracker.step(frame, mask)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_frames_of_one_video_have_one_size():
    tracker = Tracker(golden_model("aott"))
    tracker.step(FRAME)
    with pytest.raises(InputError, match=r"33x40.*32x40.*reset\(\)"):
        tracker.step(np.zeros((33, 40, 3), np.uint8))
    tracker.reset()
    tracker.step(np.zeros((33, 40, 3), np.uint8))


@pytest.mark.parametrize(
    "options, word",
    [
        ({"long_term_gap": -1}, "long_term_gap"),
        ({"max_memory_frames": 0}, "max_memory_frames"),
        ({"max_long_edge": 8}, "max_long_edge"),
        ({"max_short_edge": 0}, "max_short_edge"),
        ({"scales": ()}, "scales"),
        ({"scales": (1.0, -1.0)}, "scales"),
    ],
    ids=str,
)
def test_wrong_options(options, word):
    with pytest.raises(InputError, match=word):
        Tracker(golden_model("aott"), **options)


def test_removing_what_is_not_tracked():
    tracker = Tracker(golden_model("aott"))
    tracker.step(video(1)[0], squares([1, 2]))
    with pytest.raises(InputError, match=r"object 5 is not tracked: the tracked ids are \[1, 2\]"):
        tracker.remove([5])


# Kinds of arrays.


def test_kinds_of_frames_and_masks():
    """Tensors, views with steps, arrays that must not be written to: all the same, without a warning."""
    frames, mask = video(3, (49, 65)), squares([1, 2], (49, 65), side=16)  # a size that is not resized

    def frozen(frame: np.ndarray) -> np.ndarray:
        frame = frame.copy()
        frame.flags.writeable = False
        return frame

    expected = track(Tracker(golden_model("aott")), frames, {0: mask})
    kinds = {
        "tensor": (torch.from_numpy, torch.from_numpy(mask)),
        "planes": (
            lambda f: torch.from_numpy(f.transpose(2, 0, 1).copy()).permute(1, 2, 0),
            torch.from_numpy(mask).byte(),
        ),
        "mirrored twice": (lambda f: f[:, ::-1].copy()[:, ::-1], mask.astype(np.uint16)),
        "frozen": (frozen, frozen(mask.astype(np.uint8))),
        "lists": (lambda f: f, mask.astype(np.int64)[::-1].copy()[::-1]),
    }
    for kind, (convert, given) in kinds.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(track(Tracker(golden_model("aott")), [convert(f) for f in frames], {0: given}), expected), kind
    for f, original in zip(frames, video(3, (49, 65)), strict=True):
        assert (f == original).all()  # the caller's arrays are left alone


def test_boolean_mask_is_object_1():
    mask = squares([1], side=16)
    for given in (mask.astype(bool), torch.from_numpy(mask.astype(bool))):
        prediction = Tracker(golden_model("aott")).step(video(1)[0], given)
        assert prediction.object_ids == [1] and (prediction.labels == mask).all()


# Test-time augmentation.


@pytest.mark.parametrize("name", MODELS)
def test_flip_makes_mirrored_videos_mirror(name):
    frames, mask = video(4, (49, 65)), squares([1, 2], (49, 65), side=16)  # sizes that are not resized
    frames = [frame[:, 12:61].copy() for frame in frames]
    mask = mask[:, 12:61].copy()

    def run(mirrored: bool) -> list[Prediction]:
        turn = (lambda x: x[:, ::-1].copy()) if mirrored else (lambda x: x)
        return track(Tracker(golden_model(name), flip=True), [turn(f) for f in frames], {0: turn(mask)})

    single = track(Tracker(golden_model(name)), frames, {0: mask})
    for t, (straight, mirrored) in enumerate(zip(run(False), run(True), strict=True)):
        check(straight, mask.shape, [1, 2])
        assert (straight.labels != mirrored.labels[:, ::-1]).mean() < 0.005
        torch.testing.assert_close(straight.probabilities, mirrored.probabilities.flip(-1), atol=2e-3, rtol=0)
        if t:
            assert not torch.equal(straight.probabilities, single[t].probabilities)


def test_scales_and_flip_together():
    frames, mask = video(4), squares(list(range(1, 13)))
    tracker = Tracker(golden_model("aott"), scales=(1.0, 1.5), flip=True)
    for prediction in track(tracker, frames, {0: mask}):
        check(prediction, mask.shape, list(range(1, 13)))
    assert len(tracker._sessions) == 4
    tracker.remove([12, 11])
    assert all(set(session.groups) == {0} for session in tracker._sessions)
    # The mean over one view is that view.
    alone = track(Tracker(golden_model("aott"), scales=(1.0,)), frames, {0: mask})
    assert equal(alone, track(Tracker(golden_model("aott")), frames, {0: mask}))


# Long-term memory.


@pytest.mark.parametrize("name", MODELS)
def test_long_term_gap(name):
    frames, mask = video(8), squares([1, 2], side=16)

    def frames_held(gap: int | None) -> list[int]:
        tracker = Tracker(golden_model(name), long_term_gap=gap)
        held = []
        for t, frame in enumerate(frames):
            tracker.step(frame, mask if t == 0 else None)
            held.append(tracker.memory_frames)
        return held

    assert frames_held(0) == [1] * 8
    assert frames_held(None) == [1] * 8  # published: reference frames only
    assert frames_held(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert frames_held(3) == [1, 1, 1, 2, 2, 2, 3, 3]


def test_published_gap_is_the_default():
    model = build_model("aotl", encoder="timm/test_resnet", layers=1)
    assert model.test_memory_gap == 5
    frames, mask = video(8), squares([1], side=16)
    tracker = Tracker(model)
    track(tracker, frames, {0: mask})
    assert tracker.memory_frames == 2
    tracker = Tracker(model, long_term_gap=0)
    track(tracker, frames, {0: mask})
    assert tracker.memory_frames == 1


def test_gap_counts_from_the_last_reference_frame():
    frames, tracker, held = video(7), Tracker(golden_model("aott"), long_term_gap=3), []
    for t, frame in enumerate(frames):
        tracker.step(frame, squares([1 + t]) if t in (0, 2) else None)
        held.append(tracker.memory_frames)
    assert held == [1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("name", MODELS)
def test_bound_that_is_never_reached_changes_nothing(name):
    frames, masks = video(9), {0: squares([1, 2], side=16), 4: squares([9])}
    unbounded = track(Tracker(golden_model(name), long_term_gap=1), frames, masks)
    for bound in (9, 100):
        assert equal(
            track(Tracker(golden_model(name), long_term_gap=1, max_memory_frames=bound), frames, masks), unbounded
        )


@pytest.mark.parametrize("name", MODELS)
def test_bounded_memory(name):
    frames, mask = video(10), squares([1, 2], side=16)

    def run() -> tuple[list[Prediction], list[int]]:
        tracker, predictions, held = Tracker(golden_model(name), long_term_gap=1, max_memory_frames=3), [], []
        for t, frame in enumerate(frames):
            predictions.append(tracker.step(frame, mask if t == 0 else None))
            held.append(tracker.memory_frames)
        return predictions, held

    predictions, held = run()
    assert held == [1, 2, 3] + [3] * 7
    assert equal(run()[0], predictions)  # nothing is left to chance
    unbounded = track(Tracker(golden_model(name), long_term_gap=1), frames, {0: mask})
    assert equal(predictions[:3], unbounded[:3]) and not equal(predictions[4:], unbounded[4:])
    for prediction in predictions:
        check(prediction, mask.shape, [1, 2])


def test_reference_frames_are_kept_even_beyond_the_bound():
    frames, tracker = video(8), Tracker(golden_model("aott"), long_term_gap=1, max_memory_frames=2)
    held = []
    for t, frame in enumerate(frames):
        tracker.step(frame, squares([t + 1], side=16) if t in (0, 2, 4) else None)
        held.append(tracker.memory_frames)
    assert held == [1, 2, 2, 2, 3, 3, 3, 3]


def entry(value: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a frame of three tokens in two layers, all of one value."""
    return [(torch.full((1, 2, 3, 4), value), torch.full((1, 2, 3, 5), 10 * value)) for _ in range(2)]


def frames_in(memory: LongTermMemory) -> list[float]:
    (keys, values), (other_keys, other_values) = memory.read()
    assert keys.shape == (1, 2, 3 * memory.frames, 4) and values.shape == (1, 2, 3 * memory.frames, 5)
    assert torch.equal(values[..., 0], 10 * keys[..., 0])
    assert torch.equal(keys, other_keys) and torch.equal(values, other_values)
    return keys[0, 0, ::3, 0].tolist()


def test_memory_keeps_references_the_newest_and_what_is_used():
    memory = LongTermMemory(5)
    memory.add(entry(1.0), reference=True)
    for value in (2.0, 3.0, 4.0, 5.0):
        memory.add(entry(value), reference=False)
    assert frames_in(memory) == [1, 2, 3, 4, 5]
    # The attention of this query goes to the frame with the largest key that agrees with it.
    query = torch.zeros(1, 2, 6, 4)
    query[..., 0] = 50.0
    for value in range(6, 16):
        memory.note_use(query, torch.ones(6))
        memory.add(entry(-float(value)), reference=False)
        held = frames_in(memory)
        assert len(held) == 5 and 1 in held and -value in held
    assert 5 in held, "the frame that all attention goes to"
    assert memory._store[0][0].shape[2] == 5 * 3  # room for the bound and no further


def test_memory_without_bound_keeps_all_in_order():
    memory = LongTermMemory()
    for value in range(20):
        memory.add(entry(float(value)), reference=value == 0)
        assert frames_in(memory) == [float(v) for v in range(value + 1)]


def live_tensor_bytes() -> int:
    """Bytes behind all tensors that Python can reach."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some module attributes warn when they are only looked at
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.layout == torch.strided
    }
    return sum(storages.values())


def test_memory_does_not_grow_with_the_video():
    """400 frames made on the fly: at most ten in memory, as many bytes alive as after 100."""
    generator = np.random.default_rng(0)
    tracker = Tracker(golden_model("aott"), long_term_gap=2, max_memory_frames=10)
    mask = squares([1, 2], (16, 16))
    kept, alive = {}, {}
    for t in range(400):
        frame = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        tracker.step(frame, mask if t == 0 else None)
        assert tracker.memory_frames <= 10
        if t % 100 == 99:
            kept[t], alive[t] = memory_bytes(tracker), live_tensor_bytes()
    assert tracker.memory_frames == 10
    assert len(set(kept.values())) == 1 and kept[99] > 0
    assert max(alive.values()) <= 1.02 * alive[99]


def test_memory_without_gap_does_not_grow():
    generator = np.random.default_rng(0)
    tracker = Tracker(golden_model("aott"))
    kept = set()
    for t in range(30):
        tracker.step(
            generator.integers(0, 255, (16, 16, 3), dtype=np.uint8), squares([1], (16, 16)) if t == 0 else None
        )
        kept.add(memory_bytes(tracker))
    assert tracker.memory_frames == 1 and len(kept) == 1


# The model around the tracker.


def test_tracks_with_the_weights_that_the_model_has_when_the_video_begins():
    frames, mask = video(3), squares([1, 2], side=16)
    model = build_model("aott", encoder="timm/test_resnet")
    tracker = Tracker(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert equal(track(tracker, frames, {0: mask}), track(Tracker(model), frames, {0: mask}))


def test_training_mode_makes_no_difference():
    """Dropped branches and channels are for training: a model that was trained a moment ago tracks as it should."""
    frames, mask = video(4), squares([1, 2], side=16)
    model = build_model("deaott", encoder="timm/test_resnet")
    expected = track(Tracker(model), frames, {0: mask})
    tracker = Tracker(model)
    model.train()
    assert equal(track(tracker, frames, {0: mask}), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float64, 1e-4)], ids=str)
def test_weights_of_another_precision(name, dtype, tolerance):
    """bf16-true and 64-true: the masks come from scores in at least float32, near those of float32 weights."""
    frames, masks = video(4), {0: squares([1, 2], side=16)}
    expected = track(Tracker(golden_model(name), long_term_gap=1), frames, masks)
    other = unfolded_model.__wrapped__(name).to(dtype)
    for right, prediction in zip(expected, track(Tracker(other, long_term_gap=1), frames, masks), strict=True):
        assert prediction.probabilities.dtype in (torch.float32, dtype)
        # Against the differences between the planes: that they all lie high says nothing.
        scale = (right.probabilities - right.probabilities.mean(0)).norm()
        assert (prediction.probabilities - right.probabilities).norm() < tolerance * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_for_inference(name):
    """torch.compile computes the same, for frames of more than one size and a memory that grows."""
    compiled = unfolded_model.__wrapped__(name)
    compiled.compile_for_inference()
    for size in ((48, 64), (70, 50)):
        frames, masks = video(4, size), {0: squares([1, 2], size, side=16)}
        expected = track(Tracker(golden_model(name), long_term_gap=1), frames, masks)
        for right, prediction in zip(expected, track(Tracker(compiled, long_term_gap=1), frames, masks), strict=True):
            torch.testing.assert_close(prediction.scores, right.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "sides, factor",
    [
        ([40], 100 / 128),  # large enough at the usual size
        ([40, 16], 1.25),  # the smallest decides: 20 / 16
        ([14], 1.6 * 100 / 128),  # 20 / 14 would be beyond the limit
    ],
)
def test_enlargement_for_small_objects(sides, factor):
    mask = np.zeros((96, 128), np.int32)
    for i, side in enumerate(sides):
        mask[50 * i : 50 * i + side, :side] = 7 + i
    assert enlargement(mask, object_edge=20, long_edge=100) == pytest.approx(factor)
    assert enlargement(mask, object_edge=20, long_edge=1000) == 2.0  # never more than twice


def test_tracker_enlarges_frames_for_small_objects():
    """Once for a video, with its first object, and not where the caller has set the size."""
    model = build_model("aott", object_edge=24, max_long_edge=64)
    sizes: list[tuple[int, int]] = []
    model.encoder.register_forward_pre_hook(lambda _, images: sizes.append(tuple(images[0].shape[-2:])))
    model.folded_encoder = lambda: model.encoder
    frames = video(3)
    for limit, expected in ((None, model.input_size(72, 96)), (64, model.input_size(48, 64))):
        sizes.clear()
        tracker = Tracker(model, max_long_edge=limit)
        predictions = track(tracker, frames, {1: squares([5], side=16), 2: squares([9], side=8)})
        assert sizes == [expected] * 2
        assert predictions[2].labels.shape == (48, 64) and predictions[2].object_ids == [5, 9]
        tracker.reset()
        tracker.step(frames[0], squares([1], side=40))
        assert sizes[-1] == model.input_size(48, 64)
