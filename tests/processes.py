"""Waiting for processes that are not children of the tests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def wait_ended(processes: Sequence[psutil.Process], timeout_s: float) -> Sequence[psutil.Process]:
    """Wait until processes have ended; returns those that have not after ``timeout_s``.

    ``psutil.wait_procs`` raises ``FileNotFoundError`` for a process that is being reaped, on recent kernels.
    """
    deadline = time.monotonic() + timeout_s
    while (alive := [each for each in processes if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
