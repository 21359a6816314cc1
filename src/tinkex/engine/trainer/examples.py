"""Validates datums: invalid input is rejected before any compute, with an error that names the field.

Shapes: N positions of a datum, K targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tinkex.engine.trainer.losses import CUSTOM, Loss, find_loss, read_settings
from tinkex.errors import InvalidInput
from tinkex.types.inputs import EncodedTextChunk

if TYPE_CHECKING:
    from tinkex.types.inputs import Datum, ModelInput
    from tinkex.types.tensors import TensorData

__all__ = ["MAX_RANK", "Example", "Limits", "LossInputs", "read_examples", "read_pass"]

MAX_RANK = 512
OBJECT_BYTES = 1000
"""About what the objects of an example take besides their arrays."""
MAX_SPARSE_CELLS = 2**24
"""Cells of all sparse tensors of a pass, as dense tensors: as many as a large request of dense ones has."""


@dataclass(frozen=True)
class Limits:
    """Limits of the base model."""

    vocab_size: int
    max_context: int


class LossInputs(Protocol):
    """The inputs that a custom loss declares besides the logprobs, and the rank of each."""

    @property
    def input_names(self) -> Sequence[str]:
        """The names of the inputs besides the logprobs."""
        ...

    @property
    def ranks(self) -> Mapping[str, int]:
        """The number of dimensions of every input, the logprobs included."""
        ...


@dataclass(frozen=True, eq=False)
class Example:
    """A valid datum as flat arrays, by position and then by target."""

    tokens_N: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]  # (N·K,)
    inputs: Mapping[str, npt.NDArray[np.float32]]  # each (N·K,)
    shape: tuple[int, ...]  # of the caller's target_tokens: (N,) or (N, K)
    graph_inputs: tuple[npt.NDArray[Any], ...] = ()  # of a custom loss, in the shapes of the caller

    @property
    def num_tokens(self) -> int:
        """Positions the model computes."""
        return len(self.tokens_N)

    @property
    def targets_per_position(self) -> int:
        """K."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        of_loss = sum(array.nbytes for array in (*self.inputs.values(), *self.graph_inputs))
        return OBJECT_BYTES + self.tokens_N.nbytes + self.targets.nbytes + of_loss


def read_pass(
    data: Sequence[Datum] | Sequence[Example],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    limits: Limits,
    custom_loss: LossInputs | None = None,
) -> tuple[Loss, list[Example]]:
    """The loss and the examples of a pass; raises ``InvalidInput`` if it cannot run.

    Needs no weights and no torch; safe to call from any thread. Datums that have been read already are returned as they are.

    Example:
        >>> datum = Datum(model_input=ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})
        >>> loss, examples = read_pass([datum], "cross_entropy", None, Limits(vocab_size=8, max_context=4))
        >>> loss.name, len(examples)
        ('cross_entropy', 1)
    """
    loss = find_loss(loss_fn)
    if data and isinstance(data[0], Example):
        return loss, cast("list[Example]", data)
    settings = read_settings(loss, loss_fn_config)
    if loss is CUSTOM and custom_loss is None:
        raise InvalidInput(
            "loss_fn 'custom' runs a loss from create_custom_loss; set its id in loss_fn_config: {\"loss_id\": ...}"
        )
    if loss is not CUSTOM and custom_loss is not None:
        raise InvalidInput(f"loss_fn {loss.name!r} takes no custom loss; send loss_fn 'custom' to run it")
    return loss, read_examples(cast("Sequence[Datum]", data), loss, settings, limits, custom_loss)


def read_examples(
    data: Sequence[Datum],
    loss: Loss,
    settings: Mapping[str, float],
    limits: Limits,
    graph: LossInputs | None = None,
) -> list[Example]:
    """The datums as examples; raises ``InvalidInput``, which names the first datum and key that is not valid.

    Optional inputs get their defaults: ``weights`` are ones, clip thresholds come from the settings. A custom loss reads
    the inputs that its ``graph`` declares, with the ranks declared there, and ignores the others.

    Example:
        >>> datum = Datum(model_input=ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})
        >>> read_examples([datum], LOSSES["cross_entropy"], {}, Limits(vocab_size=8, max_context=4))[0].shape
        (2,)
    """
    if len(data) == 0:
        raise InvalidInput("data is empty; send at least one datum")
    _check_sparse(data)
    if graph is not None:
        return [_read_custom(index, datum, graph, limits) for index, datum in enumerate(data)]
    return [_read(index, datum, loss, settings, limits) for index, datum in enumerate(data)]


