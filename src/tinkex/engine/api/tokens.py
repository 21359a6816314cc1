"""Signed tokens of this server: short-lived credentials, and download URLs that need none.

They are JSON Web Tokens signed with HMAC-SHA256. The secret is in the data directory, so they stay valid after a restart.
Each token names its use and is valid only for that.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_VERIFIED = 10_000
_HEADER = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9"  # {"alg":"HS256","typ":"JWT"}


class Signer:
    """Issues and verifies tokens.

    >>> signer = Signer(b"secret")
    >>> token = signer.issue("call", {"sub": "ada"}, expires_at=100.0)
    >>> signer.read("call", token, now=99.0)["sub"]
    'ada'
    >>> signer.read("call", token, now=100.0) is signer.read("download", token, now=99.0) is None
    True
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._verified: dict[str, dict[str, Any]] = {}

    def issue(self, use: str, claims: Mapping[str, Any], expires_at: float) -> str:
        """Returns a token with these claims, for one use, that expires at a given time."""
        content = _encode(msgspec.json.encode({**claims, "use": use, "exp": int(expires_at)}))
        return f"{_HEADER}.{content}.{self._signature(content)}"

    def read(self, use: str, token: str, now: float) -> dict[str, Any] | None:
        """Returns the claims of a token, or None if it is invalid, expired or for another use."""
        # A client sends the same token with every request for an hour: its signature is verified once.
        claims = self._verified.get(token)
        if claims is None:
            claims = self._verify(token)
            if claims is None:
                return None
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()
            self._verified[token] = claims
        return claims if claims.get("use") == use and now < claims.get("exp", 0) else None

    def _verify(self, token: str) -> dict[str, Any] | None:
        """Returns the claims of a token, or None if its signature is invalid."""
        header, _, rest = token.partition(".")
        content, _, signature = rest.partition(".")
        if header != _HEADER or not hmac.compare_digest(
            signature.encode("utf-8", "surrogateescape"), self._signature(content).encode()
        ):
            return None
        try:
            claims: dict[str, Any] = msgspec.json.decode(_decode(content), type=dict[str, Any])
        except (msgspec.DecodeError, binascii.Error, ValueError):
            return None
        return claims

    def _signature(self, content: str) -> str:
        message = f"{_HEADER}.{content}".encode("utf-8", "surrogateescape")
        return _encode(hmac.digest(self._secret, message, hashlib.sha256))


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode("ascii").rstrip("=")


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
