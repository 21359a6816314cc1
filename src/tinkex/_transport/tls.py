"""TLS for the client's own connections: which certificates are trusted, and what to do when the handshake fails."""

from __future__ import annotations

import os
import re
import ssl
import sys
from pathlib import Path
from typing import Any

__all__ = ["TlsContext", "TlsObject", "client_context", "explain", "has_system_certificates"]

_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_… of OpenSSL
_WRONG_NAME = frozenset({62, 64})
_HASHED = re.compile(r"[0-9a-f]{8}\.\d+")


class TlsObject(ssl.SSLObject):
    """One side of a TLS connection."""

    ended = False
    """Whether the server has sent its close_notify; a connection that just ends may have been cut by anyone."""

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002 - the name of the base class
        """Reads decrypted bytes; called by asyncio."""
        received = super().read(len, buffer)
        if not received:
            self.ended = True
        return received


class TlsContext(ssl.SSLContext):
    """The settings of the connections to one server; a new one resumes the session of the latest, if that has a ticket."""

    sslobject_class = TlsObject
    _latest: ssl.SSLObject | None = None
    """Kept as a whole: OpenSSL does not resume the session of an object that was freed before it was closed."""
    _session: ssl.SSLSession | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Creates the TLS side of a connection; called by asyncio."""
        latest = self._latest
        if (
            latest is not None and latest.version() is not None
        ):  # None during the handshake, when there is no session
            found = latest.session
            if found is not None and found.has_ticket:
                self._session = found
        self._latest = super().wrap_bio(
            incoming, outgoing, server_side, server_hostname, session or self._session
        )
        return self._latest


def client_context(ca_file: Path | None) -> TlsContext:
    """Trusts the system's authorities and those of ``ca_file``; checks names, and negotiates HTTP/1.1 over TLS 1.2 or newer."""
    context = TlsContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # an intermediate authority in ca_file is trusted, too
    context.load_default_certs()
    system_file = Path(ssl.get_default_verify_paths().openssl_cafile)
    if (
        "SSL_CERT_FILE" in os.environ and system_file.is_file()
    ):  # which OpenSSL has read instead of the system's
        context.load_verify_locations(system_file)
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except ssl.SSLError as error:
            raise OSError(
                f"the certificates in {str(ca_file)!r} (ca_file) cannot be read: {error}"
            ) from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def has_system_certificates() -> bool:
    """Whether OpenSSL finds the system's authorities: some builds of Python look where there are none."""
    if sys.platform == "win32":
        return True
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return True
    return bool(paths.capath) and any(_HASHED.fullmatch(each.name) for each in Path(paths.capath).iterdir())


def explain(error: ssl.SSLError, host: str) -> str:
    """Why a handshake with a host failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if error.verify_code in _WRONG_NAME:
            return (
                f"its certificate is for another name: {why.rstrip('.')}. Use a name in the URL that the certificate "
                "contains"
            )
        if error.verify_code == _EXPIRED:
            return "its certificate has expired. Renew it on the server, and check the clock of this machine"
        if error.verify_code == _NOT_YET_VALID:
            return "its certificate is not valid yet. Check the clocks of the server and of this machine"
        return (
            f"its certificate was rejected: {why}. If it comes from a private authority, give the authority's "
            "certificate as ca_file=… or in SSL_CERT_FILE"
        )
    if error.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
        return f"{host} does not speak TLS on this port. Use http:// if it is a server without TLS, or another port"
    if error.reason and error.reason.endswith(("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")):
        return (
            f"the TLS handshake failed: {error.reason}. The server may require a client certificate, which is not "
            "supported, or offer nothing newer than TLS 1.1"
        )
    return f"the TLS handshake failed: {error.reason or error}"
