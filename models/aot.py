"""The long short-term transformer of AOT ("Associating Objects with Transformers", NeurIPS 2021, section 4).

Tokens are (b, n, c), row by row over a map of `size` = (height, width). Both transformers of this package share one
interface, so that network and session need not know which of them they hold:

* look(x, position) -> seen: what the first layer does before it meets memory, the same for every group of objects;
* forward(x, position, size, identity, long_term, short_term, seen) -> (outputs, pending): reads memory, or, where
  identity is given, lets the frame be its own memory;
* complete(pending, identity) -> entries: what a frame leaves in memory once its mask is known, a (key, value) a layer.
"""

import math

import torch
from einops import rearrange
from timm.layers import DropPath
from torch import Tensor, nn

from models.attention import WINDOW, attend, attend_window

Entry = tuple[Tensor, Tensor]  # key and value of one layer, (b, h, n, d) and (b, h, n, e)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.linear_Q = nn.Linear(width, width)
        self.linear_K = nn.Linear(width, width)
        self.linear_V = nn.Linear(width, width)
        self.projection = nn.Linear(width, width)

    def forward(self, query: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            split_heads(linear(x), self.heads)
            for linear, x in ((self.linear_Q, query), (self.linear_K, query), (self.linear_V, value))
        )
        return self.projection(join_heads(attend(q, k, v)))


class LongTermAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.projection = nn.Linear(width, width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.projection(join_heads(attend(q, k, v)))


class ShortTermAttention(nn.Module):
    """Attention to the window of the previous frame with learned relative position terms for logits and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.relative_emb_k = nn.Conv2d(width, heads * WINDOW**2, 1, groups=heads)
        self.relative_emb_v = nn.Parameter(torch.zeros(heads, width // heads, WINDOW**2))
        self.projection = nn.Linear(width, width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        logits = position_logits(self.relative_emb_k, q)
        return self.projection(join_heads(attend_window(q, k, v, size, logits, self.relative_emb_v)))


class FeedForwardNorm(nn.Module):
    """Group norm, GELU and a depthwise 5x5 convolution between the two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.gn = nn.GroupNorm(32, width)
        self.conv = nn.Conv2d(width, width, 5, padding=2, groups=width, bias=False)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = rearrange(x, "b (h w) c -> b c h w", h=size[0])
        x = self.conv(nn.functional.gelu(self.gn(x)))
        return rearrange(x, "b c h w -> b (h w) c")


class AOTLayer(nn.Module):
    def __init__(self, width: int, heads: int, drop_path: float):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.linear_Q = nn.Linear(width, width)
        self.linear_V = nn.Linear(width, width)
        self.long_term_attn = LongTermAttention(width)
        self.short_term_attn = ShortTermAttention(width, heads)
        self.norm3 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, 4 * width)
        self.activation = FeedForwardNorm(4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.drop_path = DropPath(drop_path)

    def look(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens after self attention, their norm, and the queries of both memories."""
        y = self.norm1(x)
        x = x + self.drop_path(self.self_attn(y + position, y))
        y = self.norm2(x)
        return x, y, split_heads(self.linear_Q(y), self.heads)

    def forward(
        self,
        seen: tuple[Tensor, Tensor, Tensor],
        size: tuple[int, int],
        identity: Tensor | None,
        long_term: Entry | None,
        short_term: Entry | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, y, q = seen
        pending = (q, y)
        if identity is not None:
            long_term = short_term = self.complete(pending, identity)
        x = x + self.long_term_attn(q, *long_term) + self.short_term_attn(q, *short_term, size)
        y = self.linear2(self.activation(self.linear1(self.norm3(x)), size))
        return x + self.drop_path(y), pending

    def complete(self, pending: tuple[Tensor, Tensor], identity: Tensor) -> Entry:
        key, y = pending
        return key, split_heads(self.linear_V(y + identity), self.heads)


class AOTTransformer(nn.Module):
    """Args: layers, width, heads, probability of dropping a branch of a clip in training."""

    def __init__(self, layers: int, width: int = 256, heads: int = 8, drop_path: float = 0.1):
        super().__init__()
        self.layers = nn.ModuleList(AOTLayer(width, heads, drop_path) for _ in range(layers))
        self.decoder_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        # Part of every published checkpoint and used by none: frozen, so that nothing waits for its gradient.
        self.mask_token = nn.Parameter(torch.randn(1, 1, width), requires_grad=False)
        self.width = width
        self.output_width = width * (layers + 1)

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        size: tuple[int, int],
        identity: Tensor | None = None,
        long_term: list[Entry] | None = None,
        short_term: list[Entry] | None = None,
        seen: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """See the module's text. The output (b, n, width * (layers + 1)) is the input beside every layer's output."""
        outputs, pending = [x], []
        for i, (layer, norm) in enumerate(zip(self.layers, self.decoder_norms, strict=True)):
            read = (None, None) if identity is not None else (long_term[i], short_term[i])
            seen_here = seen if i == 0 and seen is not None else layer.look(x, position)
            x, left = layer(seen_here, size, identity, *read)
            outputs.append(norm(x))
            pending.append(left)
        return torch.cat(outputs, dim=-1), pending

    def look(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        return self.layers[0].look(x, position)

    def complete(self, pending: list[tuple[Tensor, ...]], identity: Tensor) -> list[Entry]:
        return [layer.complete(left, identity) for layer, left in zip(self.layers, pending, strict=True)]

    def position(self, size: tuple[int, int], like: Tensor) -> Tensor:
        """Sine position embedding (1, n, width), y in the first half of the channels and x in the second."""
        return sine_position(size, self.width, like.device).to(like.dtype)


def sine_position(size: tuple[int, int], width: int, device: torch.device | None = None) -> Tensor:
    """2-D sine position embedding (AOT paper, section 4.1): (1, n, width) float32 for a map of `size`."""
    features = width // 2
    frequency = 10000 ** (2 * (torch.arange(features, device=device) // 2) / features)

    def axis(n: int) -> Tensor:
        angle = torch.arange(n, device=device) / (n - 1 + 1e-6) * (2 * math.pi)
        angle = angle[:, None] / frequency
        return torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=-1).flatten(1)

    height, length = size
    y = axis(height)[:, None].expand(height, length, features)
    x = axis(length)[None].expand(height, length, features)
    return torch.cat((y, x), dim=-1).reshape(1, height * length, width)


def position_logits(relative: nn.Conv2d, q: Tensor) -> Tensor:
    """The relative position term of the window logits, the grouped 1x1 convolution as one product a head.

    q (b, h, n, d) unscaled -> (b, h, n, WINDOW**2).
    """
    weight = rearrange(relative.weight, "(h p) d 1 1 -> h d p", h=q.shape[1])
    bias = rearrange(relative.bias, "(h p) -> h 1 p", h=q.shape[1])
    return q @ weight + bias


def split_heads(x: Tensor, heads: int) -> Tensor:
    return rearrange(x, "b n (h d) -> b h n d", h=heads)


def join_heads(x: Tensor) -> Tensor:
    return rearrange(x, "b h n d -> b n (h d)")
