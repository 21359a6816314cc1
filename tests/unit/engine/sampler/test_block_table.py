from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.sampler.test_kv_cache import ARCH, prompt
from tinkex.engine.sampler.block_table import BlockSlot, BlockTable
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.limits import BLOCK_TOKENS, SlotSizes

BLOCK_BYTES = BLOCK_TOKENS * bytes_per_token(ARCH, torch.float32)


def test_a_sequence_shares_the_whole_blocks_of_its_prompt_and_copies_the_rest() -> None:
    table, whole = BlockTable(ARCH, torch.float32), prompt(150, 3.0)
    one, other = table.add(whole), table.add(whole)
    assert (one.shared, one.start, one.own_length, len(table)) == (whole, 128, 22, 2)
    assert one.blocks_L2KCd[0][:, :, :, :22].unique().tolist() == [3.0]
    assert table.nbytes == 2 * BLOCK_BYTES == 2 * table.cost(150)
    table.remove(one)
    table.remove(other)
    assert (table.nbytes, len(table)) == (0, 0)


def test_a_short_prompt_is_copied_and_need_not_stay() -> None:
    slot = BlockTable(ARCH, torch.float32).add(prompt(63, 1.0))
    assert (slot.shared, slot.start, slot.own_length) == (None, 0, 63)


def test_a_sequence_that_grows_stays_where_it_is_and_gets_one_block_more() -> None:
    table = BlockTable(ARCH, torch.float32)
    slot = table.add(prompt(64, 1.0))
    [first] = slot.blocks_L2KCd
    assert not table.is_full(slot)
    slot.length += 64
    assert table.is_full(slot)
    table.grow(slot)
    assert slot.blocks_L2KCd[0] is first
    assert table.nbytes == 2 * BLOCK_BYTES
    assert not table.is_full(slot)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(2, 200), st.data())
def test_the_peak_of_one_sequence_is_what_it_takes_at_most(
    length: int, num_new: int, data: st.DataObject
) -> None:
    """Preempted once anywhere or not, a sequence never allocates more than its peak, and can allocate all of it."""
    peak = SlotSizes(paged=True).peak_tokens(length, num_new)
    given_way = data.draw(st.integers(0, num_new - 2))
    assert taken(length + given_way, num_new - given_way) <= peak
    assert max(taken(length + again, num_new - again) for again in range(num_new - 1)) == peak


def taken(length: int, num_new: int) -> int:
    """Tokens of memory that a prompt and the blocks of a sequence take when its last token is drawn."""
    table = BlockTable(ARCH, torch.float32)
    slot: BlockSlot = table.add(prompt(length, 0.0))
    for _ in range(num_new - 1):
        if table.is_full(slot):
            table.grow(slot)
        slot.length += 1
    return length + table.nbytes // bytes_per_token(ARCH, torch.float32)
