"""Handles: a sampler as a string from which any process with an API key can sample.

The string is URL-safe base64 of a JSON object, the same that the official client writes and reads. It contains no
credentials.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinkex import types
from tinkex.types.plain import from_plain, to_plain

__all__ = ["SamplerHandle"]


@dataclass(frozen=True)
class SamplerHandle:
    """The content of a handle.

    >>> handle = SamplerHandle("s", "s:sample:0", "http://127.0.0.1:8787")
    >>> SamplerHandle.parse(handle.text()) == handle
    True
    """

    session_id: str
    sampling_session_id: str
    base_url: str
    client_config: types.ClientConfigResponse = field(default_factory=types.ClientConfigResponse)
    dynamic_config: types.ClientDynamicConfigResponse = field(
        default_factory=types.ClientDynamicConfigResponse
    )
    record_stability_info: bool = False

    def text(self) -> str:
        """The handle as a string."""
        plain = {
            "session_id": self.session_id,
            "sampling_session_id": self.sampling_session_id,
            "holder": {
                "base_url": self.base_url,
                "default_headers_overrides": {},  # headers may hold secrets: they are not part of the handle
                "client_config": to_plain(self.client_config, omit_none=True),
                "client_dynamic_config": to_plain(self.dynamic_config, omit_none=True),
                "api_key": None,
            },
            "record_stability_info": self.record_stability_info,
        }
        return base64.urlsafe_b64encode(msgspec.json.encode(plain)).decode("ascii")

    @classmethod
    def parse(cls, text: str) -> SamplerHandle:
        """Reads a handle, ours or the official client's."""
        try:
            plain: dict[str, Any] = msgspec.json.decode(
                base64.b64decode(text.encode(), altchars=b"-_", validate=True), type=dict[str, Any]
            )
            holder = plain["holder"]
            return cls(
                session_id=str(plain["session_id"]),
                sampling_session_id=str(plain["sampling_session_id"]),
                base_url=str(holder["base_url"]),
                client_config=from_plain(holder.get("client_config") or {}, types.ClientConfigResponse),
                dynamic_config=from_plain(
                    holder.get("client_dynamic_config") or {}, types.ClientDynamicConfigResponse
                ),
                record_stability_info=bool(plain.get("record_stability_info", False)),
            )
        except (
            msgspec.DecodeError,
            binascii.Error,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise ValueError(
                "this is not a sampler handle; pass the whole string that get_sampler_handle() returned"
            ) from error
