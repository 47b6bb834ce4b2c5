"""The network's training pass and its identities, apart from the reference's numbers."""

import numpy as np
import pytest
import torch

from models import Tracker, build_model
from models.network import NO_OBJECT, SLOTS
from utils.heap import keep_freed_blocks


@pytest.mark.parametrize("align_corners", [True, False])
@torch.inference_mode()
def test_label_embedding_is_that_of_its_planes(align_corners):
    model = build_model("deaott", align_corners=align_corners)
    label = torch.zeros(model.input_size(100, 130), dtype=torch.uint8)
    label[10:60, 20:90], label[40:, 100:], label[0, 0] = 1, 2, 3
    slots = [0, 2, 7, 10]
    planes = torch.zeros(1, SLOTS + 1, *label.shape)
    for position, slot in enumerate(slots):
        planes[0, slot] = label == position
    torch.testing.assert_close(model.embed_label(label, slots), model.embed_identities(planes), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["aott", "deaott"])
def test_identity_shuffle_is_a_renaming(name):
    """Clips with permuted slots give the logits of clips whose objects carry the permuted ids, in the old order."""
    model = build_model(name)
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (2, 3, 3, 65, 65), dtype=torch.uint8)
    labels = torch.randint(0, 4, (2, 3, 5, 5)).repeat_interleave(13, 2).repeat_interleave(13, 3)
    order = torch.stack([torch.randperm(SLOTS), torch.randperm(SLOTS)])
    everything = torch.tensor([SLOTS, SLOTS])  # no slot is masked, so that all of them can be compared
    renamed = labels.clone()
    for b in range(2):
        for identity in range(1, SLOTS + 1):
            renamed[b][labels[b] == identity] = order[b, identity - 1] + 1
    with torch.no_grad():
        shuffled = model(frames, labels, everything, permutation=order)
        expected = model(frames, renamed, everything)
    back = torch.nn.functional.pad(order + 1, (1, 0))
    expected = torch.stack([expected[b][:, back[b]] for b in range(2)])
    torch.testing.assert_close(shuffled, expected, atol=1e-5, rtol=1e-5)


def test_slots_without_object_and_ignored_pixels():
    model = build_model("aott")
    frames = torch.randint(0, 256, (1, 2, 3, 65, 65), dtype=torch.uint8)
    labels = torch.zeros(1, 2, 65, 65, dtype=torch.int64)
    labels[:, :, :30, :30] = 1
    ignored = labels.clone()
    ignored[:, :, 40:, 40:] = 255
    with torch.no_grad():
        logits = model(frames, labels, torch.tensor([1]))
        other = model(frames, ignored, torch.tensor([1]))
    assert (logits[:, :, 2:] == NO_OBJECT).all() and (logits[:, :, :2] > NO_OBJECT).all()
    assert not torch.equal(logits, other)  # an ignored pixel has no identity, not the background's


def test_keeping_freed_blocks_is_harmless():
    assert keep_freed_blocks() in (True, False)
    assert (torch.ones(1 << 22) + 1).sum() == 2 << 22


@pytest.mark.parametrize("name", ["aott", "deaott"])
def test_ease_start_tells_identities_apart_and_looks_near(name):
    model = build_model(name)
    model.ease_start()
    codes = model.identity_bank.weight.sum((2, 3))
    torch.testing.assert_close(codes.T @ codes, 900 * torch.eye(SLOTS + 1), atol=0.5, rtol=0)
    for bias in model.transformer.layers[0].short_term_attn.relative_emb_k.bias.view(-1, 15, 15):
        assert bias[7, 7] > bias.max() - 0.2  # the random start may move the top a little
        assert bias[7, 7] > bias[0].max() + 3


def test_groups_of_one_track_every_object_by_itself():
    """An object's own group sees the others as background: what one shows, all show, whatever their number."""
    model = build_model("aott", group_size=1)
    tracker = Tracker(model)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 65, 81, 3), dtype=np.uint8)
    mask = np.zeros((65, 81), np.uint8)
    mask[5:30, 5:30], mask[35:60, 40:70], mask[40:50, 5:20] = 4, 9, 200
    assert (tracker.step(frames[0], mask).labels == mask).all()
    three = tracker.step(frames[1])
    assert three.object_ids == [4, 9, 200] and three.probabilities.shape == (4, 65, 81)
    assert len(tracker._sessions[0].groups) == 3
    tracker.remove([9])
    assert len(tracker._sessions[0].groups) == 2
    assert tracker.step(frames[2]).object_ids == [4, 200]


@pytest.mark.parametrize("name", ["aotl", "deaott"])
def test_recomputed_activations_give_the_same_gradients(name):
    """With what is random in training, and with a memory of several frames."""
    model = build_model(name).train()
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (2, 4, 3, 65, 65), dtype=torch.uint8)
    labels = torch.randint(0, 4, (2, 4, 5, 5)).repeat_interleave(13, 2).repeat_interleave(13, 3)
    gradients, saved = [], []
    for recompute in (False, True):
        torch.manual_seed(1)
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = model(frames, labels, torch.tensor([3, 3]), recompute=recompute)
        logits[:, :, :4].square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        saved.append(sum(kept.values()))
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 50
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=lambda text, key=key: f"{key}: {text}")
    print(saved)
    assert saved[1] < 0.5 * saved[0]
