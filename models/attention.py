"""The attentions of AOT and DeAOT: exact, and none with a copy of the keys per window position.

Tensors are (b, h, n, d): batch, heads, tokens row by row, channels of one head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

WINDOW = 15  # width of the short-term window, 7 tokens each way (AOT paper, section 4.2)
_BLOCK_BYTES = 4 << 20  # scores of one block of queries: small enough to stay in cache between product and softmax


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(d)) v over all keys.

    Args:
        q: (b, h, n, d).
        k: (b, h, m, d).
        v: (b, h, m, e); e may differ from d (DeAOT's wide values).

    Returns:
        (b, h, n, e).
    """
    fused = q.device.type != "cpu" or q.shape[-1] == v.shape[-1]
    if fused or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v)
    # The CPU's fused kernel takes equal widths only; without it all n x m scores would be written. Blocks are not.
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    rows = max(16, _BLOCK_BYTES // (k.shape[0] * k.shape[1] * k.shape[2] * q.element_size()))
    q, k = q * q.shape[-1] ** -0.5, k.transpose(-2, -1)
    for block in (slice(start, start + rows) for start in range(0, q.shape[2], rows)):
        out[:, :, block] = torch.softmax(q[:, :, block] @ k, dim=-1) @ v
    return out


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], position_logits: Tensor, position_values: Tensor | None
) -> Tensor:
    """Attention of every token to the WINDOW x WINDOW neighbourhood of its own place (AOT paper, section 4.2).

    logits = q k' / sqrt(d) + position_logits; positions outside the map take no part in the softmax;
    output = weights v + weights position_values'. Rows of queries meet rows of keys in dense products; the wanted
    diagonals of these are a strided view of them, so that neither keys nor values are copied per position, in the
    backward pass neither. On the CPU one row of queries at a time meets the WINDOW rows of keys around it, which stays
    in cache; elsewhere all rows of queries meet the keys one window row after the other, in a few large kernels.

    Args:
        q: (b, h, n, d) with n = height * width.
        k: (b, h, n, d).
        v: (b, h, n, e).
        size: (height, width) of the map.
        position_logits: (b, h, n, WINDOW**2), window positions row by row from the upper left.
        position_values: (h, e, WINDOW**2) or None.

    Returns:
        (b, h, n, e).
    """
    if position_values is not None:
        position_values = position_values.to(q.dtype)
    inputs = (q, k, v.to(q.dtype), position_logits.to(q.dtype), position_values)
    # Asked here: inside the function, parameters ask for a gradient in inference too.
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    form = _WindowByQueryRows if q.device.type == "cpu" else _WindowByKeyRows
    return form.apply(*inputs, size, needs_grad)


