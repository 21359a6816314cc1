"""Limits on requests: size and number of values of bodies, size of metadata, query parameters and page size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from tinkex.errors import InvalidInput, TooLarge

MAX_PAGE = 1000

_PAGE = frozenset({"limit", "offset"})
_SCOPE = frozenset({"access_scope"})
QUERY_PARAMETERS: Mapping[str, frozenset[str]] = {
    "list_sessions": _PAGE | _SCOPE,
    "get_session": _SCOPE,
    "list_training_runs": _PAGE | _SCOPE | {"project_id"},
    "get_training_run": _SCOPE,
    "list_user_checkpoints": _PAGE,
    "get_training_run_metrics": frozenset({"name", "start", "stop", "max_points"}),
    "list_rollouts": _PAGE | {"step"},
    "list_assets": _PAGE,
    "tokenizer_file": frozenset({"model"}),
    "anthropic_messages": frozenset({"beta"}),
    "anthropic_count_tokens": frozenset({"beta"}),
    "audit_log": frozenset({"event_type", "day"}),
    "billing_usage": frozenset({"starting_on", "ending_before"}),
    "checkpoint_storage_usage": frozenset({"project_id"}),
}
"""The query parameters of each endpoint; others are rejected."""


MIB = 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
"""Limit for the metadata of a session or a run, and for the tags of a session, as JSON."""
MAX_TEXT_BYTES = 4 * 1024
"""Limit for a name or a version that is stored."""


class BodyLimit(NamedTuple):
    """Limits for the body of one endpoint: its size, also when decompressed, and its number of values."""

    max_bytes: int
    max_values: int


SMALL_BODY = BodyLimit(256 * 1024, 2**16)
"""The limits of every endpoint that is not in one of the tables below."""
OTHER_BODIES: Mapping[str, BodyLimit] = {
    "telemetry": BodyLimit(4 * MIB, 2**16),
    "create_custom_loss": BodyLimit(MIB, 2**19),
    "log_rollouts": BodyLimit(8 * MIB, 2**20),
}
LARGE_BODIES: Mapping[str, int] = {
    "forward_backward": 2**20,
    "forward": 2**20,
    "asample": 2**20,
    "stream_sample": 2**20,
    "openai_completions": 2**20,
    "openai_chat": 2**20,
    "anthropic_messages": 2**20,
    "anthropic_count_tokens": 2**20,
}
"""The number of values for endpoints whose size is limited by ``max_body_bytes`` only."""


def body_limit(endpoint: str, max_body_bytes: int) -> BodyLimit:
    """Returns the limits for the body of an endpoint.

    >>> body_limit("asample", 64 * MIB)
    BodyLimit(max_bytes=67108864, max_values=1048576)
    >>> body_limit("session_heartbeat", 64 * MIB).max_bytes
    262144
    """
    if endpoint in LARGE_BODIES:
        return BodyLimit(max_body_bytes, LARGE_BODIES[endpoint])
    limit = OTHER_BODIES.get(endpoint, SMALL_BODY)
    return BodyLimit(min(max_body_bytes, limit.max_bytes), limit.max_values)


def check_stored_size(field: str, value: object, max_bytes: int = MAX_METADATA_BYTES) -> None:
    """Raise :class:`TooLarge` for a value that is stored and has more than ``max_bytes`` as JSON.

    >>> check_stored_size("user_metadata", {"team": "vision"})
    """
    size = len(json.dumps(value))
    if size > max_bytes:
        raise TooLarge(
            f"{field} has {size} bytes as JSON; this server stores at most {max_bytes}. Keep large values in files of "
            "your own, and their names here."
        )


def check_query(endpoint: str, query: Mapping[str, str]) -> None:
    """Reject query parameters that an endpoint does not have.

    >>> check_query("get_session", {"access_scope": "owned"})
    >>> check_query("get_session", {"acces_scope": "owned"})
    Traceback (most recent call last):
      ...
    tinkex.errors.InvalidInput: get_session has no query parameter 'acces_scope'; it takes access_scope.
    """
    known = QUERY_PARAMETERS.get(endpoint, frozenset())
    for name in query:
        if name not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise InvalidInput(f"{endpoint} has no query parameter {name[:100]!r}; {takes}.")


def page(query: Mapping[str, str], default_limit: int) -> tuple[int, int]:
    """Returns the ``limit`` and ``offset`` of a listing.

    >>> page({"offset": "40"}, default_limit=20)
    (20, 40)
    """
    limit, offset = _number(query, "limit", default_limit), _number(query, "offset", 0)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(f"limit is {limit}; it must be 1 to {MAX_PAGE}. Use offset for further pages.")
    if offset < 0:
        raise InvalidInput(f"offset is {offset}; it must not be negative.")
    return limit, offset


def wants_accessible(query: Mapping[str, str]) -> bool:
    """Returns whether ``access_scope`` includes what other users have published.

    >>> wants_accessible({}), wants_accessible({"access_scope": "accessible"})
    (False, True)
    """
    scope = query.get("access_scope", "owned")
    if scope not in {"owned", "accessible"}:
        raise InvalidInput(f"access_scope is {scope!r}; it must be owned or accessible.")
    return scope == "accessible"


def number_in(query: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    """Returns a query parameter that is an integer in a range.

    >>> number_in({"max_points": "600"}, "max_points", 1000, 8, 10_000)
    600
    """
    value = _number(query, name, default)
    if not lowest <= value <= highest:
        raise InvalidInput(f"{name} is {value}; it must be {lowest} to {highest}.")
    return value


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{name} is {text!r}; it must be an integer.") from None
