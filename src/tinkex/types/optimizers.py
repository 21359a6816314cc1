"""Optimizers: the family of a run, and the settings of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from tinkex.types.base import Options, SuggestingType
from tinkex.types.coercion import as_float, coerce

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "OptimParams",
    "OptimParamsBase",
    "OptimizerConfig",
    "OptimizerConfigBase",
]


class OptimizerFamily(Mapping[str, Any]):
    """A ``type`` and the fields of its family: as attributes, or as a mapping, which is its wire form."""

    KNOWN: ClassVar[Mapping[str, type[OptimizerFamily]]] = {}
    _fields: dict[str, Any]

    def __init__(self, *, type: str, **fields: Any) -> None:  # noqa: A002 -- the name on the wire
        object.__setattr__(self, "_fields", {"type": type, **fields})

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{self.__class__.__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{self.__class__.__name__} is frozen; create a new one instead of setting {name!r}"
        )

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, repr(item)) for name, item in self._fields.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__class__, dict(self._fields))

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({', '.join(f'{k}={v!r}' for k, v in self._fields.items())})"

    def model_dump(self, *, exclude_none: bool = False, mode: str = "python") -> dict[str, Any]:
        """Returns the wire form, a mapping."""
        del mode  # families hold strings and numbers only
        return {name: item for name, item in self._fields.items() if not (exclude_none and item is None)}

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """Returns the wire form as JSON."""
        return msgspec.json.encode(self.model_dump(exclude_none=exclude_none)).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with some fields changed."""
        del deep  # fields are immutable
        return self.__class__(**{**self._fields, **(update or {})})

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Builds the object for a mapping with a ``type``: of a known family's class, or of this one."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping) or not isinstance(obj.get("type", ""), str):
            raise ValueError('an optimizer must be {"type": "adamw", ...}')
        kind: type[Any] = cls.KNOWN.get(obj.get("type", ""), cls)
        try:
            built: Self = (kind if issubclass(kind, cls) else cls)(**obj)
        except TypeError as error:
            raise ValueError(f"optimizer {obj.get('type')!r}: {error}") from error
        return built


class OptimizerConfigBase(OptimizerFamily):
    """The optimizer family of a run: its ``type``, and fields of its own.

    >>> OptimizerConfigBase(type="lion", warmup=10).warmup
    10
    """

    type: str


class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW, the default optimizer.

    >>> AdamOptimizerConfig().type
    'adamw'
    """

    def __init__(self, *, type: Literal["adamw"] = "adamw") -> None:  # noqa: A002
        super().__init__(type=_only(type, "adamw"))


class DimuonOptimizerConfig(OptimizerConfigBase):
    """Dimuon: momentum with an orthogonalised step.

    >>> DimuonOptimizerConfig().version
    1
    """

    version: int

    def __init__(self, *, type: Literal["dimuon"] = "dimuon", version: Literal[1] = 1) -> None:  # noqa: A002
        super().__init__(type=_only(type, "dimuon"), version=_only(version, 1))


OptimizerConfig: TypeAlias = AdamOptimizerConfig | OptimizerConfigBase


class AdamParams(Options, frozen=True, kw_only=True, metaclass=SuggestingType):
    """The settings of one AdamW step; ``grad_clip_norm`` 0 means no clipping.

    A ``learning_rate`` of 0 is allowed, as the first step of a warm-up is: the step updates the optimizer's moments, counts,
    and clears the gradient, and the weights stay as they are.

    >>> AdamParams(learning_rate=1e-3).beta2
    0.95
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        coerce(self)
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"AdamParams.{name} must be a finite number ≥ 0, got {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"AdamParams.{name} must be in [0, 1), got {value}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"AdamParams.eps must be a finite number > 0, got {self.eps}")


class OptimParamsBase(OptimizerFamily):
    """The settings of one step of a family other than Adam."""

    type: str


class DimuonParams(OptimParamsBase):
    """The settings of one Dimuon step; ``grad_clip_norm`` 0 or less means no clipping.

    >>> DimuonParams(learning_rate=0.02).beta1
    0.9
    """

    learning_rate: float
    grad_clip_norm: float
    beta1: float

    def __init__(
        self,
        *,
        type: Literal["dimuon"] = "dimuon",  # noqa: A002
        learning_rate: float,
        grad_clip_norm: float = 0.0,
        beta1: float = 0.9,
    ) -> None:
        learning_rate = as_float(learning_rate, "DimuonParams.learning_rate")
        grad_clip_norm = as_float(grad_clip_norm, "DimuonParams.grad_clip_norm")
        beta1 = as_float(beta1, "DimuonParams.beta1")
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise ValueError(f"DimuonParams.learning_rate must be a finite number ≥ 0, got {learning_rate}")
        if not math.isfinite(grad_clip_norm):
            raise ValueError(f"DimuonParams.grad_clip_norm must be finite, got {grad_clip_norm}")
        if not 0 <= beta1 < 1:
            raise ValueError(f"DimuonParams.beta1 must be in [0, 1), got {beta1}")
        super().__init__(
            type=_only(type, "dimuon"),
            learning_rate=learning_rate,
            grad_clip_norm=grad_clip_norm,
            beta1=beta1,
        )


OptimParams: TypeAlias = AdamParams | OptimParamsBase

OptimizerConfigBase.KNOWN = {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig}
OptimParamsBase.KNOWN = {"dimuon": DimuonParams}


def _only(given: Any, value: Any) -> Any:
    if given != value:
        raise ValueError(f"this optimizer family must be {value!r}, got {given!r}")
    return value


def _rebuild(kind: type[OptimizerFamily], fields: dict[str, Any]) -> OptimizerFamily:
    return kind(**fields)
