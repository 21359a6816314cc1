"""Every error this package raises, in one tree.

::

    TinkexError (= TinkerError)
    ├── APIError                          a call to a server failed
    │   ├── APIStatusError                the server responded with 4xx or 5xx    .status_code
    │   │   ├── BadRequestError 400       ├── NotFoundError 404
    │   │   ├── AuthenticationError 401   ├── ConflictError 409
    │   │   ├── BillingError 402          ├── UnprocessableEntityError 422
    │   │   ├── PermissionDeniedError 403 ├── RateLimitError 429
    │   │   ├── PayloadTooLargeError 413
    │   │   └── InternalServerError ≥500
    │   │       └── InsufficientStorageError 507
    │   ├── APIResponseValidationError    the response does not follow the protocol
    │   └── APIConnectionError            there was no response
    │       ├── APITimeoutError           …in time
    │       ├── CircuitOpenError          the call was not sent: the server keeps failing    .retry_after_s
    │       └── StreamInterruptedError    the stream ended early             .received
    ├── RequestFailedError                an accepted operation failed       .request_id .category
    ├── ResultExpiredError                the server has deleted the result of an operation
    ├── ConfigError (ValueError)          a setting is missing or invalid
    │   └── MissingApiKeyError            there is no API key, and the server needs one
    ├── SetupError                        something is missing on this machine: a model, an extra, a port
    ├── ClosedError (RuntimeError)        the client was closed before this call
    ├── LoopStoppedError (RuntimeError)   the background event loop stopped during the call
    ├── RecoveryError                     a run could not be restarted       .run_id
    ├── UploadError (ValueError)          a file to upload cannot be read, or not a second time
    └── EngineError                       raised inside the engine           .status .category
        ├── InvalidInput 400 (ValueError)     ├── Expired 410
        ├── Unauthorized 401                  ├── TooLarge 413
        ├── NotAllowed 403                    ├── NumericalError 422
        ├── UnknownObject 404 (LookupError)   ├── Busy 429
        ├── Conflict 409                      ├── EngineFailure 500
        ├── Unsupported 501                   ├── ModelUnavailable 503
        ├── NoRoom 507                        └── StorageUnavailable 503
    ExperimentalWarning (FutureWarning)

``engine/api/errors.py`` turns engine errors into HTTP responses. The client raises them as an ``APIStatusError``
(rejected immediately) or a ``RequestFailedError`` (failed later).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tinkex.errors.exchange import HttpRequest, HttpResponse, RequestErrorCategory
from tinkex.errors.transience import is_transient, retry_after

__all__ = [
    "APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError",
    "AuthenticationError", "BadRequestError", "BillingError", "Busy", "CircuitOpenError", "ClosedError",
    "ConfigError", "Conflict", "ConflictError", "EngineError", "EngineFailure", "ExperimentalWarning", "Expired",
    "HttpRequest", "HttpResponse", "InsufficientStorageError", "InternalServerError", "InvalidInput",
    "LoopStoppedError", "MissingApiKeyError", "ModelUnavailable", "NoRoom", "NotAllowed", "NotFoundError", "NumericalError",
    "PayloadTooLargeError", "PermissionDeniedError", "RateLimitError", "RecoveryError", "RequestErrorCategory",
    "RequestFailedError", "ResultExpiredError", "SetupError", "StorageUnavailable", "StreamInterruptedError",
    "TinkerError", "TinkexError", "TooLarge", "Unauthorized", "UnknownObject", "UnprocessableEntityError",
    "Unsupported", "UploadError", "status_error",
]  # fmt: skip


class TinkexError(Exception):
    """The root of every error raised by this package.

    >>> issubclass(RateLimitError, TinkexError)
    True
    """

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later, unchanged; ``tinkex.with_retry`` retries these."""
        return False

    @property
    def retry_after_ms(self) -> int | None:
        """The wait that the server asks for before the next attempt, in milliseconds; None if it asks for none."""
        return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (type(self), self.args, self.__dict__)


TinkerError = TinkexError


class APIError(TinkexError):
    """A call to a server failed."""

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
    """The server responded with an error status.

    ``response`` is an ``HttpResponse``, or in your tests any object with a ``status_code``, such as the response of
    an HTTP library.

    >>> RateLimitError("slow down", response=HttpResponse(429), body=None).status_code
    429
    """

    response: HttpResponse
    status_code: int

    def __init__(self, message: str, response: HttpResponse, body: object | None = None) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = response.status_code

    @property
    def retryable(self) -> bool:
        """Whether the status is temporary (408, 409, 429, 5xx except 501 and 507), and the server does not say otherwise.

        >>> RateLimitError("slow down", HttpResponse(429, {"retry-after": "2"})).retry_after_ms
        2000
        """
        override = str(self._headers.get("x-should-retry", "")).strip().lower()
        if override in {"true", "false"}:
            return override == "true"
        category = self.body.get("category") if isinstance(self.body, Mapping) else None
        return is_transient(self.status_code) and (
            category is None or RequestErrorCategory.parse(category).retryable
        )

    @property
    def retry_after_ms(self) -> int | None:
        """The wait of the ``retry-after`` header, or of the body; None if the server asks for none."""
        seconds = retry_after(self._headers, float("inf"))
        if seconds is not None:
            return round(seconds * 1000)
        given = self.body.get("retry_after_ms") if isinstance(self.body, Mapping) else None
        return given if isinstance(given, int) and given >= 0 else None

    @property
    def category(self) -> RequestErrorCategory:
        """Who is at fault: what the body says, else the user for 4xx except 408, 409, 410 and 429, and the server for 5xx."""
        return RequestErrorCategory.of_reply(self.status_code, self.body)

    @property
    def _headers(self) -> Mapping[str, str]:
        headers: Mapping[str, str] = getattr(self.response, "headers", None) or {}
        return {name.lower(): value for name, value in headers.items()}


