"""Prompts whose keys and values are in memory, so that a prompt that begins like another skips that part.

A prompt stays after its request is done, least recently used first to go, until memory is needed for running
work or the cache's own limit is reached. Prompts are matched token by token, for the same owner and under the same
adapter object: nobody learns from hits or from speed what others have asked, and a snapshot of an adapter never
changes, so another snapshot is another object.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampler.kv_cache import PromptKV, bytes_per_token

if TYPE_CHECKING:
    import torch

    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.lora import Adapter

__all__ = ["CachedPrompt", "PromptCache", "PromptMatch"]

MIN_SHARED = 16
"""Shorter common beginnings are computed again: that costs less than looking for them."""

_Head: TypeAlias = tuple[str, int, bytes]


class CachedPrompt:
    """One prompt in memory; it cannot go while ``users`` work with it.

    It does not keep its adapter alive: a snapshot takes far more memory than a prompt, and once nobody can ask for
    it any more the prompt is of no use either.
    """

    def __init__(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], kv: PromptKV, owner: str
    ) -> None:
        self.tokens_P = tokens_P
        self.kv = kv
        self.users = 1
        self.head = _head(adapter, tokens_P, owner)
        self._adapter = None if adapter is None else ref(adapter)

    def belongs_to(self, adapter: Adapter | None) -> bool:
        """Whether the keys and values were computed under this adapter."""
        return adapter is None if self._adapter is None else self._adapter() is adapter

    @property
    def orphaned(self) -> bool:
        """Whether the adapter is gone."""
        return self._adapter is not None and self._adapter() is None


@dataclass(frozen=True)
class PromptMatch:
    """The best beginning for a prompt: what can be copied now, and what soon could be."""

    source: CachedPrompt | None = None
    available: int = 0
    """Tokens that can be taken from ``source``."""
    coming: int = 0
    """Tokens that could be taken once a prompt that is being prefilled has got that far."""

    @property
    def worth_waiting(self) -> bool:
        """Whether a prefill under way is about to compute a good part of this prompt."""
        return self.coming - self.available >= MIN_SHARED


class PromptCache:
    """All prompts in memory: those being prefilled, those sequences start from, and those kept for later.

    Example:
        >>> match = cache.match(adapter, tokens_P, limit=len(tokens_P) - 1)
        >>> prompt = cache.open(adapter, tokens_P, match)  # filled up to match.available
        >>> cache.release(prompt)  # kept for later, if it is complete
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype, *, keep_bytes: int) -> None:
        self._arch = arch
        self._dtype = dtype
        self._keep_bytes = keep_bytes
        # By use, the least recent first; the second index finds those that begin with the same tokens.
        self._prompts: OrderedDict[int, CachedPrompt] = OrderedDict()
        self._by_head: dict[_Head, list[CachedPrompt]] = {}
        self._idle_bytes = 0
        self.nbytes = 0
        """Bytes allocated for all prompts."""

    def cost(self, length: int) -> int:
        """Bytes that a prompt of this length takes."""
        return length * bytes_per_token(self._arch, self._dtype)

    def match(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], limit: int, owner: str = ""
    ) -> PromptMatch:
        """The longest common beginning with any prompt of this owner, at most ``limit`` tokens of it."""
        best = PromptMatch()
        for prompt in self._beginning_like(adapter, tokens_P, owner):
            shared = min(_common_length(tokens_P, prompt.tokens_P), limit)
            available = min(shared, prompt.kv.filled)
            coming = max(best.coming, shared)
            if available > best.available:
                best = PromptMatch(prompt, available, coming)
            elif coming > best.coming:
                best = PromptMatch(best.source, best.available, coming)
        return best if best.coming >= MIN_SHARED else PromptMatch()

    def exact(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str = ""
    ) -> CachedPrompt | None:
        """The same prompt, complete, with one more user; None if it is not there."""
        for prompt in self._beginning_like(adapter, tokens_P, owner):
            if prompt.kv.complete and np.array_equal(prompt.tokens_P, tokens_P):
                self.use(prompt)
                return prompt
        return None

    def open(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], match: PromptMatch, owner: str = ""
    ) -> CachedPrompt:
        """A new prompt with one user, filled with what ``match`` has available."""
        for orphan in [prompt for prompt in self._prompts.values() if prompt.orphaned and not prompt.users]:
            self._drop(orphan)
        prompt = CachedPrompt(adapter, tokens_P, PromptKV(self._arch, self._dtype, len(tokens_P)), owner)
        if match.source is not None:
            prompt.kv.copy_head(match.source.kv, match.available)
        self._prompts[id(prompt)] = prompt
        self._by_head.setdefault(prompt.head, []).append(prompt)
        self.nbytes += prompt.kv.nbytes
        return prompt

    def use(self, prompt: CachedPrompt) -> None:
        """Adds a user to a prompt in memory."""
        if not prompt.users:
            self._idle_bytes -= prompt.kv.nbytes
        prompt.users += 1
        self._prompts.move_to_end(id(prompt))

    def share(self, prompt: CachedPrompt, users: int) -> None:
        """Adds users to a prompt that has one."""
        assert prompt.users > 0
        prompt.users += users

    def release(self, prompt: CachedPrompt) -> None:
        """Takes one user away; a complete prompt without users is kept while there is room for it."""
        prompt.users -= 1
        if prompt.users:
            return
        self._idle_bytes += prompt.kv.nbytes
        if not prompt.kv.complete or prompt.kv.length <= MIN_SHARED:
            self._drop(prompt)
        while self._idle_bytes > self._keep_bytes:
            self.evict()

    def evict(self) -> bool:
        """Drops the least recently used prompt that nobody works with; False if there is none."""
        for prompt in self._prompts.values():
            if not prompt.users:
                self._drop(prompt)
                return True
        return False

    def _beginning_like(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str
    ) -> list[CachedPrompt]:
        """The prompts of this owner and adapter with the same first tokens."""
        candidates = self._by_head.get(_head(adapter, tokens_P, owner), [])
        return [prompt for prompt in candidates if prompt.belongs_to(adapter)]

    def _drop(self, prompt: CachedPrompt) -> None:
        del self._prompts[id(prompt)]
        self._by_head[prompt.head].remove(prompt)
        if not self._by_head[prompt.head]:
            del self._by_head[prompt.head]
        self._idle_bytes -= prompt.kv.nbytes
        self.nbytes -= prompt.kv.nbytes


def _head(adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str) -> _Head:
    """What prompts must have in common to share anything: the owner, the adapter object and the first tokens."""
    return owner, id(adapter), tokens_P[:MIN_SHARED].tobytes()


def _common_length(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
