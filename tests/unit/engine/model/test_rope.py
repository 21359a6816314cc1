"""The table of cosines and sines gives what is computed directly."""

from __future__ import annotations

import torch

from tinkex.engine.model.rope import RopeConfig, Rotary


def test_kept_and_computed_positions_agree_in_any_order() -> None:
    rotary = Rotary(RopeConfig(), head_dim=64)
    positions = torch.tensor([5, 0, 1023, 1024, 5, 20_000, 3])
    far = torch.cat((positions, torch.tensor([40_000])))
    for near, computed in zip(rotary(positions), rotary(far), strict=True):
        torch.testing.assert_close(near, computed[:-1], rtol=0, atol=1e-6)
    assert [tuple(part.shape) for part in rotary(torch.tensor([], dtype=torch.int64))] == [(0, 1, 32)] * 2