class BadRequestError(APIStatusError):
    """400: the request is invalid; the message gives the reason."""

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
    """413: the request exceeds a size limit of the server; the message states the limit."""

    status_code = 413


class UnprocessableEntityError(APIStatusError):
    """422: well-formed, but the values are inconsistent."""

    status_code = 422


class RateLimitError(APIStatusError):
    """429: too many requests; the client backs off by itself before raising this."""

    status_code = 429


class InternalServerError(APIStatusError):
    """5xx: the server failed."""


class InsufficientStorageError(InternalServerError):
    """507: the storage is full; the client does not retry, delete something first."""

    status_code = 507


class APIResponseValidationError(APIError):
    """The server's response does not follow the protocol."""

    response: HttpResponse | None
    status_code: int

    def __init__(
        self, response: HttpResponse | None, body: object | None = None, message: str | None = None
    ) -> None:
        message = message or "The server's response does not follow the protocol."
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = response.status_code if response is not None else 0


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke."""

    @property
    def retryable(self) -> bool:
        """True: the next attempt may reach the server."""
        return True

    def __init__(self, request: HttpRequest | None = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError):
    """The server did not respond in time."""

    def __init__(self, request: HttpRequest | None = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class CircuitOpenError(APIConnectionError):
    """The circuit breaker blocked a call, because the server keeps failing; the next call is sent after ``retry_after_s``."""

    retry_after_s: float

    def __init__(
        self,
        request: HttpRequest | None = None,
        message: str = "The server keeps failing.",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(request, message)
        self.retry_after_s = retry_after_s

    @property
    def retry_after_ms(self) -> int:
        """When the next call is sent, in milliseconds from the error."""
        return round(self.retry_after_s * 1000)


class StreamInterruptedError(APIConnectionError):
    """A stream ended early, after its first token; ``received`` holds the tokens until then.

    The client does not retry it, because the caller has already received tokens. To continue from there, sample
    again with the received tokens appended to the prompt.
    """

    received: Sequence[Any]

    def __init__(
        self,
        request: HttpRequest | None = None,
        message: str = "The stream ended early.",
        received: Sequence[Any] = (),
    ) -> None:
        super().__init__(request, message)
        self.received = received


class RequestFailedError(TinkexError):
    """An operation was accepted and failed later; ``category`` says whether the user or the server is at fault."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category

    @property
    def retryable(self) -> bool:
        """Whether the server is at fault, so that the operation may succeed when it is submitted again."""
        return self.category.retryable


class ResultExpiredError(TinkexError):
    """The server has deleted the result of this operation; submit it again."""

    @property
    def retryable(self) -> bool:
        """True: the operation may be submitted again."""
        return True

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class ConfigError(TinkexError, ValueError):
    """A setting is missing or invalid; the message names it and its source."""


class MissingApiKeyError(ConfigError):
    """No API key was given or stored, and the server needs one; the message names every way to give it."""


class SetupError(TinkexError):
    """Something the call needs is missing on this machine; the message says how to install it."""


class ClosedError(TinkexError, RuntimeError):
    """The client was closed before this call."""


class LoopStoppedError(TinkexError, RuntimeError):
    """The client's background event loop stopped while the call was in flight; the next call starts a new loop."""


class RecoveryError(TinkexError):
    """A run could not be restarted from a checkpoint; ``run_id`` is the run, ``__cause__`` the last error."""

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(message)
        self.run_id = run_id


class UploadError(TinkexError, ValueError):
    """A file to upload cannot be read, or not a second time; the message names it."""


class EngineError(TinkexError):
    """Raised inside the engine; ``status`` and ``category`` are its form on the wire."""

    status: ClassVar[int] = 500
    category: ClassVar[RequestErrorCategory] = RequestErrorCategory.Server

    @property
    def retryable(self) -> bool:
        """Whether the client retries it."""
        return is_transient(self.status)


class InvalidInput(EngineError, ValueError):
    """The input is invalid; nothing was executed."""

    status = 400
    category = RequestErrorCategory.User


class Unauthorized(EngineError):
    """The API key is missing or unknown."""

    status = 401
    category = RequestErrorCategory.User


class NotAllowed(EngineError):
    """The object belongs to another user."""

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
    """The object has expired and is deleted."""

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
    """The engine has no capacity for this request now; try again later."""

    status = 429
    retry_after_s: float | None = None


class OverQuota(Busy):
    """This user's quota is exhausted; try again when some of it is free."""


class EngineFailure(EngineError):
    """The engine failed on a valid request."""

    status = 500


class Unsupported(EngineError):
    """A part of the protocol that this server does not support."""

    status = 501
    category = RequestErrorCategory.User


class ModelUnavailable(EngineError):
    """The model is not in memory: still loading, or lost."""

    status = 503


class StorageUnavailable(EngineError):
    """The engine cannot record the request: disk full, database locked or corrupt."""

    status = 503


class NoRoom(EngineError):
    """The storage quota or disk budget is exhausted; delete something first."""

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
    """Returns the typed error for a response with an error status.

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