class _WindowByQueryRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, position_logits, position_values, size, needs_grad):
        height, width = size
        b, heads = q.shape[:2]
        scale = q.shape[-1] ** -0.5
        keys, values = _pad(k, size), _pad(v, size)
        queries = rearrange(q, "b h (y x) d -> (b h) y x d", y=height)
        bias = rearrange(position_logits, "b h (y x) p -> (b h) y x p", y=height)
        if position_values is not None:
            position_values = position_values.transpose(-2, -1)
        outside = _outside(height, width, q.device)
        dense, diagonals = _band(queries)
        scores, score_diagonals = _band(queries)
        out = q.new_empty(b * heads, height, width, v.shape[-1])
        weights = torch.empty_like(bias) if needs_grad else None
        for y in range(height):
            torch.bmm(queries[:, y], _rows(keys, y).transpose(-2, -1), out=scores)
            logits = torch.add(bias[:, y], score_diagonals.flatten(-2), alpha=scale)
            row = torch.softmax(logits.masked_fill_(outside[y], -torch.inf), dim=-1)
            diagonals.copy_(row.unflatten(-1, (WINDOW, WINDOW)))
            out[:, y] = torch.bmm(dense, _rows(values, y))
            if position_values is not None:
                out[:, y] += _per_head(row, position_values, b)
            if needs_grad:
                weights[:, y] = row
        if needs_grad:
            ctx.save_for_backward(queries, keys, values, weights, position_values)
            ctx.size, ctx.batch = size, b
        return rearrange(out, "(b h) y x e -> b h (y x) e", b=b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        queries, keys, values, weights, position_values = ctx.saved_tensors
        (height, _), b = ctx.size, ctx.batch
        scale = queries.shape[-1] ** -0.5
        grad = rearrange(grad, "b h (y x) e -> (b h) y x e", y=height).contiguous()
        dense, diagonals = _band(queries)
        scores, score_diagonals = _band(queries)
        d_queries, d_bias = torch.empty_like(queries), torch.empty_like(weights)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for y in range(height):
            row, d_out = weights[:, y], grad[:, y]
            torch.bmm(d_out, _rows(values, y).transpose(-2, -1), out=scores)
            d_row = score_diagonals.flatten(-2)
            if position_values is not None:
                d_row = d_row + _per_head(d_out, position_values.transpose(-2, -1), b)
            d_logits = row * (d_row - (row * d_row).sum(-1, keepdim=True))
            d_bias[:, y] = d_logits
            diagonals.copy_(row.unflatten(-1, (WINDOW, WINDOW)))
            _rows(d_values, y).baddbmm_(dense.transpose(-2, -1), d_out)
            diagonals.copy_(d_logits.unflatten(-1, (WINDOW, WINDOW)))
            d_queries[:, y] = torch.bmm(dense, _rows(keys, y)).mul_(scale)
            _rows(d_keys, y).baddbmm_(dense.transpose(-2, -1), queries[:, y], alpha=scale)
        d_position_values = None
        if position_values is not None:
            d_position_values = torch.einsum(
                "bhne,bhnp->hep",
                rearrange(grad, "(b h) y x e -> b h (y x) e", b=b),
                rearrange(weights, "(b h) y x p -> b h (y x) p", b=b),
            )

        def tokens(x: Tensor) -> Tensor:
            return rearrange(x, "(b h) y x d -> b h (y x) d", b=b)

        d_keys, d_values = tokens(_crop(d_keys)), tokens(_crop(d_values))
        return tokens(d_queries), d_keys, d_values, tokens(d_bias), d_position_values, None, None


class _WindowByKeyRows(torch.autograd.Function):
    """Maps are kept as (row, batch and head, column, channel): the rows that all queries meet in window row r are then
    one contiguous block, a single batched product."""

    @staticmethod
    def forward(ctx, q, k, v, position_logits, position_values, size, needs_grad):
        height, width = size
        b = q.shape[0]
        scale = q.shape[-1] ** -0.5
        keys, values = _pad_rows(k, size), _pad_rows(v, size)
        queries, bias = (rearrange(x, "b h (y x) i -> y (b h) x i", y=height) for x in (q, position_logits))
        if position_values is not None:
            position_values = position_values.transpose(-2, -1)
        queries = queries.flatten(0, 1)
        dense, diagonals = _bands(queries)
        for r in range(WINDOW):
            torch.bmm(queries, keys[r : r + height].flatten(0, 1).transpose(-2, -1), out=dense[r])
        logits = torch.add(bias.flatten(0, 1), diagonals.flatten(-2), alpha=scale).unflatten(0, (height, -1))
        weights = torch.softmax(logits.masked_fill_(_outside(height, width, q.device)[:, None], -torch.inf), dim=-1)
        dense.zero_()
        diagonals.copy_(weights.flatten(0, 1).unflatten(-1, (WINDOW, WINDOW)))
        out = values.new_zeros(len(queries), width, values.shape[-1])
        for r in range(WINDOW):
            out.baddbmm_(dense[r], values[r : r + height].flatten(0, 1))
        if position_values is not None:
            out += _per_head_rows(weights, position_values, b)
        if needs_grad:
            ctx.save_for_backward(queries, keys, values, weights, position_values)
            ctx.size, ctx.batch = size, b
        return rearrange(out, "(y b h) x e -> b h (y x) e", y=height, b=b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        queries, keys, values, weights, position_values = ctx.saved_tensors
        (height, _), b = ctx.size, ctx.batch
        scale = queries.shape[-1] ** -0.5
        d_out = rearrange(grad, "b h (y x) e -> (y b h) x e", y=height).contiguous()
        dense, diagonals = _bands(queries)
        for r in range(WINDOW):
            torch.bmm(d_out, values[r : r + height].flatten(0, 1).transpose(-2, -1), out=dense[r])
        row, d_row = weights.flatten(0, 1), diagonals.flatten(-2)
        d_position_values = None
        if position_values is not None:
            rows = d_out.unflatten(0, (height, -1))
            d_row = d_row + _per_head_rows(rows, position_values.transpose(-2, -1), b)
            d_position_values = torch.einsum(
                "ybhxe,ybhxp->hep", rows.unflatten(1, (b, -1)), weights.unflatten(1, (b, -1))
            )
        d_logits = row * (d_row - (row * d_row).sum(-1, keepdim=True))
        d_queries, d_keys, d_values = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        dense.zero_()
        diagonals.copy_(row.unflatten(-1, (WINDOW, WINDOW)))
        for r in range(WINDOW):
            d_values[r : r + height].flatten(0, 1).baddbmm_(dense[r].transpose(-2, -1), d_out)
        diagonals.copy_(d_logits.unflatten(-1, (WINDOW, WINDOW)))
        for r in range(WINDOW):
            d_queries.baddbmm_(dense[r], keys[r : r + height].flatten(0, 1), alpha=scale)
            d_keys[r : r + height].flatten(0, 1).baddbmm_(dense[r].transpose(-2, -1), queries, alpha=scale)

        def tokens(x: Tensor) -> Tensor:
            return rearrange(x, "y (b h) x i -> b h (y x) i", b=b)

        margin = WINDOW // 2
        d_keys, d_values = (x[margin:-margin, :, margin:-margin] for x in (d_keys, d_values))
        d_queries, d_logits = (x.unflatten(0, (height, -1)) for x in (d_queries, d_logits))
        return tokens(d_queries), tokens(d_keys), tokens(d_values), tokens(d_logits), d_position_values, None, None


def _pad_rows(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(b, h, n, d) tokens -> (height + 14, b * h, width + 14, d) map with zeros around it."""
    margin = WINDOW // 2
    rows = rearrange(x, "b h (y x) d -> y (b h) x d", y=size[0])
    return F.pad(rows, (0, 0, margin, margin, 0, 0, margin, margin))


def _bands(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices (WINDOW, rows, width, padded width), one a window row, and the view (rows, width, WINDOW, WINDOW) of
    their bands: entry (n, x, r, c) of the view is entry (r, n, x, x + c) of the matrices."""
    rows, width, _ = queries.shape
    padded = width + WINDOW - 1
    dense = queries.new_empty(WINDOW, rows, width, padded)
    strides = (width * padded, padded + 1, rows * width * padded, 1)
    return dense, dense.as_strided((rows, width, WINDOW, WINDOW), strides)


def _per_head_rows(x: Tensor, weight: Tensor, b: int) -> Tensor:
    """(rows, b * h, n, i) times a matrix a head (h, i, j) -> (rows * b * h, n, j)."""
    return (x.unflatten(1, (b, -1)) @ weight).flatten(0, 2)


def _pad(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(b, h, n, d) tokens -> (b * h, height + 14, width + 14, d) map with zeros around it."""
    margin = WINDOW // 2
    return F.pad(rearrange(x, "b h (y x) d -> (b h) y x d", y=size[0]), (0, 0, margin, margin, margin, margin))


def _crop(x: Tensor) -> Tensor:
    margin = WINDOW // 2
    return x[:, margin:-margin, margin:-margin]


def _rows(padded: Tensor, y: int) -> Tensor:
    """View of the WINDOW padded rows that query row y may see: (b * h, WINDOW * padded width, d)."""
    return padded[:, y : y + WINDOW].view(padded.shape[0], -1, padded.shape[-1])


def _band(queries: Tensor) -> tuple[Tensor, Tensor]:
    """A zero matrix (b * h, width, WINDOW * padded width) and the view (b * h, width, WINDOW, WINDOW) of its band.

    Query x of a row sees columns x .. x + 14 of each padded key row: entry (x, row, column) of the view lies at
    x + column of that key row.
    """
    groups, _, width, _ = queries.shape
    padded = width + WINDOW - 1
    dense = queries.new_zeros(groups, width, WINDOW * padded)
    strides = (width * WINDOW * padded, WINDOW * padded + 1, padded, 1)
    return dense, dense.as_strided((groups, width, WINDOW, WINDOW), strides)


def _per_head(x: Tensor, weight: Tensor, b: int) -> Tensor:
    """(b * h, n, i) times a matrix a head (h, i, j) -> (b * h, n, j)."""
    if b == 1:
        return torch.bmm(x, weight)
    return (rearrange(x, "(b h) n i -> b h n i", b=b) @ weight).flatten(0, 1)


@lru_cache(maxsize=32)
def _outside(height: int, width: int, device: torch.device) -> Tensor:
    """(height, width, WINDOW**2) bool: window positions that lie outside the map."""
    offset = torch.arange(WINDOW, device=device) - WINDOW // 2

    def beyond(n: int) -> Tensor:
        place = torch.arange(n, device=device)[:, None] + offset
        return (place < 0) | (place >= n)

    return (beyond(height)[:, None, :, None] | beyond(width)[None, :, None, :]).flatten(-2)
