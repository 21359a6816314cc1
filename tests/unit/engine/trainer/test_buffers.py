"""Buffers that are used again come back as zeros, and do not pile up."""

from __future__ import annotations

import torch

from tinkex.engine.trainer.buffers import BufferPool


def test_a_buffer_given_back_is_handed_out_again_as_zeros() -> None:
    spare = BufferPool(max_bytes=1000)
    params = torch.ones(10)
    first = spare.zeros_like(params)
    first.fill_(3.0)
    spare.release(first)
    again = spare.zeros_like(params)
    assert again is first
    assert torch.equal(again, torch.zeros(10))
    assert spare.zeros_like(params) is not first


def test_another_size_or_dtype_gets_a_buffer_of_its_own() -> None:
    spare = BufferPool(max_bytes=1000)
    spare.release(torch.ones(10))
    assert spare.zeros_like(torch.ones(9)).shape == (9,)
    assert spare.zeros_like(torch.ones(10, dtype=torch.float64)).dtype == torch.float64
    assert spare.num_bytes == 40


def test_spare_buffers_are_bounded_and_the_oldest_goes_first() -> None:
    spare = BufferPool(max_bytes=100)
    old, new = torch.ones(20), torch.ones(15)
    for buffer in (old, new, torch.ones(1000), None):
        spare.release(buffer)
    assert spare.num_bytes == 60
    assert spare.zeros_like(torch.ones(15)) is new
