"""Request types of the compatible routes: strict, with a few documented fields that have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

IGNORED_FIELDS = "x-tinkex-ignored-fields"
"""The response header that names the fields of a request that were accepted and have no effect."""


class RequestObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of a request: an unknown field is an error."""


def given_fields(request: msgspec.Struct, names: Iterable[str]) -> list[str]:
    """Those of the fields that the client has set.

    >>> class Request(RequestObject):
    ...     user: str | None = None
    ...     store: bool | None = None
    >>> given_fields(Request(store=False), ["user", "store"])
    ['store']
    """
    return [name for name in names if getattr(request, name) is not None]


def ignored_header(names: Iterable[str]) -> Mapping[str, str]:
    """The header that names the fields without effect; empty if there are none.

    >>> ignored_header(["user", "metadata"])
    {'x-tinkex-ignored-fields': 'user, metadata'}
    """
    names = list(dict.fromkeys(names))
    return {IGNORED_FIELDS: ", ".join(names)} if names else {}
