"""The base classes of JSON value types: frozen, keyword-only, with the common pydantic methods."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from tinkex.types.coercion import coerce
from tinkex.types.display import show_fields, suggestion

__all__ = ["Options", "SuggestingType", "TaggedOptions", "TaggedValue", "Value"]


class Field:
    """One field of a value type, as pydantic's ``FieldInfo``."""

    def __init__(self, info: msgspec.structs.FieldInfo) -> None:
        self.annotation = info.type
        self.default = None if info.default is msgspec.NODEFAULT else info.default
        self.default_factory = None if info.default_factory is msgspec.NODEFAULT else info.default_factory
        self._required = info.required

    def is_required(self) -> bool:
        """Returns whether the field is required."""
        return self._required

    def get_default(self, *, call_default_factory: bool = False) -> Any:
        """Returns the default value of the field."""
        if self.default_factory is not None:
            return self.default_factory() if call_default_factory else None
        return self.default


class Fields:
    """The fields of a value type by name, as ``model_fields``.

    >>> from tinkex.types import SamplingParams
    >>> SamplingParams.model_fields["temperature"].default
    1.0
    """

    def __get__(self, value: Any, kind: type[msgspec.Struct]) -> dict[str, Field]:
        return {info.name: Field(info) for info in msgspec.structs.fields(kind)}


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, keyword-only value that is encoded as JSON on the wire."""

    model_fields: ClassVar[Fields] = Fields()

    def __post_init__(self) -> None:
        coerce(self)

    def __repr__(self) -> str:
        return show_fields(self, self.__struct_fields__)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields names and values of the fields, so that ``dict(value)`` is a shallow dump.

        >>> from tinkex.types import HealthResponse
        >>> dict(HealthResponse(status="ok"))
        {'status': 'ok'}
        """
        return ((name, getattr(self, name)) for name in self.__struct_fields__)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with some fields changed.

        >>> from tinkex.types import AdamParams
        >>> AdamParams().model_copy(update={"learning_rate": 0.5}).learning_rate
        0.5
        """
        if deep:
            import copy

            return msgspec.structs.replace(copy.deepcopy(self), **dict(update or {}))
        return msgspec.structs.replace(self, **dict(update or {}))

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        by_alias: bool | None = None,
    ) -> dict[str, Any]:
        """Returns the value as a plain dictionary; ``mode="json"`` converts times to strings as well.

        Fields have no aliases, so ``by_alias`` has no effect.

        >>> from tinkex.types import LoraConfig
        >>> LoraConfig(rank=8).model_dump(exclude={"train_mlp", "train_attn"}, exclude_none=True)
        {'rank': 8, 'train_unembed': True}
        """
        from tinkex.types import plain

        del by_alias
        dumped: dict[str, Any] = plain.to_plain(
            self, omit_none=exclude_none, omit_defaults=exclude_defaults, python=mode == "python"
        )
        if include is not None:
            dumped = {name: item for name, item in dumped.items() if name in include}
        return {name: item for name, item in dumped.items() if name not in exclude} if exclude else dumped

    def model_dump_json(
        self,
        *,
        indent: int | None = None,
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        by_alias: bool | None = None,
    ) -> str:
        """Returns the value as JSON.

        >>> from tinkex.types import HealthResponse
        >>> HealthResponse(status="ok").model_dump_json()
        '{"status":"ok"}'
        """
        dumped = self.model_dump(
            mode="json",
            include=include,
            exclude=exclude,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            by_alias=by_alias,
        )
        text = msgspec.json.encode(dumped)
        return (text if indent is None else msgspec.json.format(text, indent=indent)).decode()

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Builds the value from a mapping; an instance is returned as it is.

        >>> from tinkex.types import AdamParams
        >>> AdamParams.model_validate({"learning_rate": 0.01}).beta1
        0.9
        """
        from tinkex.types import plain

        return obj if isinstance(obj, cls) else plain.from_plain(obj, cls)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray) -> Self:
        """Builds the value from JSON.

        >>> from tinkex.types import HealthResponse
        >>> HealthResponse.model_validate_json('{"status": "ok"}').status
        'ok'
        """
        try:
            return cls.model_validate(msgspec.json.decode(json_data))
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def model_construct(cls, _fields_set: Collection[str] | None = None, **values: Any) -> Self:
        """Builds the value from these fields; unlike pydantic it validates them, which is cheap.

        >>> from tinkex.types import HealthResponse
        >>> HealthResponse.model_construct(status="ok").status
        'ok'
        """
        del _fields_set  # not recorded
        return cls(**values)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """Supports values as fields of pydantic models, like the official types."""
        return pydantic_field(cls)


class Options(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value whose fields are all honoured: an unknown field is rejected, not ignored."""


class SuggestingType(msgspec.StructMeta):
    """The type of options that users write: an unknown field names the one that was probably meant."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 -- the class that is called
        """Builds a value."""
        if unknown := fields.keys() - set(cls.__struct_fields__):
            name, known = min(unknown), ", ".join(cls.__struct_fields__)
            advice = suggestion(name, cls.__struct_fields__)
            raise TypeError(f"{cls.__name__} has no field {name!r}{advice or f'; it has {known}'}")
        return super().__call__(*args, **fields)


class TaggedType(msgspec.StructMeta):
    """The type of values that a tag tells apart, which may be given like a field: ``OwnSearchOwner(type="own")``."""

    if not TYPE_CHECKING:  # type checkers use the fields

        def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 -- the class that is called
            """Builds a value; another tag than that of the class is a ``ValueError``."""
            config = cls.__struct_config__
            tag = fields.pop(config.tag_field, config.tag)
            if tag != config.tag:
                raise ValueError(f"{cls.__name__}.{config.tag_field} is {config.tag!r}, got {tag!r}")
            return super().__call__(*args, **fields)

        @property
        def __signature__(cls) -> inspect.Signature:  # noqa: N805
            config = cls.__struct_config__
            if config.tag_field is None:
                return super().__signature__
            tag = inspect.Parameter(config.tag_field, inspect.Parameter.KEYWORD_ONLY, default=config.tag)
            fields = super().__signature__.parameters.values()
            return inspect.Signature([tag, *fields])


class TaggedValue(Value, frozen=True, kw_only=True, metaclass=TaggedType):
    """A value that a tag tells apart from others."""


class TaggedOptions(Options, frozen=True, kw_only=True, metaclass=TaggedType):
    """Options that a tag tells apart from others."""


def pydantic_field(kind: Any) -> Any:
    """Returns the pydantic schema of a value type; pydantic is imported only when it calls this."""
    from pydantic_core import core_schema

    def dump(value: Any, info: Any) -> Any:
        return value.model_dump(mode=info.mode, exclude_none=info.exclude_none)

    return core_schema.no_info_plain_validator_function(
        kind.model_validate,
        serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True),
    )
