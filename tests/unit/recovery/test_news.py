"""Recovery is reported: as events, which the usual sink turns into warnings a user can act on, and as one typed error."""

from __future__ import annotations

import logging
import pickle

import pytest

from tinkex.errors import RecoveryError, TinkexError
from tinkex.observability.events import (
    CallbackFailed,
    Event,
    LogSink,
    RecoveryFailed,
    RecoveryStarted,
    RunCheckFailed,
    RunRecovered,
    RunUnhealthy,
)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (RunUnhealthy("run-1", "lost", "it is gone"), "run run-1 is lost: it is gone"),
        (RunRecovered("run-1", "run-2", "tinker://p", 0), "run run-1 continues as run-2, from tinker://p"),
        (RecoveryFailed("run-1", 0, "full", 5.0), "could not be restarted: full; next attempt in 5.0 s"),
        (RecoveryFailed("run-1", 2, "full", None), "could not be restarted: full; giving up"),
        (CallbackFailed("on_recovery", "ValueError: x"), "on_recovery raised ValueError: x"),
    ],
)
def test_what_a_user_should_know_is_a_warning(
    event: Event, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tinkex"):
        LogSink().emit(event)
    assert text in caplog.text


@pytest.mark.parametrize(
    "event", [RecoveryStarted("run-1", 0, "tinker://p"), RunCheckFailed("run-1", "away")]
)
def test_the_rest_is_for_debugging(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tinkex"):
        LogSink().emit(event)
    assert not caplog.text
    with caplog.at_level(logging.DEBUG, logger="tinkex"):
        LogSink().emit(event)
    assert "run-1" in caplog.text


def test_the_error_is_typed_and_travels() -> None:
    error = pickle.loads(pickle.dumps(RecoveryError("no checkpoint", "run-1")))
    assert isinstance(error, TinkexError)
    assert (str(error), error.run_id) == ("no checkpoint", "run-1")
