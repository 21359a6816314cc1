"""Regularizers around a loss: one total, its parts reported, and nothing added where a part fails."""

from __future__ import annotations

import asyncio
import contextvars
import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.losses.regularizers import (
    L1,
    L2,
    Entropy,
    KLDivergence,
    Pipeline,
    RegularizerSpec,
    with_regularizers,
)
from tinkex.observability.events import Event, RegularizerFinished, RegularizerStarted

pytestmark = pytest.mark.slow


def datum(*tokens: int, **more: Any) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens), **more})


DATA = [datum(1, 2), datum(3)]
LOGPROBS = [[-1.0, -2.0], [-3.0]]


def nll(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {"datums": len(data)}


def leaves() -> list[torch.Tensor]:
    return [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in LOGPROBS]


def test_the_total_and_every_part_are_reported() -> None:
    specs = [
        RegularizerSpec(L2(), weight=0.5),
        RegularizerSpec(L1(of="probs"), weight=2.0, name="quiet"),
        RegularizerSpec(Entropy(), weight=0.0),
    ]
    output = Pipeline(specs).evaluate(DATA, LOGPROBS, nll)
    assert output.base_loss == 6.0
    assert output.base_grad_norm == pytest.approx(np.sqrt(3))
    assert output.regularizers["l2"].value == 14.0
    assert output.regularizers["l2"].contribution == 7.0
    assert output.regularizers["l2"].grad_norm == pytest.approx(2 * np.sqrt(14))
    assert output.regularizers["l2"].grad_norm_weighted == pytest.approx(np.sqrt(14))
    probabilities = np.exp([-1.0, -2.0, -3.0])
    assert output.regularizers["quiet"].value == pytest.approx(probabilities.sum())
    assert output.regularizers["entropy"].contribution == 0
    assert output.regularizer_total == pytest.approx(7.0 + 2 * probabilities.sum())
    assert output.loss_total == pytest.approx(output.base_loss + output.regularizer_total)
    slope = -1 + np.array([-1.0, -2.0, -3.0]) + 2 * probabilities
    assert output.total_grad_norm == pytest.approx(np.linalg.norm(slope))
    metrics = output.metrics()
    assert metrics["datums"] == 2
    assert metrics["regularizer/l2/contribution:sum"] == 7.0
    assert metrics["regularizer/l2/center"] == 0.0
    assert set(metrics) >= {"base_loss:sum", "regularizer_loss:sum", "loss/grad_norm:mean"}


def test_the_output_is_a_plain_dictionary_too() -> None:
    output = Pipeline([RegularizerSpec(L2(), weight=0.5)]).evaluate(DATA, LOGPROBS, nll)
    dumped = json.loads(json.dumps(output.model_dump()))
    assert dumped["base_loss"] == {"value": 6.0, "grad_norm": pytest.approx(3**0.5), "custom": {"datums": 2}}
    assert dumped["regularizers"]["l2"]["contribution"] == dumped["regularizer_total"] == 7.0
    assert dumped["regularizers"]["l2"]["grad_norm_weighted"] == pytest.approx(14**0.5)
    assert dumped["loss_total"] == 13.0
    assert set(dumped["regularizers"]["l2"]) == {
        *("name", "value", "weight", "contribution", "grad_norm", "grad_norm_weighted", "custom")
    }


class RecordingSink:
    """Records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("waits", [False, True])
def test_every_term_tells_when_it_starts_and_what_it_came_to(waits: bool) -> None:
    received = RecordingSink()
    specs = [RegularizerSpec(L2(), 0.5, waits=waits), RegularizerSpec(L1(), 2.0)]
    output = Pipeline(specs, events=received).evaluate(DATA, LOGPROBS, nll)
    for spec in specs:
        started, finished = (event for event in received.events if getattr(event, "name", "") == spec.name)
        assert started == RegularizerStarted(spec.name, spec.weight)
        assert isinstance(finished, RegularizerFinished)
        assert finished.elapsed_s >= 0
        term = output.regularizers[spec.name]
        assert (finished.value, finished.grad_norm, finished.error) == (term.value, term.grad_norm, None)


@pytest.mark.parametrize("waits", [False, True])
def test_a_term_that_fails_tells_that_too(waits: bool) -> None:
    def broken(data: Any, logprobs: Any) -> Any:
        raise RuntimeError("no reference")

    received = RecordingSink()
    with pytest.raises(RuntimeError, match="no reference"):
        with_regularizers(nll, [RegularizerSpec(broken, 1.0, waits=waits)], events=received)(DATA, leaves())
    started, finished = received.events
    assert isinstance(started, RegularizerStarted)
    assert isinstance(finished, RegularizerFinished)
    assert (finished.value, finished.error) == (None, "RuntimeError: no reference")


def test_the_gradient_of_the_total_is_the_weighted_sum() -> None:
    loss = with_regularizers(nll, [RegularizerSpec(L2(), weight=0.5), RegularizerSpec(L1(), weight=3.0)])
    logprobs = leaves()
    total, _ = loss(DATA, logprobs)
    total.backward()
    for lp in logprobs:
        torch.testing.assert_close(lp.grad, -1 + lp.detach() - 3)


def test_terms_that_wait_run_beside_each_other() -> None:
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=20)
    seen = contextvars.ContextVar("seen", default="nothing")
    seen.set("the caller's context")
    found = []

    def waiter(data: Any, logprobs: Any) -> Any:
        meeting.wait()
        found.append(seen.get())
        return logprobs[0].sum(), {}

    specs = [RegularizerSpec(waiter, weight=1.0, name=name, waits=True) for name in ("one", "other")]
    output = Pipeline(specs).evaluate(DATA, LOGPROBS, nll)
    assert [term.value for term in output.regularizers.values()] == [-3.0, -3.0]
    assert found == ["the caller's context"] * 2


def test_a_coroutine_function_is_awaited() -> None:
    async def asked(data: Any, logprobs: Any) -> Any:
        await asyncio.sleep(0)
        return KLDivergence([np.zeros(2), np.zeros(1)])(data, logprobs)

    class Asking:
        name = "asking"

        async def __call__(self, data: Any, logprobs: Any) -> Any:
            return await asked(data, logprobs)

    output = Pipeline([RegularizerSpec(asked, 1.0), RegularizerSpec(Asking(), 1.0)]).evaluate(
        DATA, LOGPROBS, nll
    )
    assert output.regularizers["asked"].grad_norm > 0
    assert output.regularizers["asking"].value == output.regularizers["asked"].value


def test_a_term_that_never_answers_ends_the_pass() -> None:
    released = threading.Event()

    def never(data: Any, logprobs: Any) -> Any:
        released.wait()

    async def never_either(data: Any, logprobs: Any) -> Any:
        await asyncio.Event().wait()

    for spec in (RegularizerSpec(never, 1.0, waits=True), RegularizerSpec(never_either, 1.0)):
        with pytest.raises(TimeoutError, match=r"never.* 0.05 s"):
            Pipeline([spec], timeout_s=0.05).evaluate(DATA, LOGPROBS, nll)
    released.set()


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_names_its_regularizer(waits: bool) -> None:
    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        Pipeline([RegularizerSpec(broken, 1.0, waits=waits)]).evaluate(DATA, LOGPROBS, nll)
    assert "the regularizer 'broken'" in caught.value.__notes__[0]


def test_a_term_may_be_given_all_the_time_there_is() -> None:
    async def later(data: Any, logprobs: Any) -> Any:
        return logprobs[0].sum(), {}

    output = Pipeline([RegularizerSpec(later, 1.0)], timeout_s=float("inf")).evaluate(DATA, LOGPROBS, nll)
    assert output.regularizers["later"].value == -3.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_time_limit_of_a_terms_own_is_reported_as_that(asynchronous: bool) -> None:
    def impatient(data: Any, logprobs: Any) -> Any:
        raise TimeoutError("the reference server is slow")

    async def impatient_too(data: Any, logprobs: Any) -> Any:
        raise TimeoutError("the reference server is slow")

    spec = RegularizerSpec(impatient_too if asynchronous else impatient, 1.0, waits=True)
    with pytest.raises(TimeoutError, match="the reference server is slow"):
        Pipeline([spec]).evaluate(DATA, LOGPROBS, nll)


def test_a_term_whose_gradient_is_not_finite_is_named_though_its_value_is() -> None:
    def distance(data: Any, logprobs: Any) -> Any:
        return (logprobs[0] - logprobs[0].detach()).square().sum().sqrt(), {}  # 0, with a slope of 0/0

    spec = RegularizerSpec(distance, 1.0)
    with pytest.raises(ValueError, match="gradient of the regularizer 'distance' is not finite"):
        Pipeline([RegularizerSpec(L2(), 1.0), spec]).evaluate(DATA, LOGPROBS, nll)


def test_when_several_fail_concurrently_the_first_in_order_is_raised_and_all_are_reported() -> None:
    seen = RecordingSink()
    release = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        release.wait(30)
        raise ValueError("the first")

    def quick(data: Any, logprobs: Any) -> Any:
        release.set()
        raise ValueError("the second")

    specs = [RegularizerSpec(slow, 1.0, waits=True), RegularizerSpec(quick, 1.0, waits=True)]
    with pytest.raises(ValueError, match="the first"):
        Pipeline(specs, events=seen).evaluate(DATA, LOGPROBS, nll)
    assert [event.name for event in seen.events if isinstance(event, RegularizerStarted)] == ["slow", "quick"]
    failed = [event for event in seen.events if isinstance(event, RegularizerFinished)]
    assert [(event.name, event.error) for event in failed] == [
        ("slow", "ValueError: the first"),
        ("quick", "cancelled: another term of the loss failed"),
    ]


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (lambda lp: lp.sum(), TypeError, "must return \\(value, metrics\\)"),
        (lambda lp: (3.0, {}), TypeError, "torch tensor with one number"),
        (lambda lp: (lp.detach().sum(), {}), ValueError, "does not depend on the logprobs"),
        (lambda lp: (lp.sum() * torch.inf, {}), ValueError, "is -inf"),
    ],
)
def test_a_term_that_is_not_a_penalty_is_rejected(returned: Any, kind: type[Exception], message: str) -> None:
    spec = RegularizerSpec(lambda data, logprobs: returned(logprobs[0]), 1.0, name="odd")
    with pytest.raises(kind, match=message):
        Pipeline([spec]).evaluate(DATA, LOGPROBS, nll)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RegularizerSpec("l2", 1.0), "function of \\(data, logprobs\\)"),  # type: ignore[arg-type]
        (lambda: RegularizerSpec(L2(), -1.0), "≥ 0"),
        (lambda: RegularizerSpec(L2(), float("nan")), "finite"),
        (lambda: RegularizerSpec(L2(), weight=True), "finite number"),
        (
            lambda: RegularizerSpec(KLDivergence.__call__.__get__(KLDivergence("r")), 1.0, name=3),
            "needs a name",
        ),  # type: ignore[arg-type]
        (lambda: Pipeline([RegularizerSpec(L2(), 1.0), RegularizerSpec(L2(), 1.0)]), "two regularizers"),
        (lambda: Pipeline([L2()]), "RegularizerSpec\\(L2\\(\\)"),  # type: ignore[list-item]
        (lambda: Pipeline([], timeout_s=0), "timeout_s"),
    ],
)
def test_a_wrong_specification_is_rejected(build: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.slow
def test_importing_the_regularizers_loads_no_torch() -> None:
    program = "import sys, tinkex.losses.regularizers as r; r.L2(); r.KLDivergence('x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
