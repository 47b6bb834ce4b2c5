"""The reference's losses, schedules, parameter groups and training steps."""

import json

import numpy as np
import pytest
import torch
from golden_cases import Case, golden_model, golden_path

from models.aot import sine_position
from models.published import rename_key
from utils.losses import clip_loss, frame_losses, hard_cross_entropy, kept_pixels, soft_jaccard, training_iou
from utils.schedule import (
    WeightAverage,
    learning_rate,
    parameter_groups,
    reference_weight,
    set_learning_rate,
)


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual).double(), torch.as_tensor(np.asarray(expected)).double(), atol=tolerance, rtol=tolerance
    )


@pytest.fixture(scope="module")
def units() -> Case:
    return Case("units.npz")


def test_losses_and_their_gradients(units):
    for number, row in enumerate(r for r in units.meta["rows"] if "run" in r):
        if row["loss"] in ("ce_plain", "dice"):  # the recipe never uses these two
            continue
        for sample in range(3):
            logits = torch.from_numpy(units[f"logits_{sample}"]).requires_grad_()
            label = torch.from_numpy(units[f"labels_{sample}"])[0].long()
            if row["loss"] == "soft_jaccard":
                loss = soft_jaccard(logits[0], label)
            else:
                total = 100000 if row["loss"].endswith("mine50000") else 0
                kept = kept_pixels(label.numel(), row["step"], total)
                assert kept == row["top_k_pixels"]
                loss = hard_cross_entropy(logits[0], label, kept)
            loss.backward()
            close(loss, units[f"r{number}_loss"][sample])
            close(logits.grad, units[f"r{number}_grad_{sample}"])


def test_training_iou():
    label = torch.zeros(2, 4, 4, dtype=torch.int64)
    label[0, :2, :2], label[0, 3, 3], label[1, 0, 0] = 1, 2, 255
    predicted = torch.zeros_like(label)
    predicted[0, :2, 1:3], predicted[1, 0, 0] = 1, 1
    # Object 1: 2 of 6 pixels; object 2 missed; the second clip has no object.
    close(training_iou(predicted, label, torch.tensor([2, 0])), 1 / 6)


def test_position_embedding(units):
    for size, key, rows, columns in (((7, 9), "7x9", 1, 1), ((6, 8), "6x8", 1, 1), ((30, 54), "30x54", 6, 9)):
        embedding = sine_position(size, 256).reshape(1, *size, 256).permute(0, 3, 1, 2)
        close(embedding[:, :, ::rows, ::columns], units[f"pos_emb_{key}"])


def test_learning_rates():
    golden = json.loads(golden_path("optim.json").read_text())
    for name, run in golden["lr_schedule"].items():
        for row in run["rows"]:
            rate = learning_rate(row["step"], run["total_steps"], run["base_lr"], run["min_lr"], power=run["power"])
            assert rate == pytest.approx(row["now_lr"], rel=1e-9), (name, row["step"])
            weight = reference_weight(row["step"], run["total_steps"], ratio=0.1 if name.endswith("/pre") else 1.0)
            assert weight == pytest.approx(row["aux_weight"], rel=1e-9, abs=1e-15)
    for variant in golden["lr_schedule_variants_base2e-4_min2e-5_warm5000_total100000"]:
        options = variant["options"]
        for step, expected in variant["rows"]:
            rate = learning_rate(
                step,
                100000,
                2e-4,
                2e-5,
                cosine=options.get("is_cosine_decay", False),
                restarts=options.get("restart", 1),
            )
            assert rate == pytest.approx(expected, rel=1e-9), (options, step)


def test_parameter_groups_and_rates():
    golden = json.loads(golden_path("optim.json").read_text())
    row = golden["lr_schedule"]["aott/pre_ytb_dav"]["rows"][-3]
    for name, run in golden["param_groups"].items():
        model = golden_model(name)
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.07))
        names = {id(p): key for key, p in model.named_parameters()}
        decay = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
        set_learning_rate(optimizer, row["now_lr"], 2e-5, 0.1, freeze_identities=True)
        rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
        expected = {
            rename_key(key.removeprefix("AOT."), model.settings.encoder): (value, slow)
            for key, _, value, slow in run["groups"]
            if not key.endswith("mask_token")  # never used, frozen here
        }
        assert decay == {key: value for key, (value, _) in expected.items()}
        for key, (_, slow) in expected.items():
            rate = 0 if key.startswith("identity_bank") else row["encoder_lr" if slow else "other_lr"]
            assert rates[key] == pytest.approx(rate, rel=1e-9)


