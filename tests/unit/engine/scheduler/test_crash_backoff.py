from __future__ import annotations

from tinkex.engine.scheduler.crash_backoff import FORGET_AFTER_S, MAX_DELAY_S, MIN_DELAY_S, CrashBackoff


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_up_to_a_limit() -> None:
    backoff = CrashBackoff[str](clock=Clock())
    delays = []
    for _ in range(60):
        backoff.record("ada")
        delays.append(backoff.wait_s("ada"))
    assert delays[:4] == [MIN_DELAY_S, 2 * MIN_DELAY_S, 4 * MIN_DELAY_S, 8 * MIN_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    assert backoff.num_crashes("ada") == 60


def test_a_party_without_crashes_never_waits() -> None:
    backoff = CrashBackoff[str](clock=Clock())
    backoff.record("ada")
    assert backoff.wait_s("bob") == backoff.num_crashes("bob") == 0
    assert backoff.delayed == {"ada"}


def test_a_delay_ends_and_the_next_one_is_longer() -> None:
    clock = Clock()
    backoff = CrashBackoff[str](clock)
    backoff.record("ada")
    clock.now = MIN_DELAY_S
    assert backoff.delayed == set()
    assert backoff.next_deadline is None
    backoff.record("ada")
    assert backoff.next_deadline == clock.now + 2 * MIN_DELAY_S


def test_crashes_are_forgotten_after_a_long_time_without_one() -> None:
    clock = Clock()
    backoff = CrashBackoff[str](clock)
    for _ in range(5):
        backoff.record("ada")
    clock.now = FORGET_AFTER_S + 1
    backoff.record("ada")
    assert backoff.wait_s("ada") == MIN_DELAY_S
