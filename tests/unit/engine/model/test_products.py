"""Products with frozen weights equal a float64 reference, whichever library computes them."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.model.products import back_product, linear, linear_into

SHAPES = [(1, 1, 1), (3, 7, 5), (17, 64, 33), (40, 1030, 24), (2, 8200, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_products_equal_a_float64_reference(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 0.05, "atol": 2.0} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 3e-4}
    x, grad = random(rows, inputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    forward, back = x.double() @ weight.double().T, grad.double() @ weight.double()
    torch.testing.assert_close(linear(x, weight).double(), forward, **tolerance)
    torch.testing.assert_close(linear(x, weight, bias).double(), forward + bias.double(), **tolerance)
    torch.testing.assert_close(back_product(grad, weight).double(), back, **tolerance)
    into = linear_into(x, weight, torch.empty(rows, outputs, dtype=dtype))
    torch.testing.assert_close(into.double(), forward, **tolerance)


def test_inputs_may_be_views() -> None:
    wide, weight = random(12, 40, dtype=torch.float32), random(20, 16, dtype=torch.float32)
    columns, transposed = wide[:, 4:20], random(16, 12, dtype=torch.float32).T
    for x in (columns, transposed):
        torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(back_product(x, weight.T), x @ weight.T, rtol=1e-5, atol=1e-4)
    out = torch.zeros(14, 20)
    linear_into(columns, weight, out[1:13])
    torch.testing.assert_close(out[1:13], columns @ weight.T, rtol=1e-5, atol=1e-4)
    assert not out[0].any()
    assert not out[13].any()


def test_a_product_gives_the_same_bits_every_time() -> None:
    x, weight = random(70, 96, dtype=torch.float32), random(160, 96, dtype=torch.float32)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(5))