def _read(index: int, datum: Datum, loss: Loss, settings: Mapping[str, float], limits: Limits) -> Example:
    tokens_N = _tokens(index, datum.model_input, limits)
    given = datum.loss_fn_inputs
    _reject_unknown(index, given, loss)
    targets = _targets(index, given["target_tokens"], len(tokens_N), loss, limits)
    inputs = {
        name: _values(index, name, given[name], targets.shape)
        for name in (*loss.inputs, *loss.optional_inputs)
        if name in given
    }
    for name in loss.optional_inputs:
        inputs.setdefault(name, np.full(targets.size, settings.get(name, 1.0), dtype=np.float32))
    for name in settings:
        if name not in inputs:
            inputs[name] = np.full(targets.size, settings[name], dtype=np.float32)
    _check_thresholds(index, inputs)
    _check_sequence_mask(index, inputs)
    return Example(tokens_N, targets.reshape(-1), inputs, targets.shape)


def _read_custom(index: int, datum: Datum, graph: LossInputs, limits: Limits) -> Example:
    tokens_N = _tokens(index, datum.model_input, limits)
    given = datum.loss_fn_inputs
    for name in ("target_tokens", *graph.input_names):
        if name not in given:
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs lacks {name!r}, which this custom loss needs; "
                f"it has {', '.join(given) or 'nothing'}"
            )
    targets = _targets(index, given["target_tokens"], len(tokens_N), CUSTOM, limits)
    _check_rank(
        f"data[{index}].loss_fn_inputs['target_tokens']", targets, graph.ranks["logprobs"], "logprobs"
    )
    values = []
    for name in graph.input_names:
        array = given[name].to_numpy()
        if graph.ranks[name] == 0 and given[name].shape is None and array.size == 1:
            array = array.reshape(())  # on the wire, the empty shape of a scalar is the same as none
        _check_rank(f"data[{index}].loss_fn_inputs[{name!r}]", array, graph.ranks[name], name)
        values.append(array)
    return Example(tokens_N, targets.reshape(-1), {}, targets.shape, tuple(values))


def _check_sparse(data: Sequence[Datum]) -> None:
    """Rejects sparse tensors that do not fit into memory when dense, or that give one cell two values."""
    num_cells = 0
    for index, datum in enumerate(data):
        for name, tensor in datum.loss_fn_inputs.items():
            crow, columns, shape = tensor.sparse_crow_indices, tensor.sparse_col_indices, tensor.shape
            if crow is None or columns is None or shape is None:
                continue
            where = f"data[{index}].loss_fn_inputs[{name!r}]"
            num_cells += math.prod(shape)
            if num_cells > MAX_SPARSE_CELLS:
                raise InvalidInput(
                    f"{where} has shape {_format_shape(tuple(shape))}; with it, the sparse tensors of this pass have more "
                    f"than {MAX_SPARSE_CELLS} cells. Send fewer columns, or the datums in several passes"
                )
            listed = np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + np.asarray(columns, np.int64)
            if np.unique(listed).size < listed.size:
                raise InvalidInput(f"{where} lists a cell twice; give every cell one value")


def _check_rank(where: str, array: npt.NDArray[Any], rank: int, name: str) -> None:
    if array.ndim != rank:
        raise InvalidInput(
            f"{where} has shape {_format_shape(array.shape)}, and this custom loss declares {name!r} with rank {rank}; "
            "send a tensor of that rank, or create the loss with other input_ranks"
        )


