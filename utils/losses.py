"""The training loss of AOT and DeAOT (AOT paper, appendix; values in the golden files) and the training IoU."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = 255


def kept_pixels(pixels: int, step: int, total_steps: int, share: float = 0.15, mining_ratio: float = 0.5) -> int:
    """How many of a frame's pixels the cross entropy keeps: all at first, the hardest `share` of them in the end."""
    progress = min(1.0, step / (mining_ratio * total_steps + 1e-5))
    return int((progress * share + (1 - progress)) * pixels)


def hard_cross_entropy(logits: Tensor, label: Tensor, kept: int) -> Tensor:
    """Mean of the `kept` largest per-pixel cross entropies; ignored pixels count with 0.

    Args:
        logits: (k, h, w) with the background first.
        label: (h, w) int64, IGNORE allowed.
    """
    losses = F.cross_entropy(logits[None], label[None], ignore_index=IGNORE, reduction="none").flatten()
    return (losses if kept >= losses.numel() else losses.topk(kept, sorted=False).values).mean()


def soft_jaccard(logits: Tensor, label: Tensor) -> Tensor:
    """1 - soft IoU, mean over the identities that occur in the label, the background too; ignored pixels left out.

    Args: as `hard_cross_entropy`.
    """
    probabilities = logits.softmax(0).flatten(1)
    label = label.flatten()
    valid = (label != IGNORE).to(probabilities.dtype)
    truth = (label == torch.arange(len(logits), device=label.device)[:, None]).to(probabilities.dtype)
    overlap = (probabilities * truth).sum(1)
    only_truth = ((1 - probabilities) * truth).sum(1)
    only_predicted = (probabilities * (1 - truth) * valid).sum(1)
    losses = 1 - overlap / (overlap + only_truth + only_predicted + 1e-6)
    present = truth.any(1).to(losses.dtype)
    return (losses * present).sum() / present.sum().clamp(min=1)


def frame_losses(
    logits: Tensor, labels: Tensor, num_objects: Tensor, step: int, total_steps: int, align_corners: bool
) -> Tensor:
    """0.5 cross entropy + 0.5 Jaccard of each frame: (b, t).

    Args:
        logits: (b, t, 11, h/4, w/4) as the network's training pass gives them.
        labels: (b, t, h, w), 0 background, 1..num_objects, IGNORE.
        num_objects: (b,); channels beyond it take no part.
    """
    size = labels.shape[-2:]
    kept = kept_pixels(size[0] * size[1], step, total_steps)
    losses = []
    for sample, label, objects in zip(logits, labels.long(), num_objects.tolist(), strict=True):
        used = sample[:, : objects + 1]
        used = used.float() if used.dtype in (torch.half, torch.bfloat16) else used
        used = F.interpolate(used, size, mode="bilinear", align_corners=align_corners)
        losses.append(
            torch.stack(
                [
                    0.5 * hard_cross_entropy(used[t], label[t], kept) + 0.5 * soft_jaccard(used[t], label[t])
                    for t in range(len(label))
                ]
            )
        )
    return torch.stack(losses)


def clip_loss(losses: Tensor, reference_weight: float) -> Tensor:
    """Mean over the clips and the frames after the reference, plus the weighted mean over the reference frames."""
    return losses[:, 1:].mean() + reference_weight * losses[:, 0].mean()


def training_iou(predicted: Tensor, labels: Tensor, num_objects: Tensor) -> Tensor:
    """Mean over clips that have objects of the mean IoU of their objects; ignored pixels left out.

    Args:
        predicted, labels: (b, ..., h, w) integers.
        num_objects: (b,).
    """
    values = []
    for sample, label, objects in zip(predicted, labels, num_objects.tolist(), strict=True):
        if objects == 0:
            continue
        valid = label != IGNORE
        ious = []
        for identity in range(1, objects + 1):
            p, g = (sample == identity) & valid, label == identity
            ious.append(((p & g).sum() + 1e-6) / ((p | g).sum() + 1e-6))
        values.append(torch.stack(ious).mean())
    return torch.stack(values).mean() if values else torch.zeros((), device=predicted.device)
