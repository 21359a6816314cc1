"""Errors built the way official-SDK programs build them in their tests: same fields, text and pickles."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import tinker

import tinkex

REQUEST = httpx.Request("POST", "http://host/api/v1/asample")
STATUS_ERRORS = sorted(
    name
    for name, kind in inspect.getmembers(tinker, inspect.isclass)
    if issubclass(kind, tinker.APIStatusError)
)


NAMES = ("message", "status_code", "body", "request_id", "category", "args")


def fields(error: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(error, name) for name in names} | {
        "text": str(error),
        "url": str(getattr(getattr(error, "request", None), "url", None)),
    }


def compare(build: Any) -> None:
    theirs, ours = build(tinker), build(tinkex)
    names = [name for name in NAMES if hasattr(theirs, name)]  # ours have more
    assert fields(ours, names) == fields(theirs, names)
    assert fields(pickle.loads(pickle.dumps(ours)), names) == fields(theirs, names)
    assert isinstance(ours, tinkex.TinkerError)
    assert [k.__name__ for k in type(theirs).__mro__ if k.__name__.endswith("Error")][:-1] == [
        k.__name__ for k in type(ours).__mro__ if k.__name__.endswith("Error")
    ][:-1]


@pytest.mark.parametrize("name", STATUS_ERRORS)
@pytest.mark.parametrize("status", [400, 404, 429, 503])
def test_a_status_error(name: str, status: int) -> None:
    response = httpx.Response(status, request=REQUEST, json={"detail": "no"})
    compare(lambda package: getattr(package, name)("no", response=response, body={"detail": "no"}))
    compare(lambda package: getattr(package, name)("no", response, None))
    assert getattr(getattr(tinker, name), "status_code", None) == getattr(
        getattr(tinkex, name), "status_code", None
    )


def test_other_errors() -> None:
    response = httpx.Response(200, request=REQUEST)
    compare(lambda package: package.APIError("broken", REQUEST, body=None))
    compare(lambda package: package.APIConnectionError(request=REQUEST))
    compare(lambda package: package.APIConnectionError(message="reset", request=REQUEST))
    compare(lambda package: package.APITimeoutError(REQUEST))
    compare(lambda package: package.APITimeoutError(request=REQUEST))
    compare(lambda package: package.APIResponseValidationError(response, {"a": 1}, message="odd"))
    compare(
        lambda package: package.RequestFailedError(
            "failed", request_id="r1", category=package.types.RequestErrorCategory.User
        )
    )


def test_warnings_are_future_warnings() -> None:
    assert issubclass(tinkex.ExperimentalWarning, FutureWarning)


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ((), {"connect": 1, "read": 2, "write": 3, "pool": 4}),
        ((5.0,), {}),
        ((None,), {"connect": 5}),
        ((60.0,), {"connect": 5.0}),
        (((1, 2, 3, 4),), {}),
    ],
)
def test_timeouts_hold_the_same_limits(arguments: Any, limits: Any) -> None:
    theirs, ours = tinker.Timeout(*arguments, **limits), tinkex.Timeout(*arguments, **limits)
    assert ours.as_dict() == theirs.as_dict()
    assert ours == tinkex.Timeout(ours)
    assert hash(ours) == hash(tinkex.Timeout(ours))


def test_a_timeout_needs_a_limit() -> None:
    for package in (tinker, tinkex):
        with pytest.raises(ValueError):
            package.Timeout(connect=5)


def test_request_options_have_the_same_keys() -> None:
    assert set(tinkex.RequestOptions.__annotations__) == set(tinker.RequestOptions.__annotations__)
