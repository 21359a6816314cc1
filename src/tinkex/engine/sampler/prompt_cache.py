"""The prefix cache: keys and values of prompts, so that a prompt with the same prefix as another skips that part.

A prompt stays after its request is done, until memory is needed for running requests or the cache reaches its limit; the
least recently used prompt is evicted first. Prompts are matched token by token, only for the same owner and the same
adapter object. So cache hits and latency reveal nothing about other users' prompts. Snapshots of an adapter are immutable:
another snapshot is another object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampler.kv_cache import PromptKV, bytes_per_token
from tinkex.engine.sampler.prompt_scores import KnownScores

if TYPE_CHECKING:
    import torch

    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.lora import Adapter

__all__ = ["CachedPrompt", "PromptCache", "PromptMatch"]

MIN_SHARED = 16
"""Shorter common prefixes are computed again: that costs less than searching for them."""

_PrefixKey: TypeAlias = tuple[str, int, bytes]


class CachedPrompt:
    """One prompt in the cache, reference-counted by ``users``; it is not evicted while it has any.

    It does not keep its adapter alive: a snapshot takes far more memory than a prompt, and without the adapter the prompt
    cannot be matched.
    """

    def __init__(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], kv: PromptKV, owner: str
    ) -> None:
        self.tokens_P = tokens_P
        self.kv = kv
        self.scores: KnownScores | None = None
        """The scores of its tokens, as far as they are computed; None if they were not requested."""
        self.users = 1
        self.prefix_key = _prefix_key(adapter, tokens_P, owner)
        self._adapter = None if adapter is None else ref(adapter)

    def belongs_to(self, adapter: Adapter | None) -> bool:
        """Whether the keys and values were computed under this adapter."""
        return adapter is None if self._adapter is None else self._adapter() is adapter

    @property
    def orphaned(self) -> bool:
        """Whether the adapter no longer exists."""
        return self._adapter is not None and self._adapter() is None


@dataclass(frozen=True)
class PromptMatch:
    """The best prefix match for a prompt: what can be copied now, and what will be computed soon."""

    source: CachedPrompt | None = None
    available: int = 0
    """Tokens that can be copied from ``source``."""
    pending: int = 0
    """Tokens that can be copied once a prompt in prefill has computed them."""

    @property
    def worth_waiting(self) -> bool:
        """Whether a prefill in flight will compute a useful part of this prompt."""
        return self.pending - self.available >= MIN_SHARED


class PromptCache:
    """All prompts in memory: those in prefill, those that sequences continue, and idle ones.

    Example:
        >>> match = cache.match(adapter, tokens_P, limit=len(tokens_P) - 1)
        >>> prompt = cache.allocate(adapter, tokens_P, match)  # filled up to match.available
        >>> cache.release(prompt)  # stays cached, if it is complete
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype, *, keep_bytes: int) -> None:
        self._arch = arch
        self._dtype = dtype
        self._keep_bytes = keep_bytes
        # In order of use, the least recent first; the second index finds those with the same prefix.
        self._prompts: OrderedDict[int, CachedPrompt] = OrderedDict()
        self._by_prefix: dict[_PrefixKey, list[CachedPrompt]] = {}
        self._idle_bytes = 0
        self.nbytes = 0
        """Bytes allocated for all prompts."""

    def cost(self, length: int) -> int:
        """Bytes that a prompt of this length takes."""
        return length * bytes_per_token(self._arch, self._dtype)

    def match(
        self,
        adapter: Adapter | None,
        tokens_P: npt.NDArray[np.int32],
        limit: int,
        owner: str = "",
        *,
        can_reuse: Callable[[KnownScores | None], bool] | None = None,
    ) -> PromptMatch:
        """The longest common prefix with any prompt of this owner, at most ``limit`` tokens of it.

        The limit does not apply to prompts whose scores ``can_reuse`` accepts.
        """
        best = PromptMatch()
        for prompt in self._with_prefix(adapter, tokens_P, owner):
            common = _common_length(tokens_P, prompt.tokens_P)
            shared = min(common, limit)
            if can_reuse is not None and can_reuse(prompt.scores):
                # The last common token is computed again: its row has the scores of the first token that differs.
                shared = max(shared, common - 1)
            available = min(shared, prompt.kv.filled)
            pending = max(best.pending, shared)
            if available > best.available:
                best = PromptMatch(prompt, available, pending)
            elif pending > best.pending:
                best = PromptMatch(best.source, best.available, pending)
        return best if best.pending >= MIN_SHARED else PromptMatch()

    def acquire_exact(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str = ""
    ) -> CachedPrompt | None:
        """The same prompt, complete, with one more user; None if it is not cached."""
        for prompt in self._with_prefix(adapter, tokens_P, owner):
            if prompt.kv.complete and np.array_equal(prompt.tokens_P, tokens_P):
                self.acquire(prompt)
                return prompt
        return None

    def allocate(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], match: PromptMatch, owner: str = ""
    ) -> CachedPrompt:
        """A new prompt with one user, filled with the tokens that ``match`` has available."""
        for orphan in [prompt for prompt in self._prompts.values() if prompt.orphaned and not prompt.users]:
            self._drop(orphan)
        prompt = CachedPrompt(adapter, tokens_P, PromptKV(self._arch, self._dtype, len(tokens_P)), owner)
        if match.source is not None:
            prompt.kv.copy_prefix(match.source.kv, match.available)
        self._prompts[id(prompt)] = prompt
        self._by_prefix.setdefault(prompt.prefix_key, []).append(prompt)
        self.nbytes += prompt.kv.nbytes
        return prompt

    def acquire(self, prompt: CachedPrompt) -> None:
        """Adds a user to a cached prompt."""
        if not prompt.users:
            self._idle_bytes -= prompt.kv.nbytes
        prompt.users += 1
        self._prompts.move_to_end(id(prompt))

    def add_users(self, prompt: CachedPrompt, users: int) -> None:
        """Adds users to a prompt that already has one."""
        assert prompt.users > 0
        prompt.users += users

    def release(self, prompt: CachedPrompt) -> None:
        """Removes one user; a complete prompt without users stays cached while it fits."""
        prompt.users -= 1
        if prompt.users:
            return
        self._idle_bytes += prompt.kv.nbytes
        if not prompt.kv.complete or prompt.kv.length <= MIN_SHARED:
            self._drop(prompt)
        while self._idle_bytes > self._keep_bytes:
            self.evict()

    def evict(self) -> bool:
        """Drops the least recently used prompt without users; False if there is none."""
        for prompt in self._prompts.values():
            if not prompt.users:
                self._drop(prompt)
                return True
        return False

    def _with_prefix(
        self, adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str
    ) -> list[CachedPrompt]:
        """The prompts of this owner and adapter with the same first ``MIN_SHARED`` tokens."""
        candidates = self._by_prefix.get(_prefix_key(adapter, tokens_P, owner), [])
        return [prompt for prompt in candidates if prompt.belongs_to(adapter)]

    def _drop(self, prompt: CachedPrompt) -> None:
        del self._prompts[id(prompt)]
        self._by_prefix[prompt.prefix_key].remove(prompt)
        if not self._by_prefix[prompt.prefix_key]:
            del self._by_prefix[prompt.prefix_key]
        self._idle_bytes -= prompt.kv.nbytes
        self.nbytes -= prompt.kv.nbytes


def _prefix_key(adapter: Adapter | None, tokens_P: npt.NDArray[np.int32], owner: str) -> _PrefixKey:
    """What prompts must have in common to share a prefix: the owner, the adapter object and the first tokens."""
    return owner, id(adapter), tokens_P[:MIN_SHARED].tobytes()


def _common_length(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
