"""Generates the page of errors from the classes in ``tinkex.errors``, with cause and remedy of each."""

from __future__ import annotations

import inspect
import re

from tinkex import errors
from tinkex._transport.retry import is_transient
from tinkex.engine.api.errors import STATUSES
from tinkex.errors import APIStatusError, EngineError, HttpResponse, TinkexError, status_error

ADVICE: dict[str, tuple[str, str]] = {
    # raised by clients
    "APIError": (
        "A request failed; the subclasses below say how.",
        "Catch the subclass you can handle. `error.request` has the method and URL, `error.body` the response body.",
    ),
    "APIStatusError": (
        "The server returned an error status.",
        "Read the server's message. See also `error.status_code` and `error.response.headers`.",
    ),
    "BadRequestError": (
        "The request is invalid: a wrong shape, an unknown name, an option that this server rejects.",
        "Change what the message names. Nothing was executed.",
    ),
    "AuthenticationError": (
        "The request had no API key, or one that is unknown or revoked.",
        "Set `TINKER_API_KEY`, or run `tinkex auth login`. Create keys of your own server with `tinkex keys create`.",
    ),
    "BillingError": (
        "The hosted service requires a payment. Your own server never returns this.",
        "Settle it with the service. If the service sends a delay, the client waits before it raises this.",
    ),
    "PermissionDeniedError": (
        "The key is valid, but the object belongs to another user, or only the operator may make the call.",
        "Ask the owner to publish the object, or use the operator's key.",
    ),
    "NotFoundError": (
        "No object of that name exists, or this key may not see it.",
        "List objects with `tinkex run list` and `tinkex checkpoint list`.",
    ),
    "ConflictError": (
        "The state of the object does not allow the request, also after retries.",
        "Check the object, for example with `tinkex run info`, and change its state first.",
    ),
    "PayloadTooLargeError": (
        "A body or a file is larger than the server's limit.",
        "Send less per request, or ask the operator to raise `max_body_bytes` or `max_asset_bytes`.",
    ),
    "UnprocessableEntityError": (
        "The request was parsed, but its values are inconsistent.",
        "Change what the message names.",
    ),
    "RateLimitError": (
        "The server is at capacity, or your quota is used up, also after retries.",
        "Send fewer concurrent requests, close sessions, unload runs or delete checkpoints; the message names the limit.",
    ),
    "InternalServerError": (
        "The server failed, also after retries.",
        "Check its log and `GET /api/v1/healthz`. Accepted operations are in its journal and run when it is back.",
    ),
    "InsufficientStorageError": (
        "The data exceeds your disk quota, or the server's disk is full.",
        "Delete images or checkpoints, or give them a TTL; then retry.",
    ),
    "APIResponseValidationError": (
        "The response does not follow the protocol: a proxy's page, another program on that port, a much newer server.",
        "Check `base_url`. `error.response.text` has the response.",
    ),
    "APIConnectionError": (
        "The server was unreachable, or the connection was lost, also after retries.",
        "Check `base_url`, the server and proxies, for example with `tinkex doctor`.",
    ),
    "APITimeoutError": (
        "The server did not respond within `timeout`.",
        "Raise `timeout` for slow networks, or check whether the server is overloaded.",
    ),
    "CircuitOpenError": (
        "Consecutive requests to this endpoint, or connections to this server, failed, so a circuit breaker is open; this request was not sent.",
        "Retry after `error.retry_after_s`; see [retries and circuit breaker](guides/resilience.md).",
    ),
    "StreamInterruptedError": (
        "A stream was lost after its first token, so it cannot be retried transparently.",
        "Sample again. To continue, append the tokens in `error.received` to the prompt.",
    ),
    "RequestFailedError": (
        "The server accepted an operation, and its execution failed. `error.category` names the cause.",
        "`User`: change the input. `Server` or `Unknown`: check the server's log, and submit it again.",
    ),
    "ResultExpiredError": (
        "A result was fetched after its retention (a day, or an hour after it was first fetched).",
        "Submit the operation again. On your own server, raise `result_retention_s`.",
    ),
    "ConfigError": (
        "A setting is missing or invalid; the message names it and its source.",
        "Correct it there; see [all settings](config.md).",
    ),
    "MissingApiKeyError": (
        "The server needs an API key, and none was given, set or stored.",
        'Run `tinkex auth login`, set `TINKER_API_KEY`, or use `base_url="local"`, which needs no key.',
    ),
    "SetupError": (
        "This machine lacks something: an extra, a model, disk space, a free port.",
        "Follow the message. `tinkex doctor` finds these problems in advance.",
    ),
    "ClosedError": (
        "A client was used after `close`, or after its `with` block.",
        "Fetch results inside the block, or create a new client.",
    ),
    "LoopStoppedError": (
        "The event loop that all clients of the process share was stopped, by a callback for example, while the call was in flight.",
        "Make the call again: it starts a new loop, and heartbeats resume. Whether the server executed the first one is unknown.",
    ),
    "RecoveryError": (
        "A lost run could not be restarted from any checkpoint; `error.__cause__` is the last failure.",
        "Start the program again: it opens a new session and continues from its checkpoints. See [recovery](guides/recovery.md).",
    ),
    "UploadError": (
        "A file cannot be read, changed during the upload, or cannot be read a second time.",
        "Pass the path of a regular file, or a file opened with `rb`.",
    ),
    # raised by the engine
    "EngineError": (
        "The base class of errors inside the engine.",
        "Clients raise one of the classes above instead.",
    ),
    "InvalidInput": (
        "The input is invalid: an unknown token, a missing loss input, a misspelt option, a checkpoint name in use.",
        "Change what the message names. Nothing was executed, and the run continues.",
    ),
    "Unauthorized": (
        "No API key, or an unknown one.",
        "Send a valid key; see [sharing a server](guides/sharing.md).",
    ),
    "NotAllowed": (
        "The object belongs to another user, or only the operator may make the call.",
        "Ask the owner, or use the operator's key.",
    ),
    "UnknownObject": (
        "No model, run, checkpoint, session, sampler or request has that name.",
        "List existing ones, for example with `tinkex model list`.",
    ),
    "Conflict": (
        "The object is in a state that does not allow this: an upload is finished, or the id of a running sample is reused.",
        "Do what the message says; a request that is sent again is rejected again.",
    ),
    "Expired": (
        "The object expired: a result, a checkpoint with a TTL, the run of a finished session.",
        "The message names the checkpoint to continue from. Use longer TTLs or named checkpoints.",
    ),
    "TooLarge": (
        "The request is larger than `max_body_bytes`.",
        "Send smaller batches, or raise the limit of your server.",
    ),
    "NumericalError": (
        "A loss, gradient or its norm is not finite. Weights and moments are unchanged.",
        "Check for extreme weights, advantages or logprobs since the last step, lower the learning rate, or set `grad_clip_norm`.",
    ),
    "Busy": (
        "The server is at capacity, such as the space on its disk.",
        "The client retries. If it persists, unload runs or delete checkpoints.",
    ),
    "OverQuota": (
        "Your quota is used up; other users are not affected.",
        "Fetch results, unload runs, delete checkpoints, or ask the operator for a larger quota.",
    ),
    "EngineFailure": (
        "The engine failed on valid input, for example because of a corrupt checkpoint file.",
        "The message names the file or operation; the server's log has details.",
    ),
    "Unsupported": (
        "The request uses a part of the protocol that this server does not support.",
        "Omit it; see [limits](limits.md).",
    ),
    "ModelUnavailable": (
        "The model is still loading, or failed to load.",
        "Wait until `tinkex serve` is ready; the client retries by itself.",
    ),
    "NoRoom": (
        "The data to store exceeds the available space.",
        "Delete something first; the message has the limit and the usage.",
    ),
    "StorageUnavailable": (
        "The engine cannot write to its journal: the disk is full or the database is corrupt.",
        "Free disk space. Until then the engine accepts nothing; accepted operations are safe.",
    ),
}
"""Cause and remedy of every error."""

