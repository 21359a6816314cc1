from __future__ import annotations

import pickle

import pytest

from tinkex import errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (402, errors.BillingError),
        (403, errors.PermissionDeniedError),
        (404, errors.NotFoundError),
        (409, errors.ConflictError),
        (418, errors.APIStatusError),
        (422, errors.UnprocessableEntityError),
        (429, errors.RateLimitError),
        (500, errors.InternalServerError),
        (503, errors.InternalServerError),
    ],
)
def test_a_status_becomes_its_error(status: int, kind: type) -> None:
    error = errors.status_error(errors.HttpResponse(status), {"detail": "why"})
    assert type(error) is kind
    assert error.status_code == status
    assert str(error) == f"Error code: {status} - {{'detail': 'why'}}"


def test_errors_survive_pickling() -> None:
    request = errors.HttpRequest("POST", "http://host/path")
    for error in (
        errors.status_error(errors.HttpResponse(404, request=request), None),
        errors.APITimeoutError(request),
        errors.APIConnectionError(request, "gone"),
        errors.RequestFailedError("bad", "r1", errors.RequestErrorCategory.User),
        errors.ResultExpiredError("late", "r1"),
        errors.APIResponseValidationError(None, message="odd"),
        errors.InvalidInput("datum 3 is empty"),
    ):
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__


def test_every_error_has_one_root_and_user_mistakes_are_value_errors() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning):
            assert issubclass(kind, errors.TinkexError), name
    assert errors.TinkerError is errors.TinkexError
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.ConfigError, ValueError)
