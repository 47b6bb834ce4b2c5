"""The two attentions against plain loops over queries, in float64."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.attention import WINDOW, _WindowByKeyRows, attend, attend_window

NAMES = ("q", "k", "v", "position_logits", "position_values")
SIZES = list(itertools.product(range(1, 10), range(1, 18)))  # up to wider than the window
TALL = [(16, 2), (17, 9)]  # and higher than it


def attend_oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for i in range(q.shape[2]):
        logits = (q[:, :, i : i + 1] * k).sum(-1) / math.sqrt(q.shape[-1])
        rows.append((logits.softmax(-1)[..., None] * v).sum(2))
    return torch.stack(rows, dim=2)


def attend_window_oracle(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], position_logits: Tensor, position_values: Tensor | None
) -> Tensor:
    """Each query meets the places of its window that lie inside the map, one query after the other."""
    (height, width), reach = size, WINDOW // 2
    rows = []
    for y, x in itertools.product(range(height), range(width)):
        near = [
            (yy * width + xx, (yy - y + reach) * WINDOW + xx - x + reach)
            for yy in range(max(0, y - reach), min(height, y + reach + 1))
            for xx in range(max(0, x - reach), min(width, x + reach + 1))
        ]
        place, position = map(torch.tensor, zip(*near, strict=True))
        i = y * width + x
        logits = (q[:, :, i : i + 1] * k[:, :, place]).sum(-1) / math.sqrt(q.shape[-1])
        weights = (logits + position_logits[:, :, i, position]).softmax(-1)
        row = (weights[..., None] * v[:, :, place]).sum(2)
        if position_values is not None:
            row = row + torch.einsum("bhp,hep->bhe", weights, position_values[:, :, position])
        rows.append(row)
    return torch.stack(rows, dim=2)


def attend_window_by_key_rows(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], position_logits: Tensor, position_values: Tensor | None
) -> Tensor:
    """The form that the CPU does not take by itself."""
    return _WindowByKeyRows.apply(q, k, v, position_logits, position_values, size, torch.is_grad_enabled())


FORMS = {"query rows": attend_window, "key rows": attend_window_by_key_rows}


def window_inputs(
    size: tuple[int, int], batch: int, heads: int, width: int, value_width: int, with_values: bool
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(hash((size, batch, heads, value_width, with_values)) % 2**31)
    n = size[0] * size[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    return [
        normal(batch, heads, n, width),
        normal(batch, heads, n, width),
        normal(batch, heads, n, value_width),
        normal(batch, heads, n, WINDOW**2),
        normal(heads, value_width, WINDOW**2) if with_values else None,
    ]


def value_and_gradients(function, inputs: list[Tensor | None], size: tuple[int, int]) -> tuple[Tensor, dict]:
    out = function(*inputs[:3], size, *inputs[3:])
    given = {name: x for name, x in zip(NAMES, inputs, strict=True) if x is not None}
    # A weight for every entry: the sum alone would not see permuted outputs.
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out.detach(), dict(zip(given, torch.autograd.grad((out * weight).sum(), list(given.values())), strict=True))


def check_window(size: tuple[int, int], batch: int, heads: int, value_width: int, with_values: bool) -> None:
    inputs = window_inputs(size, batch, heads, 4, value_width, with_values)
    expected, expected_gradients = value_and_gradients(attend_window_oracle, inputs, size)
    single = [None if x is None else x.detach().float().requires_grad_() for x in inputs]
    for (given, tolerance), form in itertools.product(((inputs, 1e-10), (single, 1e-5)), FORMS):
        out, gradients = value_and_gradients(FORMS[form], given, size)
        assert out.dtype == given[0].dtype and out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient.double(),
                expected_gradients[name],
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, name=name, form=form: f"gradient of {name}, {form}, size {size}: {text}",
            )


VARIANTS = list(itertools.product((1, 2), (1, 3), (4, 6), (False, True)))  # batch, heads, value width, position values


@pytest.mark.parametrize("height", range(1, 10))
def test_window_of_every_map_size(height):
    for number, size in enumerate(SIZES):
        if size[0] == height:
            check_window(size, *VARIANTS[number * 7 % len(VARIANTS)])


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (8, 16), *TALL], ids=str)
def test_window_of_every_shape(size):
    for variant in VARIANTS if max(size) < 10 else VARIANTS[-1:]:
        check_window(size, *variant)


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_window_gradcheck(form, with_values):
    size = (2, 3)
    inputs = window_inputs(size, 2, 2, 2, 3, with_values)
    # Far positions of the window never lie inside so small a map: their zero gradients are checked along.
    assert torch.autograd.gradcheck(
        lambda q, k, v, logits, *values: FORMS[form](q, k, v, size, logits, *(values or (None,))),
        [x for x in inputs if x is not None],
        fast_mode=True,
    )


def test_window_gradients_of_some_inputs_alone():
    size = (3, 4)
    inputs = window_inputs(size, 1, 2, 4, 4, True)
    _, expected = value_and_gradients(attend_window_oracle, inputs, size)
    for i, name in enumerate(NAMES):
        alone = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        out = attend_window(*alone[:3], size, *alone[3:])
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * weight).sum().backward()
        torch.testing.assert_close(alone[i].grad, expected[name])


def test_window_outside_the_map_takes_no_part():
    """Position logits outside the map must not matter, however large."""
    size = (2, 3)
    q, k, v, logits, values = (x.detach() for x in window_inputs(size, 1, 1, 4, 4, True))
    out = attend_window(q, k, v, size, logits, values)
    inside = torch.zeros(6, WINDOW, WINDOW, dtype=torch.bool)
    for y, x in itertools.product(range(2), range(3)):
        inside[y * 3 + x, 7 - y : 9 - y, 7 - x : 10 - x] = True
    louder = torch.where(inside.flatten(1), logits, torch.full_like(logits, 1e4))
    torch.testing.assert_close(attend_window(q, k, v, size, louder, values), out)


def test_window_in_inference_mode_and_training_after_it():
    size = (5, 19)  # used by no other test: tables made in inference mode must serve training too
    inputs = window_inputs(size, 2, 3, 4, 6, True)
    with torch.inference_mode():
        out = attend_window(*inputs[:3], size, *inputs[3:])
    expected, expected_gradients = value_and_gradients(attend_window_oracle, inputs, size)
    torch.testing.assert_close(out.clone(), expected)
    _, gradients = value_and_gradients(attend_window, inputs, size)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name])


def test_window_of_strided_inputs():
    """As the networks give them: heads split from channels, not contiguous."""
    size = (3, 5)
    inputs = window_inputs(size, 2, 3, 4, 4, True)
    expected, expected_gradients = value_and_gradients(attend_window_oracle, inputs, size)
    strided = [x.detach().transpose(1, -1).contiguous().transpose(1, -1).requires_grad_() for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    out, gradients = value_and_gradients(attend_window, strided, size)
    torch.testing.assert_close(out, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name])


def test_window_in_reduced_precision_keeps_parameters_gradients_in_theirs():
    """Under autocast queries are bfloat16 and the learned position values float32."""
    size = (4, 6)
    inputs = window_inputs(size, 1, 2, 4, 4, True)
    _, expected = value_and_gradients(attend_window_oracle, inputs, size)
    mixed = [x.detach().bfloat16().requires_grad_() for x in inputs[:4]]
    mixed.append(inputs[4].detach().float().requires_grad_())
    out, gradients = value_and_gradients(attend_window, mixed, size)
    assert out.dtype == torch.bfloat16
    for name, gradient in gradients.items():
        assert gradient.dtype == (torch.float32 if name == "position_values" else torch.bfloat16)
        assert (gradient.double() - expected[name]).norm() < 0.03 * expected[name].norm(), name


def test_second_derivatives_are_refused():
    """Autograd cannot follow the backward pass: a penalty on gradients must not be wrong in silence."""
    inputs = window_inputs((2, 2), 1, 1, 2, 2, False)
    out = attend_window(*inputs[:3], (2, 2), *inputs[3:])
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("value_width", [4, 6], ids=["equal", "wider"])
@pytest.mark.parametrize("batch, heads, queries, keys", [(1, 1, 1, 1), (2, 3, 7, 19), (1, 2, 40, 5)])
def test_attend(batch, heads, queries, keys, value_width):
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (
        torch.randn(batch, heads, n, width, dtype=torch.float64, generator=generator).requires_grad_()
        for n, width in ((queries, 4), (keys, 4), (keys, value_width))
    )
    expected = attend_oracle(q, k, v)
    torch.testing.assert_close(attend(q, k, v), expected)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    for actual, right in zip(
        torch.autograd.grad((attend(q, k, v) * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(actual, right)
    single = [x.detach().float() for x in (q, k, v)]
    with torch.inference_mode():
        out = attend(*single)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_attend_gradcheck():
    q, k, v = (
        torch.randn(1, 2, n, width, dtype=torch.float64, requires_grad=True) for n, width in ((3, 2), (4, 2), (4, 3))
    )
    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("queries, keys", [(1, 30), (257, 300), (300, 5000)])
def test_attend_in_blocks(queries, keys):
    """Unequal widths on the CPU go block by block; every block edge must fit."""
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, 1, n, width, generator=generator) for n, width in ((queries, 8), (keys, 8), (keys, 24)))
    for inputs in ((q, k, v), (q.mT.contiguous().mT, k.mT.contiguous().mT, v)):
        with torch.inference_mode():
            out = attend(*inputs)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


class Allocations(TorchDispatchMode):
    """Sees every storage that an operation makes: their sizes, and the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                storage = x.untyped_storage()
                self.sizes.append(storage.nbytes())
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 20), (17, 9)], ids=str)
def test_attentions_on_a_gpu(size, dtype, tolerance):
    for with_values in (False, True):
        inputs = window_inputs(size, 2, 2, 16, 32, with_values)
        expected, expected_gradients = value_and_gradients(attend_window_oracle, inputs, size)
        given = [None if x is None else x.detach().to("cuda", dtype).requires_grad_() for x in inputs]

        def on_gpu(*arguments):
            return attend_window(*arguments).double().cpu()

        out, gradients = value_and_gradients(on_gpu, given, size)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        for name, gradient in gradients.items():
            assert (gradient.double().cpu() - expected_gradients[name]).norm() <= tolerance * (
                1e-6 + expected_gradients[name].norm()
            ), name
        q, k, v = (x.detach() for x in given[:3])
        expected = attend_oracle(*(x.detach() for x in inputs[:3]))
        torch.testing.assert_close(attend(q, k, v).double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("value_width", [32, 96])
def test_window_never_holds_shifted_copies_of_the_keys(value_width):
    size, heads, width = (20, 30), 2, 32
    n = size[0] * size[1]
    q, k, v = (torch.randn(1, heads, n, d, requires_grad=True) for d in (width, width, value_width))
    logits = torch.randn(1, heads, n, WINDOW**2, requires_grad=True)
    values = torch.zeros(heads, value_width, WINDOW**2, requires_grad=True)
    copies = WINDOW**2 * k.numel() * k.element_size()
    with Allocations() as inference, torch.inference_mode():
        attend_window(q, k, v, size, logits, values)
    with Allocations() as training:
        attend_window(q, k, v, size, logits, values).sum().backward()
    weights = logits.numel() * 4  # one number a query and window position, kept for the backward pass alone
    assert copies == width * weights
    assert inference.peak < copies / 10 and weights not in inference.sizes
    assert max(training.sizes) < copies / 20 and weights in training.sizes
    assert training.peak < copies / 4
