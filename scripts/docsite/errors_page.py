"""The page of errors: made from the classes in ``tinkex.errors``, with what causes each of them and what helps."""

from __future__ import annotations

import inspect
import re

from tinkex import errors
from tinkex._transport.retry import is_transient
from tinkex.engine.api.errors import STATUSES
from tinkex.errors import APIStatusError, EngineError, HttpResponse, TinkexError, status_error

ADVICE: dict[str, tuple[str, str]] = {
    # what a program can meet
    "APIError": (
        "A call to a server went wrong; one of the classes below says how.",
        "Catch the class you can do something about. `error.request` is the method and address, `error.body` what came back.",
    ),
    "APIStatusError": (
        "The server answered with an error status.",
        "Read the message: it is the server's own. `error.status_code` and `error.response.headers` are there too.",
    ),
    "BadRequestError": (
        "Something in the call is wrong: a shape, a name, an option this server refuses.",
        "Change what the message names. Nothing was executed.",
    ),
    "AuthenticationError": (
        "No key was sent, or one the server does not know or has revoked.",
        "Set `TINKER_API_KEY`, or run `tinkex auth login`. Keys of your own server are made with `tinkex keys create`.",
    ),
    "BillingError": (
        "The hosted service wants to be paid first. A server of your own never says this.",
        "Settle it with the service. Where the service asks for patience the client waits before it raises this.",
    ),
    "PermissionDeniedError": (
        "The key is known, but the object belongs to somebody else, or the call is the operator's.",
        "Ask its owner to publish it, or use the server's own key.",
    ),
    "NotFoundError": (
        "Nothing of that name exists, or nothing that this key may see.",
        "`tinkex run list` and `tinkex checkpoint list` show what does.",
    ),
    "ConflictError": (
        "The server says that the object is in a state in which this cannot be done, and it stayed so.",
        "Look at the object, for instance with `tinkex run info`, and change its state first.",
    ),
    "PayloadTooLargeError": (
        "A body or a file is larger than the server takes.",
        "Send less at once, or have its operator raise `max_body_bytes` or `max_asset_bytes`.",
    ),
    "UnprocessableEntityError": (
        "The request can be read, but its values make no sense together.",
        "Change what the message names.",
    ),
    "RateLimitError": (
        "The server is full, or your share of it is used up, and stayed so for as long as the client waits.",
        "Send less at once, close sessions that are done, unload runs, delete checkpoints; the message says which it was.",
    ),
    "InternalServerError": (
        "The server failed, and went on failing for as long as the client waits.",
        "Look at its log and `GET /api/v1/healthz`. Accepted operations are in its journal and run when it is back.",
    ),
    "InsufficientStorageError": (
        "What is to be kept does not fit into your share of the server's disk, or onto it.",
        "Delete images or checkpoints that are not needed, or give them a TTL; then send it again.",
    ),
    "APIResponseValidationError": (
        "What answered does not speak the protocol: a proxy's page, another program on that port, a much newer server.",
        "Check `base_url`. `error.response.text` shows what came.",
    ),
    "APIConnectionError": (
        "The server could not be reached, or the connection broke, for as long as the client waits.",
        "Check `base_url`, that the server runs, and proxies. `tinkex doctor` tries all of it.",
    ),
    "APITimeoutError": (
        "The server took a request and did not answer within `timeout`.",
        "Raise `timeout` for slow networks, or look whether the server is overloaded.",
    ),
    "CircuitOpenError": (
        "Five calls of a kind failed in a row, so the server is left alone for 5 s; this call was not sent.",
        "Try again after `error.retry_after_s`; see [failures](guides/resilience.md).",
    ),
    "StreamInterruptedError": (
        "A stream broke after its first token, so it cannot be repeated without your noticing.",
        "Sample again. `error.received` holds what came; put it into the prompt to go on from there.",
    ),
    "RequestFailedError": (
        "The server accepted an operation, and running it failed. `error.category` says whose fault it was.",
        "`User`: change the input. `Server` or `Unknown`: look at the server's log, and submit it again.",
    ),
    "ResultExpiredError": (
        "A result was fetched later than the server keeps results (a day, or an hour after it was first fetched).",
        "Submit the operation again. Servers of your own: `result_retention_s`.",
    ),
    "ConfigError": (
        "A setting is missing or makes no sense; the message says which, and where it came from.",
        "Correct it there; all settings are in [the table](config.md).",
    ),
    "MissingApiKeyError": (
        "The server needs an API key, and none was given, set or stored.",
        'Run `tinkex auth login`, set `TINKER_API_KEY`, or use `base_url="local"`, which needs no key.',
    ),
    "SetupError": (
        "This machine lacks something: an extra, a model, room on the disk, a free port.",
        "Do what the message says. `tinkex doctor` finds these before they bite.",
    ),
    "ClosedError": (
        "A client was used after `close`, or after its `with` block ended.",
        "Fetch results inside the block, or make a new client.",
    ),
    "RecoveryError": (
        "A lost run could not be restarted from any checkpoint; `error.__cause__` is the last failure.",
        "Start the program again: it opens a new session and goes on from its checkpoints. See [recovery](guides/recovery.md).",
    ),
    "UploadError": (
        "A file that was to be sent cannot be read, changed while it was sent, or cannot be read a second time.",
        "Give the path of an ordinary file, or a file opened with `rb`.",
    ),
    # what the engine raises
    "EngineError": (
        "The root of what is raised inside the engine.",
        "In a client you meet it as one of the classes above.",
    ),
    "InvalidInput": (
        "The input cannot be used: an unknown token, a missing loss input, a misspelt option, a checkpoint name that is taken.",
        "Change what the message names. Nothing was executed, and the run goes on.",
    ),
    "Unauthorized": (
        "No key, or one this server does not know.",
        "Send the right one; see [sharing](guides/sharing.md).",
    ),
    "NotAllowed": (
        "The object belongs to somebody else, or the call is the operator's.",
        "Ask its owner, or use the server's own key.",
    ),
    "UnknownObject": (
        "No model, run, checkpoint, session, sampler or request of that name.",
        "List what there is; names of models are in `tinkex model list`.",
    ),
    "Conflict": (
        "A request id that is being sampled already was sent again with another request.",
        "Give each request an id of its own; clients do so by themselves.",
    ),
    "Expired": (
        "It was here, and its time is over: a result, a checkpoint with a TTL, the run of a finished session.",
        "The message says what to go on from. Keep what you need: longer TTLs, named checkpoints.",
    ),
    "TooLarge": (
        "The call is larger than `max_body_bytes`.",
        "Send smaller batches, or raise the limit of your server.",
    ),
    "NumericalError": (
        "A loss, gradient or its norm is not finite. Weights and moments stay as they were.",
        "Look for extreme weights, advantages or logprobs since the last step, lower the learning rate, or set `grad_clip_norm`.",
    ),
    "Busy": (
        "No room: the server's limit of live runs, or its disk.",
        "The client waits and tries again. If it stays so, unload runs or delete checkpoints.",
    ),
    "OverQuota": (
        "Your own share is used up, while others may go on.",
        "Fetch results, unload runs, delete checkpoints; or ask the operator for a larger share.",
    ),
    "EngineFailure": (
        "The engine failed at something that you did right, such as a damaged checkpoint file.",
        "The message names the file or operation; the server's log has the rest.",
    ),
    "Unsupported": (
        "A part of the protocol that this server refuses by name, rather than ignore it.",
        "Leave it out; the [limits](limits.md) list all of them.",
    ),
    "ModelUnavailable": (
        "The model is still being loaded, or could not be.",
        "Wait for `tinkex serve` to say it is ready; the client does so by itself.",
    ),
    "NoRoom": (
        "What you want to keep on the server is more than there is room for.",
        "Delete something first; the message says how much there is and how much of it is used.",
    ),
    "StorageUnavailable": (
        "The engine cannot write down what it would promise: the disk is full or the database damaged.",
        "Make room on the disk. Until then nothing is accepted, and nothing accepted is lost.",
    ),
}
"""Cause and remedy of every error."""

