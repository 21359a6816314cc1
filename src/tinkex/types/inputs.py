"""Model inputs: text, images and audio as chunks, and the datum that adds the loss inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tinkex.types.base import Options, pydantic_field
from tinkex.types.coercion import as_bytes, as_token_ids, coerce, packed_array
from tinkex.types.display import elided, suggestion
from tinkex.types.tensors import TensorData, TensorDtype

if TYPE_CHECKING:
    import torch

__all__ = [
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LossFnInputs",
    "ModelInput",
    "ModelInputChunk",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "SampledProvenanceSpan",
]

ImageFormat = Literal["png", "jpeg"]


class EncodedTextChunk(Options, frozen=True, kw_only=True):
    """Text as token ids.

    >>> EncodedTextChunk(tokens=[1, 2, 3]).length
    3
    """

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tokens", as_token_ids(self.tokens))
        kind: str = self.type
        if kind != "encoded_text":
            coerce(self)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


class ImageChunk(Options, frozen=True, kw_only=True):
    """An image, as the bytes of a PNG or JPEG file (a base64 string is decoded)."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "data", as_bytes(self.data, "ImageChunk.data"))
        coerce(self)

    @property
    def length(self) -> int:
        """Number of tokens of the image, from ``expected_tokens``."""
        return _expected(self.expected_tokens, "ImageChunk")


class ImageAssetPointerChunk(Options, frozen=True, kw_only=True):
    """An image that is stored on the server."""

    location: str
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """Number of tokens of the image, from ``expected_tokens``."""
        return _expected(self.expected_tokens, "ImageAssetPointerChunk")


