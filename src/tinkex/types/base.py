"""What every JSON value type shares: frozen, keyword-only, and the few pydantic methods programs call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, keyword-only value that crosses the wire as JSON."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed.

        >>> from tinkex.types import AdamParams
        >>> AdamParams().model_copy(update={"learning_rate": 0.5}).learning_rate
        0.5
        """
        if deep:
            import copy

            return msgspec.structs.replace(copy.deepcopy(self), **dict(update or {}))
        return msgspec.structs.replace(self, **dict(update or {}))

    def model_dump(self, *, exclude_none: bool = False, mode: str = "python") -> dict[str, Any]:
        """The value as a plain dictionary.

        >>> from tinkex.types import LoraConfig
        >>> LoraConfig(rank=8).model_dump(exclude_none=True)["rank"]
        8
        """
        from tinkex.types import plain

        dumped = plain.to_plain(self, keep_bytes=mode == "python")
        assert isinstance(dumped, dict)
        return {k: v for k, v in dumped.items() if v is not None} if exclude_none else dumped

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """The value as JSON text."""
        from tinkex.types import plain

        return msgspec.json.encode(plain.to_plain(self, omit_none=exclude_none)).decode()

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Builds the value from a mapping (or returns one that already is it).

        >>> from tinkex.types import AdamParams
        >>> AdamParams.model_validate({"learning_rate": 0.01}).beta1
        0.9
        """
        from tinkex.types import plain

        return obj if isinstance(obj, cls) else plain.from_plain(obj, cls)


class Options(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value whose every field changes what happens: a field we do not know is refused, not dropped."""
