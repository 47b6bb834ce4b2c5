"""Image encoders: backbones of timm and torchvision cut to the four maps that AOT reads.

Every encoder maps images (b, 3, h, w) to four maps at 1/4, 1/8, 1/16 and again 1/16 of the size; `channels` are their
widths. `align_corners` says which sizes give maps that fit: images of 16k + 1 pixels a side (True) or 16k (False);
backbones that cut the image into patches take 16k alone. Batch norm is frozen: statistics and affine are buffers (AOT
recipe, MODEL_FREEZE_BN).
"""

import difflib
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
            near = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=5)) or "none"
            raise InputError(f"encoder timm/{name}: timm has no model of that name; similar ones: {near}")
        stages, options = _stages(name), {}
        if dilate_last_stage:
            try:
                stages, options = _stages(name, output_stride=16), {"output_stride": 16}
            except InputError:
                pass
        last = {reduction: index for index, reduction in stages}
        if not {4, 8, 16} <= set(last):
            given = ", ".join(f"1/{reduction}" for _, reduction in stages)
            raise InputError(f"encoder timm/{name} gives maps at {given}: it needs 1/4, 1/8 and 1/16")
        first = next(index for index, reduction in stages if reduction == 16)
        indices = [last[4], last[8], first] + ([last[16]] if last[16] != first else [])
        self.backbone = timm.create_model(name, features_only=True, out_indices=indices, **options)
        self.backbone = timm.layers.freeze_batch_norm_2d(self.backbone)
        config = self.backbone.default_cfg if hasattr(self.backbone, "default_cfg") else {}
        self.mean, self.std = tuple(config.get("mean", IMAGENET_MEAN)), tuple(config.get("std", IMAGENET_STD))
        widths = self.backbone.feature_info.channels()
        self.channels = (*widths, widths[-1]) if len(widths) == 3 else tuple(widths)
        self.align_corners = tuple(aligned for aligned in (True, False) if self._fits(aligned))
        if not self.align_corners:
            raise InputError(
                f"encoder timm/{name} does not take images of any size, or gives maps that are not 1/4, 1/8 and 1/16 "
                "of them: choose a convolutional backbone or swin_base"
            )

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.backbone(x)
        return maps if len(maps) == 4 else [*maps, maps[-1]]

    @torch.no_grad()
    def _fits(self, aligned: bool) -> bool:
        """Whether images of 16k + 1 (aligned) or 16k pixels a side give maps of 4k + 1, 2k + 1, k + 1 or 4k, 2k, k."""
        training = self.training
        try:
            maps = self.eval()(_probe(aligned))
        except Exception:  # each family of timm refuses sizes in its own way
            return False
        finally:
            self.train(training)
        expected = [(2 * k + aligned, 3 * k + aligned) for k in (4, 2, 1, 1)]
        return [tuple(level.shape[-2:]) for level in maps] == expected

    def freeze_first_stage(self) -> None:
        """Freeze everything that the 1/4 map depends on, and what no map depends on: it would get no gradient."""
        parameters = [p for p in self.backbone.parameters() if p.requires_grad]
        with torch.enable_grad():
            maps = self(_probe(self.align_corners[0]))
            early = torch.autograd.grad(maps[0].sum(), parameters, retain_graph=True, allow_unused=True)
            ever = torch.autograd.grad(sum(level.sum() for level in maps), parameters, allow_unused=True)
        for parameter, feeds_first, feeds_any in zip(parameters, early, ever, strict=True):
            if feeds_first is not None or feeds_any is None:
                parameter.requires_grad_(False)


def _stages(name: str, **options: int) -> list[tuple[int, int]]:
    """Index and reduction of the maps that timm gives of a backbone."""
    import timm

    try:
        with torch.device("meta"):
            info = timm.create_model(name, features_only=True, **options).feature_info
    except Exception as error:  # each family of timm refuses in its own way
        raise InputError(f"encoder timm/{name}: timm gives no maps of it ({error})") from None
    return list(zip(info.out_indices, info.reduction(), strict=True))


def _probe(aligned: bool) -> Tensor:
    return torch.zeros(1, 3, 2 * 16 + aligned, 3 * 16 + aligned)


class MobileNetV2(nn.Module):
    """timm's mobilenetv2_100 with its head convolution, the 1/32 stage dilated to stay at 1/16."""

    channels = (24, 32, 96, 1280)
    align_corners = (True, False)
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
    align_corners = (False,)
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
