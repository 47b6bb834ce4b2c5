"""The whole network: encoder, identity bank, transformer and decoder, without any state of a video."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention import WINDOW
from models.encoders import normalise
from models.fold import fold_batch_norm

SLOTS = 10  # objects that share one identity bank (AOT paper, section 4.1)
NO_OBJECT = -1e10  # logit of a slot that holds no object; NO_OBJECT_HALF where half precision would overflow
NO_OBJECT_HALF = -1e4


@dataclass
class Features:
    """What one pass of the encoder leaves of a frame, shared by all groups of objects."""

    tokens: Tensor  # (b, n, c): the projected last map
    position: Tensor | None  # (1, n, c)
    adapted: list[Tensor]  # the decoder's view of the maps at 1/4, 1/8, 1/16
    size: tuple[int, int]  # (h, w) of the 1/16 map


class VOSNetwork(nn.Module):
    """AOT or DeAOT.

    Args:
        encoder: a module of models/encoders.py.
        transformer: AOTTransformer or DeAOTTransformer.
        align_corners: of every resize; inputs are then 16k + 1 and else 16k pixels a side.
        identity_norm: layer norm on identity embeddings (DeAOT).
        train_memory_gap, test_memory_gap: every how many frames one enters the long-term memory beside the reference
            frames; None keeps reference frames only.
        max_long_edge: frames are shrunk to it when tracking, unless the tracker is told otherwise.
        group_size: objects that are tracked together, at most 10; a model that was trained on few objects at once
            tells fewer apart, at the price of a pass through transformer and decoder for every group.
        object_edge: frames are enlarged for objects smaller than this, see models.tracker.enlargement; None: never.
        width: channels of the transformer's tokens.
    """

    def __init__(
        self,
        encoder: nn.Module,
        transformer: nn.Module,
        decoder: nn.Module,
        *,
        align_corners: bool,
        identity_norm: bool,
        train_memory_gap: int | None,
        test_memory_gap: int | None,
        max_long_edge: int,
        group_size: int = SLOTS,
        object_edge: int | None = None,
        width: int = 256,
    ):
        super().__init__()
        self.encoder = encoder
        self.encoder_projector = nn.Conv2d(encoder.channels[3], width, 1)
        self.transformer = transformer
        self.decoder = decoder
        kernel = 17 if align_corners else 16
        self.identity_bank = nn.Conv2d(SLOTS + 1, width, kernel, stride=16, padding=8 if align_corners else 0)
        nn.init.orthogonal_(self.identity_bank.weight.view(width, -1), gain=kernel**-2)
        nn.init.zeros_(self.identity_bank.bias)
        self.identity_norm = nn.LayerNorm(width) if identity_norm else nn.Identity()
        self.align_corners = align_corners
        self.train_memory_gap, self.test_memory_gap = train_memory_gap, test_memory_gap
        self.max_long_edge, self.group_size, self.object_edge = max_long_edge, group_size, object_edge
        self._compiles = False
        self._folded: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of the module's state
        encoder.freeze_first_stage()

    def freeze_encoder(self) -> None:
        """Fix the encoder's present weights for this run and run it with its batch norms folded in."""
        self.encoder.requires_grad_(False)
        self._folded = (self.folded_encoder(),)

    def folded_encoder(self) -> nn.Module:
        """A copy of the encoder for inference, on the same device, with its batch norms folded in."""
        example = torch.zeros(1, 3, *self.input_size(64, 64), device=self.identity_bank.weight.device)
        folded = fold_batch_norm(self.encoder, example.to(self.identity_bank.weight.dtype))
        folded = folded.to(memory_format=torch.channels_last)
        return torch.compile(folded, dynamic=True) if self._compiles else folded

    def compile_for_inference(self) -> None:
        """Run encoder, transformer and decoder through torch.compile, once for all frame and memory sizes.

        The first frames then take minutes; it is meant for long runs and pays where kernels are fast to run and slow
        to start, on GPUs.
        """
        self._compiles = True
        for module in self.transformer.modules():
            if hasattr(module, "relative_emb_k"):  # window attention: a loop that is as it should be
                module.forward = torch.compiler.disable(module.forward)
        self.transformer.compile(dynamic=True)
        self.transformer.look = torch.compile(self.transformer.look, dynamic=True)
        self.decoder.compile(dynamic=True)

    @torch.no_grad()
    def ease_start(self, norm: float = 30.0) -> None:
        """Initialise for a training of hundreds or a few thousand steps instead of a hundred thousand.

        The published initialisation leaves the identities almost equal and the short-term window without preference:
        a short training then learns to tell objects from the background and never one object from another. Here every
        identity gets a code orthogonal to the others', and the heads look at near places first.

        Args:
            norm: of the code that a patch of one identity adds to its token.
        """
        weight = self.identity_bank.weight
        codes = nn.init.orthogonal_(torch.empty(SLOTS + 1, weight.shape[0]), gain=norm).T.to(weight)
        weight.copy_(rearrange(codes / (weight.shape[2] * weight.shape[3]), "c k -> c k 1 1").expand_as(weight))
        offset = torch.arange(WINDOW, device=weight.device) - WINDOW // 2
        distance = (offset[:, None] ** 2 + offset**2).flatten()
        for layer in self.transformer.layers:
            biases = layer.short_term_attn.relative_emb_k.bias.view(-1, WINDOW**2)
            for head, bias in enumerate(biases):
                bias.sub_(distance / (2 * (1 + head % 4 / 2) ** 2))

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """The size nearest to (height, width) that the network takes."""
        offset = 1 if self.align_corners else 0

        def nearest(n: int) -> int:
            return max(1, round((n - offset) / 16)) * 16 + offset

        return nearest(height), nearest(width)

    def normalise(self, images: Tensor) -> Tensor:
        """(..., 3, h, w) in 0..255 -> float32 network input."""
        return normalise(images, self.encoder.mean, self.encoder.std)

    def encode(self, images: Tensor, encoder: nn.Module | None = None) -> Features:
        """Normalised images (b, 3, h, w) -> Features; `encoder` may be a folded copy of the network's own."""
        if encoder is None:
            encoder = next(iter(self._folded), self.encoder)
        maps = encoder(images.contiguous(memory_format=torch.channels_last))
        projected = self.encoder_projector(maps[3])
        size = (projected.shape[-2], projected.shape[-1])
        tokens = rearrange(projected, "b c h w -> b (h w) c")
        return Features(tokens, self.transformer.position(size, tokens), self.decoder.adapt(maps), size)

    def embed_identities(self, planes: Tensor) -> Tensor:
        """One-hot planes (b, 11, h, w) of the identities -> identity embedding (b, n, c)."""
        return self.identity_norm(rearrange(self.identity_bank(planes), "b c h w -> b (h w) c"))

    def embed_label(self, label: Tensor, slots: list[int]) -> Tensor:
        """`embed_identities` of one label map with the work of a fraction: most patches show one identity alone.

        Args:
            label: (h, w) integers, positions in `slots`.
            slots: identities, 0 the background.

        Returns:
            (1, n, c).
        """
        weight, bank = self.identity_bank.weight[:, slots], self.identity_bank
        (kernel, _), (stride, _), (margin, _) = bank.kernel_size, bank.stride, bank.padding
        outside = len(slots)  # no identity: the zeros around the map
        patches = F.pad(label, (margin,) * 4, value=outside).unfold(0, kernel, stride).unfold(1, kernel, stride)
        patches = patches.reshape(-1, kernel * kernel)
        first = patches[:, 0]
        mixed = (patches != first[:, None]).any(1) | (first == outside)
        whole = torch.cat((weight.sum((2, 3)).T, weight.new_zeros(1, len(weight))))
        embedding = whole[first.long()]
        planes = rearrange(patches[mixed], "n p -> n 1 p") == torch.arange(outside, device=label.device)[:, None]
        embedding[mixed] = planes.flatten(1).to(weight.dtype) @ weight.flatten(1).T
        return self.identity_norm(embedding + bank.bias)[None]

    def decode(self, tokens: Tensor, features: Features) -> Tensor:
        """Output of the transformer (b, n, c) -> identity logits (b, 11, h/4, w/4)."""
        x = rearrange(tokens, "b (h w) c -> b c h w", h=features.size[0])
        return self.decoder(x, features.adapted)

    def forward(
        self,
        frames: Tensor,
        labels: Tensor,
        num_objects: Tensor,
        permutation: Tensor | None = None,
        feed_predictions: bool = False,
        reference_gradient: bool = True,
        recompute: bool = False,
    ) -> Tensor:
        """The training pass over clips (AOT paper, section 5): the first frame is the reference.

        Args:
            frames: (b, t, 3, h, w) uint8 or normalised float.
            labels: (b, t, h, w) integers, 0 background, 1..num_objects, 255 ignored (a place without identity).
            num_objects: (b,).
            permutation: (b, 10) slot that object i + 1 takes, shifted by one; None keeps the order.
            feed_predictions: remember the predicted masks instead of the true ones after the reference frame; the
                identity embeddings then carry no gradient.
            reference_gradient: whether the logits of the reference frame carry a gradient.
            recompute: keep no activations of transformer and decoder; the backward pass computes them once more.

        Returns:
            Logits (b, t, 11, h/4, w/4) in the order of the labels; slots that hold no object are at NO_OBJECT.
        """
        b, t = labels.shape[:2]
        if not frames.is_floating_point():
            frames = self.normalise(frames).to(self.identity_bank.weight.dtype)
        images = rearrange(frames, "b t c h w -> (t b) c h w")
        every = self.encode(images)
        order = identity_order(permutation, b, labels.device)
        empty = torch.arange(1, SLOTS + 1, device=labels.device) > num_objects[:, None]
        empty = F.pad(empty, (1, 0), value=False)

        def at(i: int) -> Features:
            batch = slice(i * b, (i + 1) * b)
            return Features(every.tokens[batch], every.position, [level[batch] for level in every.adapted], every.size)

        def embed(label: Tensor) -> Tensor:
            planes = one_hot(label, SLOTS + 1).gather(1, _expand(order.argsort(1), label)).to(every.tokens.dtype)
            if feed_predictions:
                # A zero gradient instead of none: data parallelism waits for every parameter's.
                embedding = self.embed_identities(planes)
                return embedding.detach() + 0 * embedding
            return self.embed_identities(planes)

        def finish(decoded: Tensor) -> Tensor:
            logits = decoded.gather(1, _expand(order, decoded))
            floor = NO_OBJECT if logits.dtype == torch.float32 or logits.dtype == torch.float64 else NO_OBJECT_HALF
            return logits.masked_fill(rearrange(empty, "b k -> b k 1 1"), floor)

        def run(function: Callable, *arguments):
            if recompute and torch.is_grad_enabled():
                return checkpoint(function, *arguments, use_reentrant=False)
            return function(*arguments)

        features = at(0)
        identity = embed(labels[:, 0])
        tokens, pending = run(self.transformer, features.tokens, features.position, features.size, identity)
        with torch.set_grad_enabled(reference_gradient and torch.is_grad_enabled()):
            outputs = [finish(run(self.decode, tokens, features))]
        short_term = self.transformer.complete(pending, identity)
        long_term, since = short_term, 0
        for i in range(1, t):
            features = at(i)
            tokens, pending = run(
                self.transformer, features.tokens, features.position, features.size, None, long_term, short_term
            )
            outputs.append(finish(run(self.decode, tokens, features)))
            if i == t - 1:
                break
            label = labels[:, i]
            if feed_predictions:
                label = self.resize(outputs[-1].detach(), label.shape[-2:]).argmax(1)
            short_term = self.transformer.complete(pending, embed(label))
            since += 1
            if self.train_memory_gap is not None and since >= self.train_memory_gap:
                long_term = [
                    (torch.cat((k, k_old), dim=2), torch.cat((v, v_old), dim=2))
                    for (k, v), (k_old, v_old) in zip(short_term, long_term, strict=True)
                ]
                since = 0
        return torch.stack(outputs, dim=1)

    def resize(self, logits: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
        """Bilinear resize of (b, k, h, w) with the model's align_corners."""
        return F.interpolate(logits, tuple(size), mode="bilinear", align_corners=self.align_corners)


def one_hot(label: Tensor, identities: int) -> Tensor:
    """(b, h, w) integers -> (b, identities, h, w) bool; values beyond the identities (ignored pixels) give no plane."""
    values = torch.arange(identities, device=label.device)
    return rearrange(label, "b h w -> b 1 h w") == rearrange(values, "k -> 1 k 1 1")


def identity_order(permutation: Tensor | None, b: int, device: torch.device) -> Tensor:
    """(b, 11): the slot in which identity k of a label is kept; the background keeps its own."""
    if permutation is None:
        return repeat(torch.arange(SLOTS + 1, device=device), "k -> b k", b=b)
    return F.pad(permutation + 1, (1, 0))


def _expand(index: Tensor, like: Tensor) -> Tensor:
    return repeat(index, "b k -> b k h w", h=like.shape[-2], w=like.shape[-1])