class DmelChunk(Options, frozen=True, kw_only=True):
    """Audio as a serialised mel tensor; its first dimension is the number of tokens."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dmel", as_bytes(self.dmel, "DmelChunk.dmel"))
        coerce(self)

    @property
    def length(self) -> int:
        """Number of tokens: the first dimension of the tensor."""
        return _dmel_rows(self.dmel)


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk

CHUNK_TYPES: Mapping[str, type[ModelInputChunk]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}


class ModelInput:
    """A prompt or training sequence: the list ``chunks``, usually one of text.

    >>> prompt = ModelInput.from_ints([1, 2]).append_int(3)
    >>> prompt.to_ints(), prompt.length
    ([1, 2, 3], 3)
    >>> ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2])]) == ModelInput.from_ints([1, 2])
    True
    """

    __slots__ = ("chunks",)

    chunks: list[ModelInputChunk]

    def __init__(self, *, chunks: Sequence[ModelInputChunk | Mapping[str, Any]]) -> None:
        object.__setattr__(self, "chunks", [_chunk(c) for c in chunks])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ModelInput is frozen; create a new one instead of setting {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _model_input, (self.chunks,)

    def __eq__(self, other: object) -> bool:
        return self.chunks == other.chunks if isinstance(other, ModelInput) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # chunks hold lists

    def __repr__(self) -> str:
        return f"ModelInput(chunks={elided(self.chunks)})"

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """Returns an input of one text chunk with the token ids ``tokens``.

        >>> ModelInput.from_ints([1, 2, 3]).length
        3
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def from_text(cls, text: str, tokenizer: Any, **options: Any) -> ModelInput:
        """Returns an input of one text chunk: ``text``, encoded as it is, without a chat template.

        ``tokenizer`` is a tokenizer, or a training or sampling client, whose tokenizer is used. ``options`` are
        those of its ``encode``, such as ``add_special_tokens=False``::

            prompt = types.ModelInput.from_text("Hello", sampler)
            prompt = types.ModelInput.from_text("Hello", tinkex.tokenizers.get_tokenizer("Qwen/Qwen3-0.6B"))
        """
        if not isinstance(text, str):
            raise TypeError(f"from_text encodes a str, got {type(text).__name__}")
        if callable(getattr(tokenizer, "get_tokenizer", None)):
            tokenizer = tokenizer.get_tokenizer()
        if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
            raise TypeError(
                f"from_text needs a tokenizer, or a client that has one, got {type(tokenizer).__name__}; load one by "
                "the name of its model with tinkex.tokenizers.get_tokenizer(name)"
            )
        return cls.from_ints(tokenizer.encode(text, **options))

    @classmethod
    def empty(cls) -> ModelInput:
        """Returns an input without chunks, to extend with ``append``.

        >>> ModelInput.empty().append_int(1).to_ints()
        [1]
        """
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """Returns all token ids; raises ``ValueError`` for chunks that are not text.

        >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
        [1, 2, 3]
        """
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(
                    f"to_ints supports text only, but the input has a chunk of type {chunk.type!r}"
                )
            tokens.extend(chunk.tokens)
        return tokens

    def to_numpy(self) -> npt.NDArray[np.int32]:
        """Returns all token ids as int32; raises ``ValueError`` for chunks that are not text.

        >>> ModelInput.from_ints([1, 2]).to_numpy()
        array([1, 2], dtype=int32)
        """
        return np.asarray(self.to_ints(), dtype=np.int32)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Returns a new input with ``chunk``, text or an image, appended.

        >>> ModelInput.from_ints([1]).append(EncodedTextChunk(tokens=[2, 3])).to_ints()
        [1, 2, 3]
        """
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Returns a new input with the token id ``token`` appended.

        >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
        [1, 2, 3]
        """
        return self.append(EncodedTextChunk(tokens=[token]))

    @property
    def length(self) -> int:
        """Number of tokens of the model's input."""
        return sum(chunk.length for chunk in self.chunks)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> ModelInput:
        """Returns a copy, with the chunks of ``update`` if given; values are frozen, so ``deep`` has no effect.

        >>> ModelInput.from_ints([1]).model_copy(update={"chunks": []}).to_ints()
        []
        """
        del deep
        return ModelInput(chunks=(update or {}).get("chunks", self.chunks))

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
        """Returns the input as plain dictionaries.

        Bytes are base64 in either ``mode``. ``include`` and ``exclude`` name fields, of which there is one, ``chunks``.
        ``exclude_defaults`` and ``exclude_none`` omit such values of chunks; ``by_alias`` has no effect.

        >>> ModelInput.from_ints([7]).model_dump()
        {'chunks': [{'tokens': [7], 'type': 'encoded_text'}]}
        """
        del by_alias  # chunks have none
        if (include is not None and "chunks" not in include) or "chunks" in (exclude or ()):
            return {}
        options: dict[str, Any] = {"exclude_defaults": exclude_defaults, "exclude_none": exclude_none}
        return {"chunks": [c.model_dump(mode=mode, **options) for c in self.chunks]}

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        """Returns the input as JSON: on one line, or with ``indent`` spaces per level; ``exclude_none`` omits such values.

        >>> ModelInput.from_ints([7]).model_dump_json()
        '{"chunks":[{"tokens":[7],"type":"encoded_text"}]}'
        """
        text = msgspec.json.encode(self.model_dump(exclude_none=exclude_none, mode="json"))
        return (text if indent is None else msgspec.json.format(text, indent=indent)).decode()

    @classmethod
    def model_validate(cls, obj: Any) -> ModelInput:
        """Builds the input from ``obj``, a mapping with ``chunks``; an instance is returned as it is.

        >>> ModelInput.model_validate({"chunks": [{"type": "encoded_text", "tokens": [7]}]}).to_ints()
        [7]
        """
        from tinkex.types import plain

        return obj if isinstance(obj, cls) else plain.from_plain(obj, cls)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields the field and its value, so that ``dict(prompt)`` is a shallow dump."""
        return iter((("chunks", self.chunks),))

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """Supports inputs as fields of pydantic models, like the official type."""
        return pydantic_field(cls)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray) -> ModelInput:
        """Builds the input from the JSON text ``json_data``.

        >>> ModelInput.model_validate_json('{"chunks": [{"type": "encoded_text", "tokens": [7]}]}').to_ints()
        [7]
        """
        try:
            return cls.model_validate(msgspec.json.decode(json_data))
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class PromptProvenanceSpan:
    """Marks tokens that come from the prompt of a sampled sequence."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self.sequence_id, self.offset, self.length)


