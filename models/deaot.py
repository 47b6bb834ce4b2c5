"""The gated propagation of DeAOT ("Decoupling Features in Hierarchical Propagation", NeurIPS 2022, section 4).

Same interface as models/aot.py. Every token carries two streams of `width` channels, visual x and identity y.
"""

import torch
from einops import rearrange
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.functional import silu

from models.aot import Entry, position_logits
from models.attention import WINDOW, attend, attend_window


class DepthwiseConv(nn.Module):
    """Depthwise 5x5 over the map and channel dropout."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 5, padding=2, groups=width, bias=False)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = rearrange(x, "b (h w) c -> b c h w", h=size[0])
        return rearrange(self.dropout(self.conv(x)), "b c h w -> b (h w) c")


class GatedAttention(nn.Module):
    """Gate, depthwise convolution and projection of what an attention has gathered; two streams out."""

    def __init__(self, gathered: int, width: int, dropout: float):
        super().__init__()
        self.dw_conv = DepthwiseConv(gathered, dropout)
        self.projection = nn.Linear(gathered, 2 * width)

    def release(self, gathered: Tensor, gate: Tensor, size: tuple[int, int]) -> Tensor:
        """gathered (b, 1, n, e), gate (b, n, e) -> (b, n, 2 * width)."""
        return self.projection(self.dw_conv(gathered.squeeze(1) * gate, size))


class LongTermGate(GatedAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, size: tuple[int, int]) -> Tensor:
        return self.release(attend(q, k, v), gate, size)


class ShortTermGate(GatedAttention):
    def __init__(self, gathered: int, width: int, dropout: float, key_width: int):
        super().__init__(gathered, width, dropout)
        self.relative_emb_k = nn.Conv2d(key_width, WINDOW**2, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, size: tuple[int, int]) -> Tensor:
        logits = position_logits(self.relative_emb_k, q)
        return self.release(attend_window(q, k, v, size, logits, None), gate, size)


class SelfGate(GatedAttention):
    def __init__(self, gathered: int, width: int, dropout: float, key_width: int):
        super().__init__(gathered, width, dropout)
        self.linear_QK = nn.Linear(2 * width, key_width)
        self.linear_V1 = nn.Linear(width, gathered // 2)
        self.linear_V2 = nn.Linear(width, gathered // 2)
        self.linear_U1 = nn.Linear(width, gathered // 2)
        self.linear_U2 = nn.Linear(width, gathered // 2)

    def forward(self, x: Tensor, y: Tensor, size: tuple[int, int]) -> Tensor:
        q = self.linear_QK(torch.cat((x, y), dim=-1)).unsqueeze(1)
        v = silu(torch.cat((self.linear_V1(x), self.linear_V2(y)), dim=-1)).unsqueeze(1)
        gate = silu(torch.cat((self.linear_U1(x), self.linear_U2(y)), dim=-1))
        return self.release(attend(q, q, v), gate, size)


class DeAOTLayer(nn.Module):
    def __init__(self, first: bool, width: int, drop_path: float, dropout: float):
        super().__init__()
        value_width, self.key_width = 2 * width, width // 2
        gathered = 2 * value_width
        self.first = first
        self.norm1 = nn.LayerNorm(width)
        self.linear_QV = nn.Linear(width, self.key_width + value_width)
        self.linear_U = nn.Linear(width, value_width)
        self.linear_ID_V = nn.Linear(width if first else 2 * width, value_width)
        if not first:
            self.id_norm1 = nn.LayerNorm(width)
            self.linear_ID_U = nn.Linear(width, value_width)
        self.long_term_attn = LongTermGate(gathered, width, dropout)
        self.short_term_attn = ShortTermGate(gathered, width, dropout, self.key_width)
        self.norm2 = nn.LayerNorm(width)
        self.id_norm2 = nn.LayerNorm(width)
        self.self_attn = SelfGate(gathered, width, dropout, self.key_width)
        self.drop_path = DropPath(drop_path)

    def look(self, x: Tensor, y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Query, value, gate of the memories, and the norm of the identity stream."""
        x1 = self.norm1(x)
        q, v = self.linear_QV(x1).split((self.key_width, self.linear_U.out_features), dim=-1)
        q = q.unsqueeze(1)
        if self.first:
            y1 = None
            gate = torch.cat((silu(self.linear_U(x1)), torch.ones_like(v)), dim=-1)
        else:
            y1 = self.id_norm1(y)
            gate = silu(torch.cat((self.linear_U(x1), self.linear_ID_U(y1)), dim=-1))
        return q, silu(v), gate, y1

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        seen: tuple[Tensor | None, ...],
        size: tuple[int, int],
        identity: Tensor | None,
        long_term: Entry | None,
        short_term: Entry | None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        q, v, gate, y1 = seen
        pending = (q, v, y1)
        if identity is not None:
            long_term = short_term = self.complete(pending, identity)
        read = self.long_term_attn(q, *long_term, gate, size) + self.short_term_attn(q, *short_term, gate, size)
        read_x, read_y = read.chunk(2, dim=-1)
        x = x + read_x
        y = read_y if y is None else y + read_y
        x_self, y_self = self.drop_path(self.self_attn(self.norm2(x), self.id_norm2(y), size)).chunk(2, dim=-1)
        return x + x_self, y + y_self, pending

    def complete(self, pending: tuple[Tensor, ...], identity: Tensor) -> Entry:
        key, value, y1 = pending
        content = identity if y1 is None else torch.cat((y1, identity), dim=-1)
        return key, torch.cat((value, silu(self.linear_ID_V(content))), dim=-1).unsqueeze(1)


class StreamNorm(nn.Module):
    """Group norm with a group for each stream, over tokens and channels."""

    def __init__(self, width: int):
        super().__init__()
        self.gn = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.gn(rearrange(x, "b n c -> b c n")), "b c n -> b n c")


class DeAOTTransformer(nn.Module):
    """Args: layers, width of a stream, probabilities of dropping a branch of a clip and a channel in training."""

    def __init__(self, layers: int, width: int = 256, drop_path: float = 0.1, dropout: float = 0.1):
        super().__init__()
        self.layers = nn.ModuleList(DeAOTLayer(i == 0, width, drop_path, dropout) for i in range(layers))
        self.decoder_norms = nn.ModuleList([StreamNorm(2 * width)])
        self.output_width = 2 * width

    def forward(
        self,
        x: Tensor,
        position: Tensor | None,
        size: tuple[int, int],
        identity: Tensor | None = None,
        long_term: list[Entry] | None = None,
        short_term: list[Entry] | None = None,
        seen: tuple[Tensor | None, ...] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """See models/aot.py. The output (b, n, 2 * width) is the last layer's; DeAOT has no position embedding."""
        y, pending = None, []
        for i, layer in enumerate(self.layers):
            read = (None, None) if identity is not None else (long_term[i], short_term[i])
            seen_here = seen if i == 0 and seen is not None else layer.look(x, y)
            x, y, left = layer(x, y, seen_here, size, identity, *read)
            pending.append(left)
        return self.decoder_norms[0](torch.cat((x, y), dim=-1)), pending

    def look(self, x: Tensor, position: None) -> tuple[Tensor | None, ...]:
        return self.layers[0].look(x, None)

    def complete(self, pending: list[tuple[Tensor, ...]], identity: Tensor) -> list[Entry]:
        return [layer.complete(left, identity) for layer, left in zip(self.layers, pending, strict=True)]

    def position(self, size: tuple[int, int], like: Tensor) -> None:
        return None