HEAD = """# Errors

<!-- Written by scripts/generate-docs; do not edit. -->

All errors are in one tree, `tinkex.errors`: `except tinkex.TinkexError` catches every error of this package. A message says what
happened, to what, and what to do next.

```python
import tinkex
from tinkex.testing import local_engine

with local_engine() as engine, engine.service() as service:
    try:
        service.create_lora_training_client("no/such-model")
    except tinkex.NotFoundError as error:  # or tinkex.TinkexError for all of them
        print(error.status_code, error.body["detail"])
        assert engine.base_model in error.body["detail"]
```

A call can fail in three ways: it was **rejected** (`APIStatusError`; nothing was executed), it got **no response**
(`APIConnectionError`), or it was accepted and **failed later** (`RequestFailedError`, raised by the future's `result()`).

"Retried" below means: by the client, before it raises the error. Transient failures (no response, 408, 409, 429 and 5xx except 501
and 507) are retried with exponential backoff, unless the response has `x-should-retry: false`, as those of a `Conflict` have; see
[retries and circuit breaker](guides/resilience.md).
"""


def page() -> str:
    """Returns the Markdown of the page; fails if an error has no advice."""
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, TinkexError) and value is not TinkexError
    }
    classes.pop("TinkerError", None)
    if classes.keys() != ADVICE.keys():
        raise SystemExit(
            f"scripts/docsite/errors_page.py: advice is missing or obsolete for {sorted(classes.keys() ^ ADVICE.keys())}"
        )
    engine = [name for name, value in classes.items() if issubclass(value, EngineError)]
    tree = re.search(
        r"^    TinkexError.*?(?=^    ExperimentalWarning)", errors.__doc__ or "", re.MULTILINE | re.DOTALL
    )
    assert tree is not None
    lines = [
        HEAD,
        "## Class hierarchy",
        "",
        "```text",
        *(line[4:] for line in tree[0].rstrip().splitlines()),
        "```",
        "",
    ]
    lines += ["## Errors of clients", ""]
    for name in (name for name in ADVICE if name not in engine):
        lines += _entry(name, _client_facts(classes[name]))
    lines += [
        "## Errors of the engine",
        "",
        "The engine returns these as HTTP responses, and the client raises the class named here. If an accepted operation fails later,",
        "the client raises a `RequestFailedError` with the same message and a category.",
        "",
    ]
    for name in engine:
        lines += _entry(name, _engine_facts(classes[name]))
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, facts: list[str]) -> list[str]:
    cause, remedy = ADVICE[name]
    return [
        f"### `{name}`",
        "",
        " · ".join(facts),
        "",
        f"**Cause.** {cause}",
        "",
        f"**What to do.** {remedy}",
        "",
    ]


