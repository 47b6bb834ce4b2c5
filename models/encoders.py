"""Image encoders: backbones of timm and torchvision cut to the four maps that AOT reads.

Every encoder maps images (b, 3, h, w) to four maps at 1/4, 1/8, 1/16 and again 1/16 of the size; `channels` are their
widths. Batch norm is frozen: statistics and affine are buffers (AOT recipe, MODEL_FREEZE_BN).
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from utils.errors import InputError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_encoder(name: str) -> nn.Module:
    """Build an encoder with random weights.

    Args:
        name: mobilenetv2, resnet50, resnet101, resnest101, swin_base (the published ones) or timm/<name> for any
            model of timm that gives maps at 1/4, 1/8 and 1/16.

    Raises:
        InputError: no such encoder, or one without these maps.
    """
    if name == "mobilenetv2":
        return MobileNetV2()
    if name == "swin_base":
        return SwinBase()
    if name in _PUBLISHED_RESNETS:
        return TimmPyramid(_PUBLISHED_RESNETS[name], dilate_last_stage=False)
    if name.startswith("timm/"):
        return TimmPyramid(name.removeprefix("timm/"))
    known = ", ".join(["mobilenetv2", *_PUBLISHED_RESNETS, "swin_base"])
    raise InputError(f"encoder {name!r} is not known: choose one of {known} or timm/<name>")


_PUBLISHED_RESNETS = {"resnet50": "resnet50", "resnet101": "resnet101", "resnest101": "resnest101e"}


class TimmPyramid(nn.Module):
    """Any timm backbone with maps at 1/4, 1/8 and 1/16.

    With `dilate_last_stage` the stage that would give 1/32 runs dilated at 1/16 and gives the fourth map, where timm
    can do that for the backbone; otherwise that stage is left out and the 1/16 map serves twice.
    """

    def __init__(self, name: str, dilate_last_stage: bool = True):
        super().__init__()
        import timm

        if not timm.is_model(name):
            near = ", ".join(timm.list_models(f"*{name[:8]}*")[:5]) or "none"
            raise InputError(f"encoder timm/{name}: timm has no model of that name; similar ones: {near}")
        reductions, dilated = _reductions(name), False
        if dilate_last_stage:
            try:
                reductions, dilated = _reductions(name, output_stride=16), True
            except Exception:  # each family of timm refuses output_stride in its own way
                dilated = False
        if not {4, 8, 16} <= set(reductions):
            raise InputError(
                f"encoder timm/{name} gives maps at 1/{', 1/'.join(map(str, reductions))}: it needs 1/4, 1/8 and 1/16"
            )
        indices = [len(reductions) - 1 - reductions[::-1].index(4), len(reductions) - 1 - reductions[::-1].index(8)]
        indices.append(reductions.index(16))
        last = len(reductions) - 1 - reductions[::-1].index(16)
        if last != indices[-1]:
            indices.append(last)
        options = {"output_stride": 16} if dilated else {}
        self.backbone = timm.create_model(name, features_only=True, out_indices=indices, **options)
        self.backbone = timm.layers.freeze_batch_norm_2d(self.backbone)
        config = self.backbone.default_cfg if hasattr(self.backbone, "default_cfg") else {}
        self.mean, self.std = tuple(config.get("mean", IMAGENET_MEAN)), tuple(config.get("std", IMAGENET_STD))
        widths = self.backbone.feature_info.channels()
        self.channels = (*widths, widths[-1]) if len(widths) == 3 else tuple(widths)
        self._first_stage = self.backbone.feature_info.module_name()[0]

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.backbone(x)
        return maps if len(maps) == 4 else [*maps, maps[-1]]

    def freeze_first_stage(self) -> None:
        """Freeze everything up to the 1/4 map."""
        named = list(self.backbone.named_parameters())
        prefixes = tuple({self._first_stage, self._first_stage.replace(".", "_")})
        last = max(i for i, (name, _) in enumerate(named) if name.startswith(prefixes))
        for _, parameter in named[: last + 1]:
            parameter.requires_grad_(False)


def _reductions(name: str, **options: int) -> list[int]:
    import timm

    with torch.device("meta"):
        return timm.create_model(name, features_only=True, **options).feature_info.reduction()


class MobileNetV2(nn.Module):
    """timm's mobilenetv2_100 with its head convolution, the 1/32 stage dilated to stay at 1/16."""

    channels = (24, 32, 96, 1280)
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self):
        super().__init__()
        import timm

        backbone = timm.create_model("mobilenetv2_100", output_stride=16, num_classes=0)
        self.backbone = timm.layers.freeze_batch_norm_2d(backbone)

    def forward(self, x: Tensor) -> list[Tensor]:
        last, maps = self.backbone.forward_intermediates(x, indices=[1, 2, 3])
        return [*maps, last]

    def freeze_first_stage(self) -> None:
        """Freeze the stem and the blocks up to the 1/4 map."""
        for module in (self.backbone.conv_stem, self.backbone.blocks[0], self.backbone.blocks[1]):
            module.requires_grad_(False)


class SwinBase(nn.Module):
    """The first three stages of torchvision's Swin-B with a layer norm on each output."""

    channels = (128, 256, 512, 512)
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self):
        super().__init__()
        from torchvision.models.swin_transformer import SwinTransformer

        # Depths of the whole Swin-B, so that stochastic depth rises as in the published recipe; stage four is cut off.
        swin = SwinTransformer([4, 4], 128, [2, 2, 18, 2], [4, 8, 16, 32], [7, 7], stochastic_depth_prob=0.3)
        self.features = swin.features[:6]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self.channels[:3])

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        for i, stage in enumerate(self.features):
            x = stage(x)
            if i % 2 == 1:
                maps.append(rearrange(self.norms[i // 2](x), "b h w c -> b c h w"))
        return [*maps, maps[-1]]

    def freeze_first_stage(self) -> None:
        """Freeze the patch embedding and the first stage, not the merging that follows it."""
        self.features[:2].requires_grad_(False)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images (..., 3, h, w) in 0..255 to the network's float32 input ((x / 255) - mean) / std.

    Computed in float64 and rounded once, as the published evaluation does.
    """
    dtype = torch.float32 if images.device.type == "mps" else torch.float64  # MPS has no float64
    shift = torch.tensor(mean, dtype=dtype, device=images.device).mul(255).reshape(3, 1, 1)
    scale = torch.tensor(std, dtype=dtype, device=images.device).mul(255).reshape(3, 1, 1)
    return images.to(dtype, copy=True).sub_(shift).div_(scale).float()
