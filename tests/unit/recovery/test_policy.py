"""Which checkpoint, how often, and what an answer says about a run: pure decisions, as tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tinkex import errors, types
from tinkex._transport.retry import ErrorStatus, GiveUp, NoReply, Retry, decide
from tinkex.recovery import Best, RecoveryPolicy
from tinkex.recovery.diagnosis import condition_of, is_interruption, outcome_of
from tinkex.recovery.policy import rank_checkpoints


def checkpoint(name: str, minute: int, kind: Any = "training", **metadata: Any) -> types.Checkpoint:
    folder = {"training": "weights", "sampler": "sampler_weights"}[kind]
    return types.Checkpoint(
        checkpoint_id=f"{folder}/{name}",
        checkpoint_type=kind,
        time=datetime(2026, 8, 1, 12, minute, tzinfo=UTC),
        tinker_path=f"tinker://run/{folder}/{name}",
        user_metadata=metadata or None,
    )


SAVED = [
    checkpoint("b", 2, loss="1.5"),
    checkpoint("c", 3, loss="2.5"),
    checkpoint("s", 9, "sampler", loss="0.1"),
    checkpoint("a", 1, loss="0.5"),
    checkpoint("d", 4, loss="nan"),
    checkpoint("e", 5, loss="unknown"),
    checkpoint("f", 6),
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("latest", "fedcba"),
        (Best("loss"), "abc"),
        (Best("loss", highest=True), "cba"),
    ],
)
def test_checkpoints_are_ranked(choice: Any, names: str) -> None:
    assert rank_checkpoints(choice, "run", SAVED) == [f"tinker://run/weights/{name}" for name in names]


def test_no_checkpoint_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(errors.RecoveryError, match="save_state") as caught:
        rank_checkpoints("latest", "run", SAVED[2:3])
    assert caught.value.run_id == "run"
    with pytest.raises(errors.RecoveryError, match=r"reward.*user_metadata"):
        rank_checkpoints(Best("reward"), "run", SAVED)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "newest"},
        {"checkpoint": "tinker://run/sampler_weights/x"},
        {"checkpoint": 3},
        {"max_attempts": 0},
        {"max_attempts": 2.5},
        {"max_attempts": True},
        {"backoff_s": 0},
        {"max_backoff_s": "60"},
        {"poll_interval_s": -1},
        {"unreachable_after_s": float("nan")},
        {"on_recovery": "print"},
        {"on_failure": 1},
    ],
    ids=str,
)
def test_a_wrong_setting_is_rejected_with_an_error_that_names_it(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=next(iter(options))):
        RecoveryPolicy(**options)


def test_an_unknown_setting_is_rejected() -> None:
    with pytest.raises(TypeError, match="retry_interval"):
        RecoveryPolicy(retry_interval=3)  # type: ignore[call-arg]


def test_the_back_off_is_that_of_the_one_retry_policy() -> None:
    retries = RecoveryPolicy(max_attempts=6).retries
    waits = [decide(NoReply(), n, 1e6, retries, rng=lambda: 0.0) for n in range(6)]
    assert waits == [Retry(5.0), Retry(10.0), Retry(20.0), Retry(40.0), Retry(60.0), GiveUp()]


def status(code: int) -> errors.APIStatusError:
    return errors.status_error(errors.HttpResponse(code), None)


def run(*, corrupted: bool) -> types.TrainingRun:
    return types.TrainingRun(
        training_run_id="run",
        base_model="toy",
        model_owner="me",
        is_lora=True,
        last_request_time=datetime.now(UTC),
        corrupted=corrupted,
    )


@pytest.mark.parametrize(
    ("answer", "silent_s", "expected"),
    [
        (run(corrupted=False), 999, None),
        (run(corrupted=True), 0, "corrupted"),
        (status(404), 0, "lost"),
        (status(410), 0, "lost"),
        (errors.APIConnectionError(), 10, None),
        (errors.APIConnectionError(), 300, "unreachable"),
        (errors.APITimeoutError(), 300, "unreachable"),
        (TimeoutError(), 300, "unreachable"),
        (status(503), 300, "unreachable"),
        (status(503), 10, None),
        (status(401), 999, None),
        (status(403), 999, None),
    ],
)
def test_an_answer_says_how_a_run_is(answer: Any, silent_s: float, expected: str | None) -> None:
    assert condition_of(answer, silent_s, unreachable_after_s=300) == expected


def failed(category: errors.RequestErrorCategory) -> errors.RequestFailedError:
    return errors.RequestFailedError("why", "r1", category)


@pytest.mark.parametrize(
    ("error", "interruption", "outcome"),
    [
        (errors.APIConnectionError(), True, NoReply()),
        (errors.APITimeoutError(), True, NoReply()),
        (errors.ResultExpiredError("late", "r1"), True, NoReply()),
        (failed(errors.RequestErrorCategory.Server), True, NoReply()),
        (failed(errors.RequestErrorCategory.Unknown), True, NoReply()),
        (failed(errors.RequestErrorCategory.User), False, GiveUp()),
        (status(503), True, ErrorStatus(503)),
        (status(429), True, ErrorStatus(429)),
        (status(404), False, ErrorStatus(404)),
        (status(401), False, ErrorStatus(401)),
        (errors.RecoveryError("none", "run"), False, GiveUp()),
        (ValueError("mine"), False, GiveUp()),
        (KeyboardInterrupt(), False, GiveUp()),
    ],
    ids=repr,
)
def test_errors_are_sorted(error: BaseException, interruption: bool, outcome: Any) -> None:
    assert is_interruption(error) is interruption
    assert outcome_of(error) == outcome
