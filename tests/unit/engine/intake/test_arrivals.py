from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tinkex.engine.intake.admission import Arrival
from tinkex.engine.intake.arrivals import MAX_GROUP, Arrivals
from tinkex.errors import InvalidInput
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    UntypedAPIFuture,
)


class RecordingAdmission:
    """Accepts requests, except steps with the number 13, and records its groups."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def submit_all(self, arrivals: Sequence[Arrival]) -> Sequence[UntypedAPIFuture | Exception]:
        self.groups.append([arrival.owner for arrival in arrivals])
        return [
            InvalidInput("unlucky")
            if getattr(arrival.request, "seq_id", 0) == 13
            else UntypedAPIFuture(request_id=arrival.owner)
            for arrival in arrivals
        ]


def step(run_id: str, seq_id: int = 1) -> OptimStepRequest:
    return OptimStepRequest(model_id=run_id, seq_id=seq_id, adam_params=AdamParams())


def sample(seq_id: int) -> SampleRequest:
    prompt = ModelInput.from_ints([1])
    return SampleRequest(
        prompt=prompt,
        num_samples=1,
        sampling_params=SamplingParams(),
        sampling_session_id="s",
        seq_id=seq_id,
    )


def create() -> CreateModelRequest:
    return CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=1)
    )


def submit_together(
    admission: RecordingAdmission, *requests: object
) -> list[UntypedAPIFuture | BaseException]:
    async def run() -> list[UntypedAPIFuture | BaseException]:
        arrivals = Arrivals(admission)  # type: ignore[arg-type]
        calls = (arrivals.submit(Arrival(str(n), request)) for n, request in enumerate(requests))  # type: ignore[arg-type]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("requests", "groups"),
    [
        ([step("a"), step("b"), sample(0), sample(1)], [["0", "1", "2", "3"]]),
        ([step("a", 1), step("b"), step("a", 2), step("c")], [["0", "1"], ["2", "3"]]),
        ([step("a"), create(), step("b")], [["0"], ["1"], ["2"]]),
        ([create()], [["0"]]),
    ],
)
def test_requests_that_arrive_together_are_grouped_in_order(
    requests: list[object], groups: list[list[str]]
) -> None:
    admission = RecordingAdmission()
    submit_together(admission, *requests)
    assert admission.groups == groups


def test_a_group_has_a_bounded_size() -> None:
    admission = RecordingAdmission()
    submit_together(admission, *(step(f"run-{n}") for n in range(MAX_GROUP + 1)))
    assert [len(group) for group in admission.groups] == [MAX_GROUP, 1]


def test_a_rejected_request_does_not_affect_the_others_of_its_group() -> None:
    first, second, third = submit_together(RecordingAdmission(), step("a"), step("b", 13), step("c"))
    assert isinstance(second, InvalidInput)
    assert first == UntypedAPIFuture(request_id="0")
    assert third == UntypedAPIFuture(request_id="2")


def test_a_caller_that_has_disconnected_does_not_affect_the_others() -> None:
    admission = RecordingAdmission()

    async def run() -> UntypedAPIFuture:
        arrivals = Arrivals(admission)  # type: ignore[arg-type]
        gone = asyncio.create_task(arrivals.submit(Arrival("gone", step("a"))))
        here = asyncio.create_task(arrivals.submit(Arrival("here", step("b"))))
        asyncio.get_running_loop().call_soon(gone.cancel)
        return await here

    assert asyncio.run(run()).request_id == "here"
    assert admission.groups == [["gone", "here"]]


def test_a_failure_of_a_group_is_raised_for_each_of_its_callers() -> None:
    class FailingAdmission(RecordingAdmission):
        def submit_all(self, arrivals: Sequence[Arrival]) -> Sequence[UntypedAPIFuture | Exception]:
            results = super().submit_all(arrivals)
            if len(self.groups) == 1:
                raise OSError("the database cannot be read")
            return results

    answers = submit_together(FailingAdmission(), step("a"), step("b"), create())
    assert [type(answer) for answer in answers] == [OSError, OSError, UntypedAPIFuture]
