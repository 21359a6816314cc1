"""Upper bounds on the size of an operation's results, computed from its arguments before it runs.

Every function takes the arguments of a call and returns a ``Cost`` that is never too low. It raises ``ValueError``, which
says why, if there is no bound. Arguments that the operation itself rejects are left to it: its message is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Size as Shape
from torch import Tensor, dtype
from torch import bool as torch_bool

__all__ = ["Cost", "Sizing", "tensors_in"]

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Cost(NamedTuple):
    """The elements of all results together, and the elements read and written to compute them."""

    elements: int
    effort: int


Sizing = Callable[[Args, Kwargs], Cost]

MAX_PIECES = 2**14  # that a tensor is split into
_PIECE_ELEMENTS, _PIECE_EFFORT = 128, 2048  # overhead of a piece, independent of its size
_SPLIT_NAMES = ("split_size_or_sections", "split_size")  # of the function, and of the method
_SORT_EFFORT = 16  # passes over the data that sorting compares to
_MULTIPLY_EFFORT = 32  # multiplications of a product that cost as much as one element read and written


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Every tensor among the values, at any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, slice):
            yield from tensors_in(value.start, value.stop, value.step)


def same_or_broadcast(args: Args, kwargs: Kwargs) -> Cost:
    """A result no larger than the arguments broadcast against each other."""
    given = list(tensors_in(args, kwargs))
    return _cost(_broadcast(tensor.shape for tensor in given), given)


def many_passes(args: Args, kwargs: Kwargs) -> Cost:
    """As ``same_or_broadcast``, for what sorts and returns values and positions."""
    cost = same_or_broadcast(args, kwargs)
    return Cost(2 * cost.elements, cost.effort * _SORT_EFFORT)


def quantiles(args: Args, kwargs: Kwargs) -> Cost:
    """All requested quantiles of every row."""
    cost = pairs(args, kwargs) if len(list(tensors_in(args, kwargs))) > 1 else same_or_broadcast(args, kwargs)
    return Cost(cost.elements, cost.effort * _SORT_EFFORT)


def positions(args: Args, kwargs: Kwargs) -> Cost:
    """The indices of nonzero elements: as many integers per element as it has dimensions."""
    given = list(tensors_in(args, kwargs))
    dims = max((tensor.ndim for tensor in given), default=1)
    return _cost(_broadcast(tensor.shape for tensor in given) * max(1, dims), given)


def reshaped(args: Args, kwargs: Kwargs) -> Cost:
    """The same elements in another shape; not the same bytes as another dtype."""
    if any(isinstance(value, dtype) for value in (*args, *kwargs.values())):
        raise ValueError("a tensor cannot be read as another dtype; convert it with to()")
    return same_or_broadcast(args, kwargs)


def chunked(args: Args, kwargs: Kwargs) -> Cost:
    """``chunk(tensor, chunks)``."""
    source, *rest = args
    count = _whole(rest[0] if rest else kwargs["chunks"])
    # An empty tensor gives as many empty pieces as were requested.
    return _pieces(source, count if 0 in source.shape else min(count, _longest(source)))


def divided(args: Args, kwargs: Kwargs) -> Cost:
    """``split(tensor, size)``, or a list of sizes."""
    source, *rest = args
    [sizes] = rest[:1] or [kwargs[name] for name in _SPLIT_NAMES if name in kwargs]
    count = len(sizes) if isinstance(sizes, list | tuple) else _longest(source) // max(1, _whole(sizes)) + 1
    return _pieces(source, count)


def unbound(args: Args, kwargs: Kwargs) -> Cost:
    """``unbind(tensor)``."""
    del kwargs
    return _pieces(args[0], _longest(args[0]))


def joined(args: Args, kwargs: Kwargs) -> Cost:
    """All the arguments, one after the other."""
    given = list(tensors_in(args, kwargs))
    return _cost(sum(tensor.numel() for tensor in given) + len(given), given)


def shape(args: Args, kwargs: Kwargs) -> Cost:
    """A shape, written as numbers or as one sequence."""
    return _cost(_product(_numbers(args[0] if args else kwargs.get("size"), *args[1:])), ())


def filled(args: Args, kwargs: Kwargs) -> Cost:
    """A shape, followed by the value to fill it with."""
    return shape(args[:1], kwargs)


def fresh(args: Args, kwargs: Kwargs) -> Cost:
    """A tensor, then the shape of a new one."""
    return shape(args[1:], kwargs)


def fresh_filled(args: Args, kwargs: Kwargs) -> Cost:
    """A tensor, then the shape of a new one, then the value to fill it with."""
    return shape(args[1:2], kwargs)


def counted(args: Args, kwargs: Kwargs) -> Cost:
    """``arange(end)`` or ``arange(start, end, step)``, each by position or by name."""
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    if given.get("dtype") is not None and not given["dtype"].is_floating_point:
        step = math.trunc(step)  # as torch converts it
    if step == 0:
        raise ValueError("its step is 0")
    return _cost(max(0, math.ceil((end - start) / step)), ())


def spaced(args: Args, kwargs: Kwargs) -> Cost:
    """``linspace(start, end, steps)``."""
    return _cost(_whole(kwargs["steps"] if "steps" in kwargs else args[2]), ())


def square(args: Args, kwargs: Kwargs) -> Cost:
    """``eye(n)`` or ``eye(n, m)``."""
    rows = _whole(args[0] if args else kwargs["n"])
    return _cost(rows * _whole(args[1] if len(args) > 1 else kwargs.get("m", rows)), ())


def widened(args: Args, kwargs: Kwargs) -> Cost:
    """A tensor, then the shape it is expanded to, with −1 where its own size stays."""
    own = args[0].shape
    wanted = _numbers(*args[1:]) or _numbers(kwargs.get("size"))
    padded = [1] * (len(wanted) - len(own)) + list(own)
    return _cost(_product(max(w, o) for w, o in zip_longest(wanted, padded, fillvalue=1)), args[:1])


def repeated(args: Args, kwargs: Kwargs) -> Cost:
    """A tensor, then how often it is repeated along each dimension."""
    times = _numbers(*args[1:]) or _numbers(kwargs.get("repeats") or kwargs.get("dims"))
    return _cost(args[0].numel() * _product(times), args[:1])


def interleaved(args: Args, kwargs: Kwargs) -> Cost:
    """A tensor, then how often each of its elements is repeated."""
    times = args[1] if len(args) > 1 else kwargs.get("repeats")
    if isinstance(times, Tensor):
        raise ValueError("it repeats by a tensor, so the size of its result is not known; repeat by a number")
    return _cost(args[0].numel() * _whole(times), args[:1])


def windowed(args: Args, kwargs: Kwargs) -> Cost:
    """``unfold(dimension, size, step)``: windows that may overlap."""
    size = _whole(args[2] if len(args) > 2 else kwargs["size"])
    return _cost(args[0].numel() * max(1, size), args[:1])


def padded(args: Args, kwargs: Kwargs) -> Cost:
    """``pad(tensor, pads)``, two numbers for each dimension from the last one on."""
    own = list(args[0].shape)
    pads = _numbers(args[1] if len(args) > 1 else kwargs.get("pad"))
    for axis, size in enumerate(reversed(own)):
        own[len(own) - 1 - axis] = size + sum(max(0, n) for n in pads[2 * axis : 2 * axis + 2])
    return _cost(_product(own), args[:1])


def encoded(args: Args, kwargs: Kwargs) -> Cost:
    """``one_hot(tensor, num_classes)``."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 1:
        raise ValueError("without num_classes the size of its result is not known; set it")
    return _cost(args[0].numel() * _whole(classes), args[:1])


