"""The FPN decoder of AOT and DeAOT: transformer tokens and encoder maps to identity logits."""

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Module):
    """Convolution with bias and a group norm with 8 groups."""

    def __init__(self, inputs: int, outputs: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        self.gn = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.gn(self.conv(x))


class Decoder(nn.Module):
    """Args: width of the input, of the encoder's 1/4, 1/8, 1/16 maps, number of identities with the background."""

    def __init__(self, inputs: int, channels: tuple[int, ...], identities: int, align_corners: bool, width: int = 256):
        super().__init__()
        self.align_corners = align_corners
        self.conv_in = ConvNorm(inputs, width, 1)
        self.conv_16x = ConvNorm(width, width, 3)
        self.conv_8x = ConvNorm(width, width // 2, 3)
        self.conv_4x = ConvNorm(width // 2, width // 2, 3)
        self.adapter_16x = nn.Conv2d(channels[2], width, 1)
        self.adapter_8x = nn.Conv2d(channels[1], width, 1)
        self.adapter_4x = nn.Conv2d(channels[0], width // 2, 1)
        self.conv_out = nn.Conv2d(width // 2, identities, 1)

    def adapt(self, maps: list[Tensor]) -> list[Tensor]:
        """The encoder's maps as the decoder adds them: once a frame, whatever the number of objects."""
        return [self.adapter_4x(maps[0]), self.adapter_8x(maps[1]), self.adapter_16x(maps[2])]

    def forward(self, x: Tensor, adapted: list[Tensor]) -> Tensor:
        """x (b, inputs, h, w) at 1/16 and the adapted maps at 1/4, 1/8, 1/16 -> logits (b, identities, 4h, 4w)."""
        x = F.relu_(self.conv_in(x))
        x = F.relu_(self.conv_16x(adapted[2] + x))
        x = F.relu_(self.conv_8x(adapted[1] + self._resize(x, adapted[1])))
        x = F.relu_(self.conv_4x(adapted[0] + self._resize(x, adapted[0])))
        return self.conv_out(x)

    def _resize(self, x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=self.align_corners)