def _tokens(index: int, model_input: ModelInput, limits: Limits) -> npt.NDArray[np.int64]:
    for position, chunk in enumerate(model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInput(
                f"data[{index}].model_input.chunks[{position}] is of type {chunk.type!r}; "
                "this model reads text only, so send chunks of type 'encoded_text'"
            )
    tokens_N = model_input.to_numpy().astype(np.int64)
    if tokens_N.size == 0:
        raise InvalidInput(f"data[{index}].model_input is empty; send at least one token or omit the datum")
    if tokens_N.size > limits.max_context:
        raise InvalidInput(
            f"data[{index}].model_input has {tokens_N.size} tokens, and the model's context is {limits.max_context}; "
            "truncate or split the datum"
        )
    _check_ids(f"data[{index}].model_input", tokens_N, limits)
    return tokens_N


def _reject_unknown(index: int, given: Mapping[str, TensorData], loss: Loss) -> None:
    known = ("target_tokens", *loss.inputs, *loss.optional_inputs)
    for name in given:
        if name not in known:
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs has {name!r}, which {loss.name} does not read; "
                f"it reads {', '.join(known)}. Remove it, or choose the loss that uses it"
            )
    for name in ("target_tokens", *loss.inputs):
        if name not in given:
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs lacks {name!r}, which {loss.name} needs; "
                f"it has {', '.join(given) or 'nothing'}"
            )


def _targets(
    index: int, tensor: TensorData, num_tokens: int, loss: Loss, limits: Limits
) -> npt.NDArray[np.int64]:
    where = f"data[{index}].loss_fn_inputs['target_tokens']"
    if tensor.dtype != "int64":
        raise InvalidInput(f"{where} has dtype {tensor.dtype}; token ids must be int64")
    targets: npt.NDArray[np.int64] = tensor.to_numpy(pad_value=0)
    allowed = "(N,) or (N, K)" if loss.many_targets else "(N,)"
    if targets.ndim != 1 and not (loss.many_targets and targets.ndim == 2 and targets.shape[1] > 0):
        raise InvalidInput(
            f"{where} has shape {_format_shape(targets.shape)}; {loss.name} takes {allowed} with N = {num_tokens}, "
            "the number of input tokens"
        )
    if targets.shape[0] != num_tokens:
        raise InvalidInput(
            f"{where} has shape {_format_shape(targets.shape)}, and data[{index}].model_input {num_tokens} tokens; "
            "give one row per input token: position i predicts the token after it"
        )
    _check_ids(where, targets.reshape(-1), limits)
    return targets


def _values(index: int, name: str, tensor: TensorData, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A float input, flat; integers (such as a mask) are converted."""
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    values = tensor.to_numpy(pad_value=0)
    if values.shape != shape:
        raise InvalidInput(
            f"{where} has shape {_format_shape(values.shape)}, and target_tokens {_format_shape(shape)}; "
            "give one value per target token"
        )
    flat: npt.NDArray[np.float32] = values.reshape(-1).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(flat))
    if wrong.size:
        raise InvalidInput(
            f"{where} is not finite at flat position {int(wrong[0])} ({flat[wrong[0]]}), "
            f"{wrong.size} such values in all; replace them, for instance with 0 where nothing is trained"
        )
    return flat


def _check_ids(where: str, ids: npt.NDArray[Any], limits: Limits) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if wrong.size:
        raise InvalidInput(
            f"{where} has token id {int(ids[wrong[0]])} at flat position {int(wrong[0])}; "
            f"ids of this model lie in 0…{limits.vocab_size - 1}. Encode with this model's tokenizer"
        )


def _check_thresholds(index: int, inputs: Mapping[str, npt.NDArray[np.float32]]) -> None:
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is None or high is None:
        return
    crossed = np.flatnonzero(low > high)
    if crossed.size:
        at = int(crossed[0])
        raise InvalidInput(
            f"data[{index}]: at position {at} clip_low_threshold {low[at]:g} is above clip_high_threshold {high[at]:g}; "
            "they bound the ratio exp(lp − logprobs) from below and above"
        )


def _check_sequence_mask(index: int, inputs: Mapping[str, npt.NDArray[np.float32]]) -> None:
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and not mask.any() and inputs["advantages"].any():
        raise InvalidInput(
            f"data[{index}].loss_fn_inputs['sequence_ratio_mask'] marks no token, so the sequence has no ratio, "
            "but 'advantages' are not all 0; mark the sampled tokens with 1"
        )


def _format_shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(str(n) for n in shape)}{',' if len(shape) == 1 else ''})"