def _client_facts(kind: type[TinkexError]) -> list[str]:
    facts = [f"subclass of `{kind.__mro__[1].__name__}`"]
    if issubclass(kind, APIStatusError):
        status = getattr(kind, "status_code", None)
        if status is not None:
            facts = [f"HTTP {status}", _retried(retried=is_transient(status)), *facts]
        elif kind is errors.InternalServerError:
            facts = ["HTTP 500 and above", "retried, except 501 and 507", *facts]
    elif issubclass(kind, errors.APIConnectionError):
        facts = [_retried(retried=kind is not errors.StreamInterruptedError), *facts]
    elif kind is errors.ResultExpiredError:
        facts = ["HTTP 410 to a poll", "samples are retried, training is not", *facts]
    elif kind is errors.RequestFailedError:
        facts = ["result of the operation", _retried(retried=False), *facts]
    elif kind is not errors.APIError:
        facts = [
            "no request was sent" if kind is not errors.RecoveryError else "after `max_attempts` attempts",
            *facts,
        ]
    if kind is errors.APIResponseValidationError:
        facts = [_retried(retried=False), *facts[1:]]
    return facts


def _engine_facts(kind: type[EngineError]) -> list[str]:
    status = STATUSES.get(kind, kind.status)
    raised = type(status_error(HttpResponse(status), None)).__name__
    if kind is errors.Expired:
        raised += "` or `ResultExpiredError"
    http = (
        f"HTTP {status}"
        if status == kind.status
        else f"HTTP {status}, because other clients retry a {kind.status}"
    )
    return [
        http,
        f"category `{kind.category.value}`",
        _retried(retried=is_transient(status) and kind is not errors.Conflict),
        f"raised as `{raised}`",
    ]


def _retried(*, retried: bool) -> str:
    return "retried" if retried else "not retried"
