"""How a pass is cut into shards, and that their sum is the pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics.test_shared_prefixes import datum_of
from tests.unit.engine.trainer.harness import (
    in_double,
    naive_logprobs,
    naive_loss,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.adapter_copy import AdapterCopy
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.examples import Example, read_pass
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.prefixes import count_distinct, order_by_prefix
from tinkex.engine.trainer.shard_sum import ShardSum, compute_shard
from tinkex.engine.trainer.shards import ShardResult, count_shards, plan_shards
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState
from tinkex.errors import EngineFailure, NumericalError, TinkexError
from tinkex.types.losses import ForwardBackwardOutput

SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda tokens: np.array(tokens, dtype=np.int64)),
    min_size=1,
    max_size=12,
)
SAVED = st.sampled_from([None, 1, 4])


def trees_of(sequences: list[np.ndarray], min_saved: int | None) -> list[set[int]]:
    order = order_by_prefix(sequences, min_saved)
    trees: list[set[int]] = []
    for number, shared in zip(order.numbers, order.shared, strict=True):
        if not shared:
            trees.append(set())
        trees[-1].add(number)
    return trees


@given(SEQUENCES, st.integers(1, 6), SAVED)
def test_every_sequence_is_in_one_shard_and_no_tree_is_divided(
    sequences: list[np.ndarray], num_shards: int, min_saved: int | None
) -> None:
    shards = plan_shards(sequences, num_shards, min_saved)
    assert sorted(number for shard in shards for number in shard) == list(range(len(sequences)))
    trees = trees_of(sequences, min_saved)
    assert len(shards) == min(num_shards, len(trees))
    for tree in trees:
        assert sum(bool(tree & set(shard)) for shard in shards) == 1


@given(SEQUENCES, st.integers(1, 6), SAVED)
def test_shards_are_balanced_and_compute_no_token_twice(
    sequences: list[np.ndarray], num_shards: int, min_saved: int | None
) -> None:
    shards = plan_shards(sequences, num_shards, min_saved)
    sizes = [count_distinct([sequences[number] for number in shard], min_saved) for shard in shards]
    total = count_distinct(sequences, min_saved)
    assert sum(sizes) <= total
    largest = max(
        count_distinct([sequences[number] for number in tree], min_saved)
        for tree in trees_of(sequences, min_saved)
    )
    assert max(sizes) <= total / num_shards + largest


@given(SEQUENCES, st.integers(1, 40), SAVED)
def test_the_number_of_shards_follows_from_the_tokens(
    sequences: list[np.ndarray], max_tokens: int, min_saved: int | None
) -> None:
    num_shards = count_shards(sequences, max_tokens, min_saved)
    total = count_distinct(sequences, min_saved)
    assert num_shards == min(-(-total // max_tokens), len(trees_of(sequences, min_saved)))
    assert len(plan_shards(sequences, num_shards, min_saved)) == num_shards


def test_copies_of_one_prompt_stay_together() -> None:
    prompt = np.arange(100, dtype=np.int64)
    sequences = [np.concatenate([prompt, [200 + n]]) for n in range(4)]
    assert count_shards(sequences, max_tokens=10) == 1
    others = [np.arange(300 + n, 360 + n) for n in range(2)]
    assert plan_shards([*sequences, *others], 2) == [[0, 1, 2, 3], [4, 5]]


# ---- the numbers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


def examples_of(trainer: Trainer, loss_fn: str, seed: int = 0, num: int = 7) -> list[Example]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 96, 9).tolist() for _ in range(3)]
    data = [
        datum_of([*prompts[n % 3], *random.integers(0, 96, 3 + n).tolist()], random, loss_fn)
        for n in range(num)
    ]
    return list(read_pass(data, loss_fn, None, trainer.limits)[1])


def in_shards(
    trainer: Trainer,
    state: TrainState,
    examples: list[Example],
    loss_fn: str,
    num_shards: int,
    *,
    backward: bool = True,
) -> tuple[ShardSum, list[list[int]]]:
    shards = plan_shards([example.tokens_N for example in examples], num_shards)
    return ShardSum(trainer, state, examples, loss_fn, shards, backward=backward), shards


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
@pytest.mark.parametrize("backward", [True, False])
def test_the_shards_of_a_pass_are_the_pass_up_to_rounding(
    model: Transformer, loss_fn: str, backward: bool
) -> None:
    trainer = Trainer(model)
    examples = examples_of(trainer, loss_fn)
    whole, cut = trained_state(trainer), trained_state(trainer)
    job = TrainJob(whole, examples, loss_fn, backward=backward)
    [expected] = trainer.run([job])
    shards, plan = in_shards(trainer, cut, examples, loss_fn, 3, backward=backward)
    assert len(plan) == 3
    assert all(shards.compute(number) for number in range(3))
    output = shards.finish()
    assert isinstance(expected, ForwardBackwardOutput)
    assert output is not None
    assert output.loss_fn_output_type == expected.loss_fn_output_type
    assert output.metrics == pytest.approx(dict(expected.metrics), rel=1e-5, abs=1e-6)
    for mine, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name].to_numpy(), theirs[name].to_numpy(), rtol=1e-4, atol=1e-5)
    assert shards.tokens_computed == job.effort.tokens_computed
    if backward:
        assert whole.grad is not None
        assert cut.grad is not None
        torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-4, atol=1e-5)
    else:
        assert cut.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_the_sum_of_shards_equals_a_float64_reference(model: Transformer, loss_fn: str) -> None:
    double = in_double(model)
    trainer = Trainer(double)
    random = np.random.default_rng(3)
    data = [datum_of(random.integers(0, 96, 4 + n).tolist(), random, loss_fn) for n in range(5)]
    examples = list(read_pass(data, loss_fn, None, trainer.limits)[1])
    state = trained_state(trainer, dtype=torch.float64)
    leaf = state.adapter.params.clone().requires_grad_()
    losses = [naive_loss(loss_fn, naive_logprobs(double, state, datum, leaf), datum) for datum in data]
    torch.stack(losses).sum().backward()
    shards, _ = in_shards(trainer, state, examples, loss_fn, 3)
    assert all(shards.compute(number) for number in range(3))
    output = shards.finish()
    assert output is not None
    assert output.metrics["loss:sum"] == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    assert state.grad is not None
    assert leaf.grad is not None
    torch.testing.assert_close(state.grad, leaf.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(3)), elsewhere=st.sets(st.integers(0, 2)))
def test_the_sum_is_the_same_to_the_last_bit_wherever_and_in_whatever_order_shards_are_computed(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], elsewhere: set[int]
) -> None:
    home_model, helper_model = (small_transformer(tmp_path_factory.mktemp("small")) for _ in range(2))
    home, helper = Trainer(home_model), Trainer(helper_model)
    examples = examples_of(home, "ppo")
    gradients, metrics = [], []
    for numbers, remote in [(list(range(3)), set()), (order, elsewhere)]:
        state = trained_state(home)
        state.grad = torch.ones_like(state.adapter.params)  # of an earlier pass
        copy = AdapterCopy.of(state.adapter, "run/1").adapter(helper_model.arch)
        shards, plan = in_shards(home, state, examples, "ppo", 3)
        for number in numbers:
            if number in remote:
                own = [examples[index] for index in plan[number]]
                shards.add(
                    number, compute_shard(helper, copy, own, "ppo", backward=True, share_prefixes=True)
                )
            else:
                assert shards.compute(number)
        output = shards.finish()
        assert output is not None
        gradients.append(state.grad.numpy().tobytes())
        metrics.append(output.metrics)
    assert gradients[0] == gradients[1]
    assert metrics[0] == metrics[1]


class ThreadsSeen(Trainer):
    """Records the number of threads of its passes."""

    seen = 0

    def run(
        self, jobs: Sequence[TrainJob], *, share_prefixes: bool = True
    ) -> list[ForwardBackwardOutput | TinkexError]:
        self.seen = torch.get_num_threads()
        return super().run(jobs, share_prefixes=share_prefixes)


@pytest.mark.slow
def test_a_shard_is_computed_with_the_threads_that_were_recorded(model: Transformer) -> None:
    trainer, usual = ThreadsSeen(model), torch.get_num_threads()
    state, examples = trained_state(trainer), examples_of(trainer, "ppo", num=1)
    for threads in (usual + 1, 0):
        compute_shard(
            trainer, state.adapter, examples, "ppo", backward=False, share_prefixes=True, threads=threads
        )
        assert trainer.seen == (threads or usual)
        assert torch.get_num_threads() == usual


@pytest.mark.slow
def test_a_shard_that_fails_changes_nothing(model: Transformer) -> None:
    trainer = Trainer(model)
    examples = examples_of(trainer, "ppo")
    examples[0].inputs["advantages"][:] = np.inf
    state = trained_state(trainer)
    shards, plan = in_shards(trainer, state, examples, "ppo", 3)
    broken = next(number for number, members in enumerate(plan) if 0 in members)
    assert not shards.compute(broken)
    own = [examples[index] for index in plan[broken]]
    result = compute_shard(trainer, state.adapter, own, "ppo", backward=True, share_prefixes=True)
    assert isinstance(result.output, NumericalError)
    assert result.gradient is None
    assert state.grad is None


@pytest.mark.slow
def test_a_sum_that_is_not_finite_changes_nothing(model: Transformer) -> None:
    trainer = Trainer(model)
    examples = examples_of(trainer, "ppo")
    state = trained_state(trainer)
    shards, plan = in_shards(trainer, state, examples, "ppo", 2)
    for number, members in enumerate(plan):
        own = [examples[index] for index in members]
        result = compute_shard(trainer, state.adapter, own, "ppo", backward=True, share_prefixes=True)
        assert result.gradient is not None
        large = np.full_like(result.gradient, 3e38)
        shards.add(number, ShardResult(result.output, large, result.tokens_computed))
    assert shards.finish() is None
    assert state.grad is None


def test_a_copy_that_was_changed_on_its_way_is_rejected(model: Transformer) -> None:
    state = trained_state(Trainer(model))
    copy = AdapterCopy.of(state.adapter, "run/1")
    assert torch.equal(copy.adapter(model.arch).params, state.adapter.params)
    copy.params[3] += 1
    with pytest.raises(EngineFailure, match="not what was sent"):
        copy.adapter(model.arch)