HEAD = """# Errors

<!-- Written by scripts/generate-docs; do not edit. -->

All errors are in one tree, `tinkex.errors`, so that one `except tinkex.TinkexError` catches everything this package
raises. A message says what happened, to what, and what to do next.

```python
import tinkex
from tinkex.testing import local_engine

with local_engine() as engine, engine.service() as service:
    try:
        service.create_lora_training_client("no/such-model")
    except tinkex.NotFoundError as error:  # tinkex.TinkexError catches every one of them
        print(error.status_code, error.body["detail"])
        assert engine.base_model in error.body["detail"]
```

Three ways for a call to end badly: it was **refused** (an `APIStatusError`, and nothing was done), it got **no answer** (an
`APIConnectionError`), or it was accepted and **failed later** (a `RequestFailedError`, from the future's `result()`).

"Tried again" below means: by the client itself, before you see anything of it. Failures that may pass (no answer, 408, 409,
429 and 5xx except 501) are tried again with growing pauses; how long is in [failures](guides/resilience.md).
"""


def page() -> str:
    """The Markdown of the whole page; refuses to be made while an error has no advice."""
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, TinkexError) and value is not TinkexError
    }
    classes.pop("TinkerError", None)
    if classes.keys() != ADVICE.keys():
        raise SystemExit(
            f"scripts/docsite/errors_page.py: advice is missing or left over for {sorted(classes.keys() ^ ADVICE.keys())}"
        )
    engine = [name for name, value in classes.items() if issubclass(value, EngineError)]
    tree = re.search(
        r"^    TinkexError.*?(?=^    ExperimentalWarning)", errors.__doc__ or "", re.MULTILINE | re.DOTALL
    )
    assert tree is not None
    lines = [
        HEAD,
        "## The tree",
        "",
        "```text",
        *(line[4:] for line in tree[0].rstrip().splitlines()),
        "```",
        "",
    ]
    lines += ["## In your program", ""]
    for name in (name for name in ADVICE if name not in engine):
        lines += _entry(name, _client_facts(classes[name]))
    lines += [
        "## Inside the engine",
        "",
        "These are raised where the work is done. Where a call is refused at once they leave as an HTTP answer, and the client",
        "raises the class named here; where an accepted operation fails later, it raises a `RequestFailedError` with the same text",
        "and whose fault it was.",
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
    facts = [f"a kind of `{kind.__mro__[1].__name__}`"]
    if issubclass(kind, APIStatusError):
        status = getattr(kind, "status_code", None)
        if status is not None:
            facts = [f"HTTP {status}", _tried(again=is_transient(status)), *facts]
        elif kind is errors.InternalServerError:
            facts = ["HTTP 500 and above", "tried again, except 501 and 507", *facts]
    elif issubclass(kind, errors.APIConnectionError):
        facts = [_tried(again=kind is not errors.StreamInterruptedError), *facts]
    elif kind is errors.ResultExpiredError:
        facts = ["HTTP 410 to a poll", "samples are tried again, training is not", *facts]
    elif kind is errors.RequestFailedError:
        facts = ["the operation's own result", _tried(again=False), *facts]
    elif kind is not errors.APIError:
        facts = [
            "no request was sent" if kind is not errors.RecoveryError else "after `max_attempts` tries",
            *facts,
        ]
    if kind is errors.APIResponseValidationError:
        facts = [_tried(again=False), *facts[1:]]
    return facts


def _engine_facts(kind: type[EngineError]) -> list[str]:
    status = STATUSES.get(kind, kind.status)
    seen = type(status_error(HttpResponse(status), None)).__name__
    if kind is errors.Expired:
        seen += "` or `ResultExpiredError"
    shown = (
        f"HTTP {status}"
        if status == kind.status
        else f"HTTP {status}, because other clients repeat a {kind.status}"
    )
    return [
        shown,
        f"whose fault: {kind.category.value}",
        _tried(again=is_transient(status)),
        f"seen as `{seen}`",
    ]


def _tried(*, again: bool) -> str:
    return "tried again" if again else "not tried again"