def selected(args: Args, kwargs: Kwargs) -> Cost:
    """``index_select(tensor, dim, index)``."""
    source, index = args[0], args[2] if len(args) > 2 else kwargs["index"]
    dim = _whole(args[1] if len(args) > 1 else kwargs["dim"])
    rest = source.numel() // max(1, source.shape[dim]) if source.ndim else 1
    return _cost(rest * index.numel(), (source, index))


def indexed(args: Args, kwargs: Kwargs) -> Cost:
    """``tensor[index]``, also by masks and by tensors of positions."""
    del kwargs
    source, index = args
    if not isinstance(source, Tensor):
        return Cost(0, 0)  # one of several results, or a dimension of a shape
    items = index if isinstance(index, tuple) else (index,)
    sizes = list(source.shape)
    kept, fancy = 1, []
    taken = sum(_dims_taken(item) for item in items)
    for item in items:
        if item is Ellipsis:
            covered, sizes = sizes[: len(sizes) - taken], sizes[max(0, len(sizes) - taken) :]
            kept *= _product(covered)
            continue
        own, sizes = sizes[: _dims_taken(item)], sizes[_dims_taken(item) :]
        taken -= _dims_taken(item)
        if isinstance(item, slice):
            kept *= _product(own)
        elif isinstance(item, Tensor):
            fancy.append(Shape([item.numel()]) if item.dtype == torch_bool else item.shape)
        elif isinstance(item, list | tuple):
            if not all(isinstance(position, int) for position in item):
                raise ValueError("a list in an index must contain integers; give several indices as a tuple")
            fancy.append(Shape([len(item)]))
    masks = [item for item in items if isinstance(item, Tensor) and item.dtype == torch_bool]
    found = sum(mask.numel() * mask.ndim for mask in masks)  # a mask is converted to positions first
    return _cost(kept * _product(sizes) * _broadcast(fancy) + found, tensors_in(args))


