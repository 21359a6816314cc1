"""Where decoding sequences keep their keys and values, as the sampler sees it: blocks or slots, by who computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.limits import SlotSizes

__all__ = ["Place", "Places"]


class Place(Protocol):
    """One decoding sequence's place; ``length`` counts the tokens of the sequence."""

    length: int

    @property
    def own_length(self) -> int:
        """How many tokens the place itself holds."""
        ...

    @property
    def shared(self) -> PromptKV | None:
        """The prompt that holds the first tokens for all sequences that go on from it, if it does."""
        ...


class Places(Protocol):
    """The places of all decoding sequences; each kind takes back only places of its own."""

    @property
    def sizes(self) -> SlotSizes:
        """How much memory places take."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def __len__(self) -> int: ...

    def cost(self, length: int) -> int:
        """Bytes that would be allocated for a place that holds so many tokens and takes one more."""
        ...

    def join(self, prompt: PromptKV) -> Place:
        """A place for a new sequence that goes on from ``prompt``; if it is ``shared``, the prompt must stay."""
        ...

    def leave(self, slot: Any) -> None:
        """Gives a place back."""
        ...

    def is_full(self, slot: Any) -> bool:
        """Whether the place must grow before it can take another token."""
        ...

    def grow(self, slot: Any) -> None:
        """Makes room for more tokens; the place stays the same object."""
        ...

    def trim(self) -> None:
        """Gives back what nobody uses."""
        ...