def test_moving_average():
    golden = json.loads(golden_path("optim.json").read_text())["ema"]
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    average = WeightAverage(model, golden["decay"])
    for n, _, shadow in golden["rows"]:
        with torch.no_grad():
            model.weight.fill_(n)
        average.update()
        assert average.updates == n
        close(average.shadow["weight"][0, 0], shadow, 1e-5)


def training_model(name: str) -> torch.nn.Module:
    """Golden weights, train mode, all randomness off."""
    model = golden_model.__wrapped__(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout2d):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model


def clips(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    frames = torch.from_numpy(case["frames"]).permute(1, 0, 4, 2, 3)
    return frames, torch.from_numpy(case["labels"]).transpose(0, 1).long(), torch.from_numpy(case["obj_nums"])


def losses_of(model, case, combo):
    frames, labels, num_objects = clips(case)
    logits = model(
        frames,
        labels,
        num_objects,
        feed_predictions=combo["use_prev_pred"],
        reference_gradient=combo["aux_weight"] > 0,
    )
    losses = frame_losses(logits, labels, num_objects, combo["step"], combo["total_steps"], model.align_corners)
    return logits, losses, clip_loss(losses, combo["aux_weight"])


@pytest.mark.parametrize("name", ["aott", "deaott"])
@pytest.mark.parametrize("number", range(6))  # the settings that the published recipe uses
def test_training_step(name, number):
    case = Case(f"train_{name}.npz")
    combo = case.meta["combos"][number]
    model = training_model(name)
    logits, losses, loss = losses_of(model, case, combo)
    loss.backward()
    close(loss.detach(), case[f"c{number}_loss"], 1e-5)
    close(losses.detach().T, case[f"c{number}_frame_losses"], 1e-5)
    predicted = torch.stack([model.resize(frame, case["labels"].shape[-2:]).argmax(1) for frame in logits.unbind(1)])
    assert (predicted.numpy() != case[f"c{number}_pred"]).mean() < 0.0005
    parameters = dict(model.named_parameters())
    for key, expected in zip(case["param_names"], case[f"c{number}_grad_norm"], strict=True):
        parameter = parameters[rename_key(str(key), model.settings.encoder)]
        norm = -1.0 if parameter.grad is None else parameter.grad.norm().item()
        if expected == -1 and parameter.requires_grad:
            assert norm == 0, key  # the identity bank of sequential training: a zero gradient for data parallelism
        else:
            assert norm == pytest.approx(expected, rel=5e-3, abs=1e-4), key


@pytest.mark.parametrize("name", ["aott", "deaott"])
@pytest.mark.parametrize("start", [0, 50000])
def test_trajectory(name, start):
    """Four optimiser steps: rate, forward, backward, clip, AdamW, moving average."""
    case = Case(f"train_{name}.npz")
    prefix = "traj0" if start == 0 else "traj50k"
    noise = case.meta["trajectory_noise"][prefix]
    model = training_model(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.07))
    average = WeightAverage(model, 1 - 1 / (100000 * 0.1))
    for i in range(4):
        step = start + i
        rate = learning_rate(step, 100000, 2e-4, 2e-5)
        assert rate == pytest.approx(case[f"{prefix}_lr"][i], rel=1e-9)
        set_learning_rate(optimizer, rate, 2e-5, 0.1, freeze_identities=step >= 50000)
        combo = {
            "use_prev_pred": step >= 50000,
            "aux_weight": reference_weight(step, 100000),
            "step": step,
            "total_steps": 100000,
        }
        _, _, loss = losses_of(model, case, combo)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        close(loss.detach(), case[f"{prefix}_loss"][i], 1e-5 + 20 * noise["noise_loss"][i])
        assert norm.item() == pytest.approx(
            case[f"{prefix}_total_grad_norm"][i], abs=0.01 + 20 * noise["noise_grad_norm"][i]
        )
        optimizer.step()
        average.update()
    names = [rename_key(str(key), model.settings.encoder) for key in case["param_names"]]
    parameters = dict(model.named_parameters())
    tolerance = 20 * noise["noise_param_norm_max"]
    for key, expected in zip(names, case[f"{prefix}_param_norm"], strict=True):
        assert parameters[key].norm().item() == pytest.approx(expected, rel=1e-4, abs=tolerance + 1e-5), key
    moved = np.array([(parameters[key] - before[key]).norm().item() for key in names])
    assert moved == pytest.approx(case[f"{prefix}_param_moved"], rel=0.1, abs=1e-4)
    averaged = [key for key in names if key in average.shadow or key.endswith("mask_token")]
    for key, expected in zip(averaged, case[f"{prefix}_ema_norm"], strict=True):
        if not key.endswith("mask_token"):
            assert average.shadow[key].norm().item() == pytest.approx(expected, rel=1e-4, abs=tolerance + 1e-5), key