@dataclass(frozen=True, kw_only=True)
class SampledProvenanceSpan:
    """Marks tokens that were sampled in a given sequence."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self.sequence_id, self.offset, self.length)


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]
LossFnInputs: TypeAlias = dict[str, TensorData]
TensorLike: TypeAlias = "TensorData | npt.NDArray[Any] | Sequence[Any] | torch.Tensor"

LIST_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
_SPARSIFIED = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, init=False)
class Datum:
    """One training example: ``model_input``, the model's input, and the per-token inputs of the loss.

    Values of ``loss_fn_inputs`` may be ``TensorData``, torch tensors, numpy arrays, or, for the standard keys, lists;
    they are converted to ``TensorData``. ``model_input_spans`` and ``loss_fn_input_spans`` are those of :meth:`with_provenance`.

    >>> d = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
    >>> d.loss_fn_inputs["target_tokens"].dtype
    'int64'
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, TensorLike] | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise TypeError(
                f"Datum.model_input must be a ModelInput, got {type(model_input).__name__}; "
                "build one with ModelInput.from_ints(tokens)"
            )
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans must be given together; only one was")
        put = object.__setattr__
        put(self, "model_input", model_input)
        put(self, "loss_fn_inputs", {k: _tensor(k, v) for k, v in (loss_fn_inputs or {}).items()})
        put(self, "model_input_spans", model_input_spans)
        put(self, "loss_fn_input_spans", loss_fn_input_spans)

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Datum:
        """Returns the datum with the provenance of its tokens.

        ``model_input`` and ``loss_fn_inputs`` are the spans of the input and of the targets; each covers all tokens.

        >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        >>> prompt, sampled = PromptProvenanceSpan(sequence_id="s", length=2), SampledProvenanceSpan(sequence_id="s", length=2)
        >>> len(datum.with_provenance([prompt], [sampled]).loss_fn_input_spans)
        1
        """
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is None or targets.to_numpy().ndim != 1:
            raise ValueError("with_provenance needs one-dimensional target_tokens")
        for name, spans, length in (
            ("model_input", model_input, self.model_input.length),
            ("loss_fn_inputs", loss_fn_inputs, targets.array.size),
        ):
            covered = sum(span.length for span in spans)
            if covered != length:
                raise ValueError(f"the {name} spans cover {covered} tokens of {length}; they must cover all")
        return Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)


def _model_input(chunks: list[ModelInputChunk]) -> ModelInput:
    return ModelInput(chunks=chunks)


def _chunk(chunk: ModelInputChunk | Mapping[str, Any]) -> ModelInputChunk:
    if isinstance(chunk, EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk):
        return chunk
    if not isinstance(chunk, Mapping):
        raise TypeError(f"a chunk must be one of the chunk types, got {type(chunk).__name__}")
    kind = CHUNK_TYPES.get(str(chunk.get("type", "encoded_text")))
    if kind is None:
        raise ValueError(f"unknown chunk type {chunk.get('type')!r}; known: {', '.join(CHUNK_TYPES)}")
    return kind.model_validate(chunk)


def _tensor(key: Any, value: Any) -> TensorData:
    if not isinstance(key, str):
        raise TypeError(f"the names in loss_fn_inputs are strings, got {key!r}")
    if isinstance(value, TensorData):
        return value
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    if isinstance(value, list | tuple):
        if key not in LIST_DTYPES:
            raise KeyError(
                f"loss_fn_inputs[{key!r}] is a list, and only {', '.join(LIST_DTYPES)} have a default dtype; "
                f"pass a TensorData, numpy array or torch tensor instead{suggestion(key, LIST_DTYPES)}"
            )
        is_int = LIST_DTYPES[key] == "int64"
        packed = packed_array(value, "q" if is_int else "f", np.dtype("<i8" if is_int else "<f4"))
        if packed is not None:
            return TensorData.from_numpy(packed)
        try:
            array = np.asarray(value, dtype=np.int64 if is_int else np.float32)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"loss_fn_inputs[{key!r}] must be a rectangular numeric array, and ragged nested lists are not ({error})"
            ) from error
        return TensorData.from_numpy(array)
    if type(value).__module__.split(".")[0] == "torch":
        if key in _SPARSIFIED and value.ndim == 2:
            return TensorData.from_torch_sparse(value)
        return TensorData.from_torch(value)
    raise TypeError(
        f"loss_fn_inputs[{key!r}] must be a TensorData, torch tensor, numpy array or list, "
        f"got {type(value).__name__}"
    )


def _check_span(sequence_id: str, offset: int, length: int) -> None:
    if not sequence_id:
        raise ValueError("a provenance span needs a sequence_id")
    if offset < 0 or length < 0:
        raise ValueError(f"a provenance span needs offset and length ≥ 0, got {offset} and {length}")


def _expected(expected_tokens: int | None, kind: str) -> int:
    if expected_tokens is None:
        raise ValueError(f"the length of an {kind} is unknown; set its expected_tokens")
    return expected_tokens


def _dmel_rows(dmel: bytes) -> int:
    """Reads dimension 0: optional marker 254, a dtype byte, then varints ndim and dims."""
    position = 1 if dmel[:1] == b"\xfe" else 0
    values: list[int] = []
    position += 1
    while len(values) < 2:
        shift = value = 0
        while True:
            if position >= len(dmel):
                raise ValueError("DmelChunk.dmel is not a serialised tensor: it ends inside its header")
            byte = dmel[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        values.append(value)
        if values[0] == 0:
            raise ValueError("DmelChunk.dmel must have at least one dimension")
    return values[1]
