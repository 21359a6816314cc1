from __future__ import annotations

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler.loss_costs import FIRST_COST, MIN_COST, LossCosts


def custom(name: str = "a", tokens: int = 10, datums: int = 1, loss: str | None = "digest") -> Operation:
    return Operation(
        name, "ada", "base", name, 1, Kind.FORWARD_BACKWARD, tokens, loss=loss, num_datums=datums
    )


def test_a_pass_without_a_custom_loss_costs_its_tokens() -> None:
    assert LossCosts().estimate(custom(loss=None)) == 10


def test_a_loss_that_has_not_run_is_assumed_to_be_costly() -> None:
    assert LossCosts().estimate(custom()) == 10 + FIRST_COST


def test_a_loss_is_expected_to_cost_what_it_has_cost_at_most_per_datum() -> None:
    costs = LossCosts()
    costs.record(custom(datums=2), 4000)
    costs.record(custom(datums=2), 100)
    assert costs.estimate(custom(datums=3)) == 10 + 6000
    assert costs.estimate(custom(loss="another")) == 10 + FIRST_COST


def test_a_cheap_loss_is_not_trusted_to_stay_cheap_on_other_data() -> None:
    costs = LossCosts()
    costs.record(custom(), 1)
    assert costs.estimate(custom()) == 10 + MIN_COST


def test_a_pass_that_failed_before_its_loss_ran_says_nothing_about_it() -> None:
    costs = LossCosts()
    costs.record(custom(), 0)
    assert costs.estimate(custom()) == 10 + FIRST_COST
