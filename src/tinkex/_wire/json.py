"""The JSON codec: values to bytes and back, with the protocol's rule "omit None, keep defaults"."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.plain import decode_hook, encode_hook, without_none

T = TypeVar("T")

_encoder = msgspec.json.Encoder(enc_hook=encode_hook)
_decoders: dict[tuple[type[Any], bool], msgspec.json.Decoder[Any]] = {}


class Malformed(ValueError):
    """The bytes are not the expected JSON; the message names the field."""


def encode(value: Any, *, omit_none: bool = True) -> bytes:
    """Encodes a value as JSON; fields that are ``None`` are omitted.

    >>> from tinkex.types import LoraConfig
    >>> encode(LoraConfig(rank=8))
    b'{"rank":8,"train_unembed":true,"train_mlp":true,"train_attn":true}'
    """
    try:
        return _encoder.encode(without_none(value) if omit_none else value)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the string {error.object[:80]!r} contains the lone surrogate {error.object[error.start]!r}, which cannot be "
            "encoded; remove it"
        ) from error


def decode(data: bytes, kind: type[T], *, strict: bool = False) -> T:
    """Decodes a value of the given type; raises ``Malformed``, which names the invalid field.

    Unless it is ``strict``, a number may be given as a string.

    >>> from tinkex.types import UntypedAPIFuture
    >>> decode(b'{"request_id": "r1", "news": 1}', UntypedAPIFuture).request_id
    'r1'
    """
    decoder = _decoders.get((kind, strict))
    if decoder is None:
        decoder = msgspec.json.Decoder(kind, dec_hook=decode_hook, strict=strict)
        _decoders[kind, strict] = decoder
    try:
        value: T = decoder.decode(data or b"{}")
    except (msgspec.DecodeError, ValueError) as error:
        raise Malformed(str(error)) from error
    return value


def decode_any(data: bytes) -> Any:
    """Decodes any JSON value; raises ``Malformed``."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from error
