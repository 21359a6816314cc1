"""Every field of every request the server takes, and what proves that it is not accepted and ignored.

``proves`` registers a proof: a function that changes the field, against a running engine, and sees the outcome change
or the request refused. ``INFORMATION`` lists the fields that ask for nothing, with the reason.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tests.engine_fields.rig import Rig
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.types import ModelInput, ModelInputChunk, TensorData

__all__ = ["INFORMATION", "PROOFS", "Proof", "fields_of", "proves", "requests", "tags"]

Proof = Callable[[Rig], None]

PROOFS: dict[str, Proof] = {}

INFORMATION = {
    "ClientConfigRequest.sdk_version": "says who is calling; every version gets the same configuration",
    "CreateSessionRequest.sdk_version": "says who is calling; it is kept with the session",
    **dict.fromkeys(
        (
            "TelemetrySendRequest.events",
            "TelemetrySendRequest.platform",
            "TelemetrySendRequest.sdk_version",
            "TelemetrySendRequest.session_id",
            "TelemetrySendRequest.process_uuid",
        ),
        "what clients tell about themselves; dropped, because it may hold their keys",
    ),
    **dict.fromkeys(
        (
            "Datum.model_input_spans",
            "Datum.loss_fn_input_spans",
            "PromptProvenanceSpan.sequence_id",
            "PromptProvenanceSpan.offset",
            "PromptProvenanceSpan.length",
            "SampledProvenanceSpan.sequence_id",
            "SampledProvenanceSpan.offset",
            "SampledProvenanceSpan.length",
        ),
        "where tokens came from; only the loss stable_reinforce asks, and that is rejected, with an error that names the field",
    ),
}


# Types that read and write themselves, and what their JSON holds.
_WRITTEN_BY_HAND: dict[type, dict[str, Any]] = {
    ModelInput: {"chunks": ModelInputChunk},
    TensorData: {
        "data": list,
        "dtype": str,
        "shape": list,
        "sparse_crow_indices": list,
        "sparse_col_indices": list,
    },
}


def proves(*fields: str) -> Callable[[Proof], Proof]:
    """Registers a function as the proof of one or more fields, each written ``Type.field``."""

    def register(proof: Proof) -> Proof:
        for field in fields:
            assert field not in PROOFS, f"{field} has two proofs"
            PROOFS[field] = proof
        return proof

    return register


def requests() -> list[type]:
    """The requests of every endpoint that takes a body."""
    return [row.request for row in ENDPOINTS.values() if row.request is not None]


def fields_of(kind: Any, seen: set[Any] | None = None) -> set[str]:
    """The fields of a request and of everything in it, as ``Type.field``; tags are left to ``tags``."""
    seen = set() if seen is None else seen
    if kind in seen or not _is_record(kind):
        return set()
    seen.add(kind)
    found: set[str] = set()
    for name, hint in _hints(kind).items():
        if not _is_tag(name, hint):
            found.add(f"{kind.__name__}.{name}")
        for part in _parts(hint):
            found |= fields_of(part, seen)
    return found


def tags(kind: Any, seen: set[Any] | None = None) -> set[Any]:
    """The request and everything in it that has a ``type`` of one fixed value."""
    seen = set() if seen is None else seen
    if kind in seen or not _is_record(kind):
        return set()
    seen.add(kind)
    hints = _hints(kind)
    found = {kind} if any(_is_tag(name, hint) for name, hint in hints.items()) else set()
    return found.union(*(tags(part, seen) for hint in hints.values() for part in _parts(hint)))


def _is_tag(name: str, hint: Any) -> bool:
    return name == "type" and typing.get_origin(hint) is Literal and len(typing.get_args(hint)) == 1


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or kind in _WRITTEN_BY_HAND
    )


def _hints(kind: type) -> dict[str, Any]:
    if kind in _WRITTEN_BY_HAND:
        return _WRITTEN_BY_HAND[kind]
    hints = typing.get_type_hints(kind)
    fields = msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
    return {field.name: hints[field.name] for field in fields}


def _parts(hint: Any) -> list[Any]:
    """The types a hint is made of: those of every member of a union and of every container."""
    if typing.get_origin(hint) is Literal:
        return []
    return [part for inner in typing.get_args(hint) for part in _parts(inner)] or [hint]
