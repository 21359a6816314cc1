"""Every error this package raises, in one tree.

::

    TinkexError (= TinkerError)
    ├── APIError                          a call to a server went wrong
    │   ├── APIStatusError                it answered with a 4xx or 5xx      .status_code
    │   │   ├── BadRequestError 400       ├── NotFoundError 404
    │   │   ├── AuthenticationError 401   ├── ConflictError 409
    │   │   ├── BillingError 402          ├── UnprocessableEntityError 422
    │   │   ├── PermissionDeniedError 403 ├── RateLimitError 429
    │   │   ├── PayloadTooLargeError 413
    │   │   └── InternalServerError ≥500
    │   │       └── InsufficientStorageError 507
    │   ├── APIResponseValidationError    it answered with something we cannot read
    │   └── APIConnectionError            it did not answer
    │       ├── APITimeoutError           …in time
    │       ├── CircuitOpenError          it was not asked, for it keeps failing   .retry_after_s
    │       └── StreamInterruptedError    it broke off in the middle         .received
    ├── RequestFailedError                an accepted operation failed       .request_id .category
    ├── ResultExpiredError                the result of an operation is gone from the server
    ├── ConfigError (ValueError)          a setting is missing or wrong
    │   └── MissingApiKeyError            there is no API key, and the server needs one
    ├── SetupError                        this machine lacks something: a model, an extra, a port
    ├── ClosedError (RuntimeError)        the client was closed before this call
    ├── RecoveryError                     a run could not be restarted       .run_id
    ├── UploadError (ValueError)          a file to be sent cannot be read, or not again
    └── EngineError                       raised inside the engine           .status .category
        ├── InvalidInput 400 (ValueError)     ├── Expired 410
        ├── Unauthorized 401                  ├── TooLarge 413
        ├── NotAllowed 403                    ├── NumericalError 422
        ├── UnknownObject 404 (LookupError)   ├── Busy 429
        ├── Conflict 409                      ├── EngineFailure 500
        ├── Unsupported 501                   ├── ModelUnavailable 503
        ├── NoRoom 507                        └── StorageUnavailable 503
    ExperimentalWarning (FutureWarning)

Engine errors are turned into HTTP answers in one place, ``engine/api/errors.py``, and come back to the
user of the client as an ``APIStatusError`` (refused at once) or a ``RequestFailedError`` (failed later).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Busy",
    "CircuitOpenError",
    "ClosedError",
    "ConfigError",
    "Conflict",
    "ConflictError",
    "EngineError",
    "EngineFailure",
    "ExperimentalWarning",
    "Expired",
    "HttpRequest",
    "HttpResponse",
    "InsufficientStorageError",
    "InternalServerError",
    "InvalidInput",
    "MissingApiKeyError",
    "ModelUnavailable",
    "NoRoom",
    "NotAllowed",
    "NotFoundError",
    "NumericalError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "RateLimitError",
    "RecoveryError",
    "RequestErrorCategory",
    "RequestFailedError",
    "ResultExpiredError",
    "SetupError",
    "StorageUnavailable",
    "StreamInterruptedError",
    "TinkerError",
    "TinkexError",
    "TooLarge",
    "Unauthorized",
    "UnknownObject",
    "UnprocessableEntityError",
    "Unsupported",
    "UploadError",
    "status_error",
]


class RequestErrorCategory(StrEnum):
    """Whose fault a failed operation was, as the server sees it."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def parse(cls, text: object) -> RequestErrorCategory:
        """Reads the wire value; anything unknown is ``Unknown``.

        >>> RequestErrorCategory.parse("user").name
        'User'
        >>> RequestErrorCategory.parse("gremlins").name
        'Unknown'
        """
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            return cls.Unknown


@dataclass(frozen=True)
class HttpRequest:
    """The request an error is about: method and URL, never headers or body (they may hold secrets)."""

    method: str
    url: str
    endpoint: str | None = None
    """The name of the call in the endpoint table; None where the request is none of the protocol's."""


@dataclass(frozen=True)
class HttpResponse:
    """The answer an error is about."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    request: HttpRequest | None = None


class TinkexError(Exception):
    """The root of every error raised by this package.

    >>> issubclass(RateLimitError, TinkexError)
    True
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (type(self), self.args, self.__dict__)


TinkerError = TinkexError