def product(args: Args, kwargs: Kwargs) -> Cost:
    """``a @ b``, of vectors, matrices, or batches of matrices."""
    named = dict(kwargs)
    left = args[0] if args else named.pop("input")
    right, *_ = tensors_in(args[1:], named)
    a, b = list(left.shape), list(right.shape)
    inner = a[-1] if a else 1
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    elements = _broadcast((Shape(a[:-2]), Shape(b[:-2]))) * rows * columns
    return _cost(elements, (left, right), elements * inner // _MULTIPLY_EFFORT)


def pairs(args: Args, kwargs: Kwargs) -> Cost:
    """Every element of one tensor with every element of the other; ``outer``, and an upper bound of ``inner``."""
    left, right = list(tensors_in(args, kwargs))[:2]
    return _cost(left.numel() * right.numel(), (left, right))


def inner(args: Args, kwargs: Kwargs) -> Cost:
    """``inner(a, b)``: products over the last dimension of both."""
    left, right = list(tensors_in(args, kwargs))[:2]
    if not left.ndim or not right.ndim:
        return pairs(args, kwargs)  # one is a number
    elements = _product(left.shape[:-1]) * _product(right.shape[:-1])
    return _cost(elements, (left, right), elements * left.shape[-1] // _MULTIPLY_EFFORT)


def grid(args: Args, kwargs: Kwargs) -> Cost:
    """As many results as tensors, each with every combination of their elements."""
    given = list(tensors_in(args, kwargs))
    return _cost(len(given) * _product(max(1, tensor.numel()) for tensor in given), given)


def broadcast_all(args: Args, kwargs: Kwargs) -> Cost:
    """As many results as tensors, broadcast against each other."""
    given = list(tensors_in(args, kwargs))
    return _cost(len(given) * _broadcast(tensor.shape for tensor in given), given)


def vector_norm(args: Args, kwargs: Kwargs) -> Cost:
    """A norm of the elements; norms that need singular values are rejected."""
    order = args[1] if len(args) > 1 else kwargs.get("ord")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    one_axis = isinstance(dim, int) or (isinstance(dim, list | tuple) and len(dim) == 1)
    if order not in {None, "fro"} and args[0].ndim > 1 and not one_axis:
        raise ValueError("a norm of this order over a matrix is not supported; use torch.linalg.vector_norm")
    return same_or_broadcast(args, kwargs)


def contracted(args: Args, kwargs: Kwargs) -> Cost:
    """``einsum(equation, a)`` or ``einsum(equation, a, b)``, with a letter for every dimension."""
    del kwargs
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    if not re.fullmatch(r"[A-Za-z]*(,[A-Za-z]*)?(->[A-Za-z]*)?", text) or not 1 <= len(operands) <= 2:
        raise ValueError(
            "an equation names every dimension by a letter, for one or two tensors, as in 'ij,j->i'"
        )
    terms = text.partition("->")[0].split(",")
    if [len(term) for term in terms] != [operand.ndim for operand in operands]:
        raise ValueError(f"the equation {equation!r} does not name the dimensions of its tensors")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    letters = "".join(terms)
    result = text.partition("->")[2] if "->" in text else [x for x in sizes if letters.count(x) == 1]
    elements = _product(sizes.get(letter, 1) for letter in result)
    return _cost(elements, operands, _product(sizes.values()) // _MULTIPLY_EFFORT)


def _cost(elements: int, touched: Iterator[Tensor] | Sequence[Tensor], effort: int = 0) -> Cost:
    return Cost(elements, elements + effort + sum(tensor.numel() for tensor in touched))


def _pieces(source: Tensor, count: int) -> Cost:
    if count > MAX_PIECES:
        raise ValueError(f"it can have more than {MAX_PIECES} results")
    return _cost(source.numel() + count * _PIECE_ELEMENTS, (source,), count * _PIECE_EFFORT)


def _longest(source: Tensor) -> int:
    return max(source.shape, default=1)


def _broadcast(shapes: Iterator[Shape] | Sequence[Shape]) -> int:
    backwards = [tuple(reversed(own)) for own in shapes]
    return _product(max(sizes) for sizes in zip_longest(*backwards, fillvalue=1))


def _dims_taken(item: object) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch_bool else 1


def _numbers(*values: Any) -> list[int]:
    """Sizes, given one by one or as a sequence."""
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))]
    return [_whole(value) for value in flat if value is not None]


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"a size must be an integer, not {value!r}")
    return value


def _product(sizes: Any) -> int:
    """The elements of a shape; a size of 0 counts as 1, because a sum over that dimension has elements."""
    return math.prod(max(1, size) for size in sizes)
