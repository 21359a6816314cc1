from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.sampler.kv_cache import PromptKV, Slot, SlotTable, bytes_per_token

ARCH = Architecture.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 8,
        "vocab_size": 16,
        "max_position_embeddings": 4096,
    }
)


def prompt(length: int, value: float) -> PromptKV:
    """A prompt whose every key and value is ``value``, which marks whose it is."""
    kv = PromptKV(ARCH, torch.float32, length)
    kv.kv_L2KPd.fill_(value)
    kv.filled = length
    return kv


def table() -> SlotTable:
    return SlotTable(ARCH, torch.float32)


def contents(slot: Slot) -> torch.Tensor:
    return slot.bank.kv_L2SKCd[:, :, slot.index, :, : slot.length]


def row(value: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 2, 4), torch.full((1, 1, 4), value), torch.full((1, 1, 4), value)


def test_one_token_takes_a_key_and_a_value_in_every_layer() -> None:
    assert bytes_per_token(ARCH, torch.float32) == 1 * 2 * 1 * 4 * 4
    assert prompt(10, 0).nbytes == 10 * bytes_per_token(ARCH, torch.float32)


def test_an_empty_table_takes_no_memory_and_gets_there_again() -> None:
    slots = table()
    assert slots.nbytes == 0
    held = [slots.add(prompt(length, 1.0)) for length in (3, 70, 500)]
    assert slots.nbytes > 0
    for slot in held:
        slots.remove(slot)
    assert (slots.nbytes, len(slots)) == (0, 0)


def test_the_cost_of_a_slot_is_what_joining_then_allocates() -> None:
    slots = table()
    for length in [3, 3, 3, 63, 64, 3, 200, 3, 3]:
        before, cost = slots.nbytes, slots.cost(length)
        slots.add(prompt(length, 1.0))
        assert slots.nbytes == before + cost


def test_trimming_leaves_only_slots_in_use() -> None:
    slots = table()
    held = [slots.add(prompt(10, float(value))) for value in range(9)]
    slots.remove(held.pop(0))
    slots.trim()
    assert slots.nbytes == 8 * 64 * bytes_per_token(ARCH, torch.float32)
    assert [contents(slot).unique().tolist() for slot in held] == [[float(value)] for value in range(1, 9)]


def test_a_slot_that_grows_keeps_its_tokens_and_takes_more() -> None:
    slots = table()
    slot = slots.add(prompt(64 - 1, 2.0))
    slots.attend([slot])(0, *row(3.0))
    slot.length += 1
    assert slots.is_full(slot)
    slots.grow(slot)
    assert not slots.is_full(slot)
    assert contents(slot)[..., :63, :].unique().tolist() == [2.0]
    assert contents(slot)[..., 63:, :].unique().tolist() == [3.0]


@pytest.mark.slow
def test_attention_sees_a_sequences_own_tokens_only() -> None:
    slots = table()
    held = [slots.add(prompt(length, value)) for length, value in [(5, 1.0), (40, 2.0), (100, 3.0), (7, 4.0)]]
    order = [held[2], held[0], held[3], held[1]]
    own = torch.tensor([3.0, 1.0, 4.0, 2.0])
    k = own[:, None, None].expand(4, 1, 4)
    out = slots.attend(order)(0, torch.randn(4, 2, 4), k, k)
    # Every value a sequence may see is its own mark, so any weighting of them is that mark.
    torch.testing.assert_close(out, own[:, None, None].expand(4, 2, 4))


def test_a_sequence_that_went_wrong_leaves_nothing_behind_for_the_next() -> None:
    slots = table()
    well, ill = slots.add(prompt(10, 1.0)), slots.add(prompt(60, float("nan")))
    slots.remove(ill)
    fresh = slots.add(prompt(3, 2.0))
    k = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 4)
    out = slots.attend([well, fresh])(0, torch.zeros(2, 2, 4), k, k)
    assert out.isfinite().all()


def test_a_pass_that_is_repeated_gives_the_same() -> None:
    slots = table()
    slot = slots.add(prompt(5, 1.0))
    first = slots.attend([slot])(0, *row(9.0))
    again = slots.attend([slot])(0, *row(9.0))
    assert torch.equal(first, again)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["join", "leave", "grow", "trim"]), st.integers(0, 300)), max_size=40)
)
def test_sequences_keep_their_tokens_whatever_else_is_added_or_removed(
    actions: list[tuple[str, int]],
) -> None:
    slots = table()
    held: dict[float, Slot] = {}
    for mark, (action, number) in enumerate(actions, start=1):
        if action == "join":
            held[float(mark)] = slots.add(prompt(number + 1, float(mark)))
        elif action == "trim":
            slots.trim()
        elif held:
            chosen = list(held)[number % len(held)]
            if action == "leave":
                slots.remove(held.pop(chosen))
            else:
                slot = held[chosen]
                while not slots.is_full(slot):
                    contents_before = slot.length
                    slot.bank.kv_L2SKCd[:, :, slot.index, :, contents_before] = chosen
                    slot.length += 1
                slots.grow(slot)
        assert len(slots) == len(held)
        assert all(contents(slot).unique().tolist() == [mark] for mark, slot in held.items())
