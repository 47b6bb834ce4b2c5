"""The reference's inference runs, through the tracker (free running) and the session (teacher forced)."""

import json

import numpy as np
import pytest
import torch
from golden_cases import Case, golden_model, golden_path, names

from models import Tracker, build_model, list_models
from models.session import Session
from models.tracker import network_size

CASES = [name for name in names("infer_*.npz") if name != "infer_swinb_deaotl_a.npz"]  # windows larger than the map


def tracker_of(case: Case) -> Tracker:
    meta = case.meta
    gap = meta["long_term_mem_gap"]
    return Tracker(
        golden_model(meta["model"]),
        long_term_gap=0 if gap == 9999 else gap,
        max_long_edge=meta["max_long_edge"],
        max_short_edge=meta["max_short_edge"],
        flip=meta["flip"],
        scales=meta["multi_scale"],
    )


@pytest.mark.parametrize("name", CASES)
def test_free_running_labels(name):
    case = Case(name)
    tracker, masks = tracker_of(case), case.masks()
    for t, frame in enumerate(case["frames"]):
        prediction = tracker.step(frame, masks.get(t))
        if t == 0:
            assert (prediction.labels == masks[0]).all()
            continue
        wrong = (prediction.labels != case["pred"][t - 1]).mean()
        assert wrong < 0.005, f"frame {t}: {wrong:.2%} of the labels differ"


@pytest.mark.parametrize("name", [name for name in CASES if not Case(name).meta["flip"]])
@torch.inference_mode()
def test_teacher_forced_logits(name):
    """The reference's own masks go into memory, so that only the networks can differ."""
    case = Case(name)
    model, gap = golden_model(case.meta["model"]), case.meta["long_term_mem_gap"]
    session = Session(model, None if gap == 9999 else gap, None)
    tracker = tracker_of(case)
    tracker._frame_size = case["frames"].shape[1:3]
    slots: list[int] = []
    for t, frame in enumerate(case["frames"]):
        features = model.encode(tracker._view(frame, 1.0, False))
        logits = session.read(features)
        for group, logit in logits.items():
            expected = torch.from_numpy(case[f"logits_f{t:03}_a0_e{group}"])
            assert (logit - expected).abs().max() <= 5e-4, f"frame {t}, group {group}"
        if logits and t not in case["label_idx"]:
            scores = session.merge(logits, frame.shape[:2])[0]
            labels = scores.argmax(0).numpy()
            certain = ~case.near_tie(t)
            assert (labels == case["pred"][t - 1])[certain].all()
        if f"ref_mask_f{t:03}_a0" in case:
            mask = torch.from_numpy(case[f"ref_mask_f{t:03}_a0"]).float()[None]
            slots = list(range(int(mask.max())))
            session.write_reference(features, mask, slots)
        else:
            session.write(features, torch.from_numpy(case[f"mem_mask_f{t:03}_a0"]).float()[None])


@pytest.mark.parametrize("name", list_models())
def test_parameter_counts(name):
    keys = json.loads(golden_path(f"keys_{name}.json").read_text())
    model = golden_model(name)
    assert sum(p.numel() for p in model.parameters()) == keys["param_count"]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # The reference leaves its unused mask token trainable; here it is frozen, so that no gradient is waited for.
    unused = model.transformer.mask_token.numel() if hasattr(model.transformer, "mask_token") else 0
    assert trainable + unused == keys["trainable_param_count"]
    floats = [v for k, v in model.state_dict().items() if v.is_floating_point()]
    assert sum(v.numel() for v in floats) == keys["float_state_count"]


def test_network_sizes():
    rows = json.loads(golden_path("sizes.json").read_text())["rows"]

    models = {True: build_model("aott"), False: build_model("aott", align_corners=False)}
    for row in rows:
        limits = row["max_short_edge"], row["max_long_edge"]
        model = models[row["align_corners"]]
        sizes = [list(network_size(model, row["h"], row["w"], scale, *limits)) for scale in row["multi_scale"]]
        assert sizes == row["sizes"], row


def test_frames_of_the_case_are_tracked_again_after_reset():
    case = Case("infer_aott_a.npz")
    tracker, masks = tracker_of(case), case.masks()

    def run() -> np.ndarray:
        return np.stack([tracker.step(frame, masks.get(t)).labels for t, frame in enumerate(case["frames"][:3])])

    first = run()
    tracker.reset()
    assert (run() == first).all()
