"""Frozen batch norm folded into the convolutions before it: the same function with fewer passes over memory."""

import copy

import torch
from timm.layers import FrozenBatchNormAct2d
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d


@torch.no_grad()
def fold_batch_norm(module: nn.Module, example: Tensor) -> nn.Module:
    """A copy of a module with fixed weights in which frozen batch norms are part of the convolutions they follow.

    Which convolution feeds which norm is seen in one run, so that it holds for any backbone; a norm that follows
    something else stays as it is.

    Args:
        module: left unchanged.
        example: a small input to run.
    """
    module = copy.deepcopy(module).eval().requires_grad_(False)
    outputs: dict[int, nn.Conv2d] = {}
    keep: list[Tensor] = []  # no id is used twice while its tensor lives
    pairs: list[tuple[nn.Conv2d, nn.Module]] = []

    def after_convolution(conv: nn.Conv2d, _, output: Tensor) -> None:
        outputs[id(output)] = conv
        keep.append(output)

    def before_norm(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        conv = outputs.pop(id(inputs[0]), None)
        if conv is not None:
            pairs.append((conv, norm))

    hooks = []
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            hooks.append(part.register_forward_hook(after_convolution))
        elif isinstance(part, (FrozenBatchNormAct2d, FrozenBatchNorm2d)):
            hooks.append(part.register_forward_pre_hook(before_norm))
    module(example)
    for hook in hooks:
        hook.remove()
    replacement: dict[nn.Module, nn.Module] = {}
    for conv, norm in pairs:
        # In float64 and rounded once: labels at a tie hang on the last bits.
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        bias = norm.bias.double() - norm.running_mean.double() * scale
        if conv.bias is not None:
            bias = bias + conv.bias.double() * scale
        dtype = conv.weight.dtype
        conv.weight.copy_(conv.weight.double() * scale.reshape(-1, 1, 1, 1))
        conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        replacement[norm] = norm.act if isinstance(norm, FrozenBatchNormAct2d) else nn.Identity()
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if child in replacement:
                setattr(parent, name, replacement[child])
    return module