class APIError(TinkexError):
    """A call to a server went wrong."""

    message: str
    request: HttpRequest | None
    body: object | None

    def __init__(
        self, message: str, request: HttpRequest | None = None, *, body: object | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIStatusError(APIError):
    """The server answered with an error status.

    ``response`` is what the answer was: ours, or in your tests anything with a ``status_code``, such as the
    response object of an HTTP library.

    >>> RateLimitError("slow down", response=HttpResponse(429), body=None).status_code
    429
    """

    response: HttpResponse
    status_code: int

    def __init__(self, message: str, response: HttpResponse, body: object | None = None) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = response.status_code


class BadRequestError(APIStatusError):
    """400: the request itself is wrong; the message says how."""

    status_code = 400


class AuthenticationError(APIStatusError):
    """401: the API key is missing, unknown or revoked."""

    status_code = 401


class BillingError(APIStatusError):
    """402: the account cannot pay for this call."""

    status_code = 402


class PermissionDeniedError(APIStatusError):
    """403: the key is valid but may not do this."""

    status_code = 403


class NotFoundError(APIStatusError):
    """404: no such object, or not one this key can see."""

    status_code = 404


class ConflictError(APIStatusError):
    """409: the object is in a state that does not allow this."""

    status_code = 409


class PayloadTooLargeError(APIStatusError):
    """413: what was sent is larger than this server takes; the message says how large it may be."""

    status_code = 413


class UnprocessableEntityError(APIStatusError):
    """422: well-formed, but the values make no sense together."""

    status_code = 422


class RateLimitError(APIStatusError):
    """429: too many requests; the client backs off by itself before raising this."""

    status_code = 429


class InternalServerError(APIStatusError):
    """5xx: the server failed."""


class InsufficientStorageError(InternalServerError):
    """507: there is no room for what is to be kept; it is not tried again before something is deleted."""

    status_code = 507


class APIResponseValidationError(APIError):
    """The server answered with something that does not follow the protocol."""

    response: HttpResponse | None
    status_code: int

    def __init__(
        self, response: HttpResponse | None, body: object | None = None, message: str | None = None
    ) -> None:
        message = message or "The server's answer does not follow the protocol."
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = response.status_code if response is not None else 0


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke."""

    def __init__(self, request: HttpRequest | None = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError):
    """The server did not answer in time."""

    def __init__(self, request: HttpRequest | None = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class CircuitOpenError(APIConnectionError):
    """A call was not sent, because the server has failed several times in a row; ``retry_after_s`` says when one will be."""

    retry_after_s: float

    def __init__(
        self,
        request: HttpRequest | None = None,
        message: str = "The server keeps failing.",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(request, message)
        self.retry_after_s = retry_after_s


class StreamInterruptedError(APIConnectionError):
    """A stream broke off after its first token; ``received`` is what had come until then.

    It is not repeated by itself, because the tokens were handed out already: sample again, with what was
    received as part of the prompt if it is to go on from there.
    """

    received: Sequence[Any]

    def __init__(
        self,
        request: HttpRequest | None = None,
        message: str = "The stream broke off.",
        received: Sequence[Any] = (),
    ) -> None:
        super().__init__(request, message)
        self.received = received


class RequestFailedError(TinkexError):
    """An operation was accepted and failed later; ``category`` says whose fault it was."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category


class ResultExpiredError(TinkexError):
    """The server no longer holds the result of this operation; submit it again."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class ConfigError(TinkexError, ValueError):
    """A setting is missing or wrong; the message names it and where it came from."""


class MissingApiKeyError(ConfigError):
    """No API key was given or stored, and the server needs one; the message names every way to give it."""


class SetupError(TinkexError):
    """This machine lacks something the call needs; the message says how to provide it."""


class ClosedError(TinkexError, RuntimeError):
    """The client was closed before this call."""


class RecoveryError(TinkexError):
    """A run could not be restarted from a checkpoint; ``run_id`` is the run, the cause the last error."""

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(message)
        self.run_id = run_id


class UploadError(TinkexError, ValueError):
    """A file that is to be sent cannot be read, or cannot be read again; the message names it."""


class EngineError(TinkexError):
    """Raised inside the engine; ``status`` and ``category`` say how it leaves over the wire."""

    status: ClassVar[int] = 500
    category: ClassVar[RequestErrorCategory] = RequestErrorCategory.Server


class InvalidInput(EngineError, ValueError):
    """The caller's input is wrong; nothing was executed."""

    status = 400
    category = RequestErrorCategory.User


class Unauthorized(EngineError):
    """No key, or one this server does not know."""

    status = 401
    category = RequestErrorCategory.User


class NotAllowed(EngineError):
    """The object belongs to someone else."""

    status = 403
    category = RequestErrorCategory.User


class UnknownObject(EngineError, LookupError):
    """No model, checkpoint, session, sampler or request of that name."""

    status = 404
    category = RequestErrorCategory.User


class Conflict(EngineError):
    """The object is in a state that does not allow this."""

    status = 409
    category = RequestErrorCategory.User


class Expired(EngineError):
    """It was here, and its time is over."""

    status = 410
    category = RequestErrorCategory.User


class TooLarge(EngineError):
    """The request exceeds a stated limit."""

    status = 413
    category = RequestErrorCategory.User


class NumericalError(EngineError):
    """A loss or gradient is not finite; the weights stay as they were."""

    status = 422
    category = RequestErrorCategory.User


class Busy(EngineError):
    """The engine has no room for this now; try again later."""

    status = 429
    retry_after_s: float | None = None


class OverQuota(Busy):
    """This user has used up their share, while others may go on; try again when there is room in it."""


class EngineFailure(EngineError):
    """The engine failed at something the caller did right."""

    status = 500


class Unsupported(EngineError):
    """A part of the protocol this server refuses by name."""

    status = 501
    category = RequestErrorCategory.User


class ModelUnavailable(EngineError):
    """The model is not in memory: still loading, or lost."""

    status = 503


class StorageUnavailable(EngineError):
    """The engine cannot write down what it would promise: disk full, database locked or damaged."""

    status = 503


class NoRoom(EngineError):
    """What is to be kept is more than there is room for; it is refused until something is deleted."""

    status = 507
    category = RequestErrorCategory.User


class ExperimentalWarning(FutureWarning):
    """The call works but may change."""


STATUS_ERRORS: Mapping[int, type[APIStatusError]] = {
    kind.status_code: kind for kind in (
        BadRequestError, AuthenticationError, BillingError, PermissionDeniedError, NotFoundError, ConflictError,
        PayloadTooLargeError, UnprocessableEntityError, RateLimitError, InsufficientStorageError,
    )
}  # fmt: skip


def status_error(response: HttpResponse, body: object | None) -> APIStatusError:
    """The typed error for an answer with an error status.

    >>> status_error(HttpResponse(404), {"detail": "no such run"})
    NotFoundError("Error code: 404 - {'detail': 'no such run'}")
    """
    status = response.status_code
    kind = STATUS_ERRORS.get(status, InternalServerError if status >= 500 else APIStatusError)
    shown = body if body is not None else response.text
    return kind(f"Error code: {status} - {shown}", response, body)


def _rebuild(kind: type[TinkexError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkexError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
