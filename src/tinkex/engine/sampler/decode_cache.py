"""The KV cache of decoding sequences, as the sampler uses it: blocks for the compiled core, slots for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.limits import SlotSizes

__all__ = ["DecodeCache", "DecodeSlot"]


class DecodeSlot(Protocol):
    """The keys and values of one decoding sequence; ``length`` counts the tokens of the sequence."""

    length: int

    @property
    def own_length(self) -> int:
        """How many tokens the slot itself holds."""
        ...

    @property
    def shared(self) -> PromptKV | None:
        """The prompt whose first tokens all its continuations share, if they do."""
        ...


class DecodeCache(Protocol):
    """The slots of all decoding sequences; each kind of cache takes only its own kind of slots."""

    @property
    def sizes(self) -> SlotSizes:
        """How much memory slots take."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def __len__(self) -> int: ...

    def cost(self, length: int) -> int:
        """Bytes that would be allocated for a slot that holds ``length`` tokens and has room for one more."""
        ...

    def add(self, prompt: PromptKV) -> DecodeSlot:
        """A slot for a new sequence that continues ``prompt``, which must stay in memory if the slot has it ``shared``."""
        ...

    def remove(self, slot: Any) -> None:
        """Frees a slot."""
        ...

    def is_full(self, slot: Any) -> bool:
        """Whether the slot must grow before it can hold another token."""
        ...

    def grow(self, slot: Any) -> None:
        """Makes room for more tokens; the slot stays the same object."""
        ...

    def trim(self) -> None:
        """Frees memory that no slot uses."""
        ...
