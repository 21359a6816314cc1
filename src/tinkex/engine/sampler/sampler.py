"""The sampler: many requests, adapters and prompts decoded together, joining and leaving at every step.

A request's way: ``add`` puts it in line → it is admitted when the batch and the memory have room → its prompt is
prefilled in chunks, between decode steps of the others → its continuations draw their first token and move into
slots → every decode step gives each of them one more → the last to end completes the request.

Memory: keys and values of prompts and slots together stay within ``kv_budget_bytes``. When the budget is used up,
new work waits; when running sequences outgrow it, prompts kept for later go first, then the youngest sequence
gives up its slot and goes back in line with what it has so far, random numbers included. What would not fit even
alone is refused when it comes, so everything that was accepted ends. What is not budgeted: weights, and a pass's
activations, which ``prefill_chunk`` and ``max_batch`` bound. Where the machine has less than the budget says, it is the
same: the youngest gives way, the step is tried again, and nothing more is taken until a request has ended.

Shapes: B rows of a decode step, T packed rows of a prefill pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.model.memory import out_of_memory
from tinkex.engine.sampler.compute import choose_compute, warn_without_core
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.limits import SamplerLimits
from tinkex.engine.sampler.prefill import Prefill, share_chunk
from tinkex.engine.sampler.prompt_cache import CachedPrompt, PromptCache, PromptMatch
from tinkex.engine.sampler.request import Continuation, Request
from tinkex.errors import Conflict, EngineFailure, NumericalError, TinkexError
from tinkex.types import SampleResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.model.transformer import Transformer
    from tinkex.engine.sampler.places import Place

__all__ = ["Sampler"]

_HEAD_ROWS = 128
"""Rows whose logits exist at once: 25 MB for a vocabulary of 49,152."""


class Sampler:
    """Continues prompts, for any number of requests at once.

    Everything but ``check`` belongs to one thread. Logprobs are those of the temperature-scaled distribution,
    before top-k and top-p; those of greedy sequences, and of prompts, are at temperature 1.

    ``compute`` insists on the ``"compiled"`` core or on ``"torch"``; by itself the sampler takes the core if there is
    one.

    Example:
        >>> sampler = Sampler(model, tokenizer)
        >>> sampler.add(SampleJob("req-1", None, prompt_P, 1, SamplingParams(max_tokens=16), ["seq-1"]))
        >>> while sampler.busy:
        ...     for request_id, response in sampler.step():
        ...         print(request_id, response.sequences[0].tokens)
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: EngineTokenizer,
        *,
        max_batch: int = 64,
        prefill_chunk: int = 512,
        kv_budget_bytes: int = 2 << 30,
        prompt_cache_bytes: int = 512 << 20,
        compute: str = "auto",
    ) -> None:
        self._arch = model.arch
        self._compute = choose_compute(model, compute)
        self._token_bytes = cache(lambda token: tokenizer.decode_bytes([token]))
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._kv_budget_bytes = kv_budget_bytes
        self._room_bytes = kv_budget_bytes
        """What keys and values may take now: the budget, or less since memory ran out."""
        self._prompts = PromptCache(
            model.arch, model.dtype, keep_bytes=min(prompt_cache_bytes, kv_budget_bytes)
        )
        self._slots = self._compute.places()
        self.limits = SamplerLimits(
            arch=model.arch,
            eos_token_ids=tokenizer.eos_token_ids,
            kv_budget_bytes=kv_budget_bytes,
            budget_tokens=kv_budget_bytes // bytes_per_token(model.arch, model.dtype),
            sizes=self._slots.sizes,
        )
        self._requests: dict[str, Request] = {}
        self._next_order = 0
        # The stages of the way, each in the order of arrival; decoding rows in the order of their adapters.
        self._waiting: list[Prefill] = []
        self._prefilling: list[Prefill] = []
        self._ready: deque[tuple[Continuation, CachedPrompt]] = deque()
        self._decoding: list[Continuation] = []
        self._lenders: dict[Place, CachedPrompt] = {}
        self._finished: list[tuple[str, SampleResponse | TinkexError]] = []
        self._decode_next = False
        self.num_preemptions = 0
        """How often a sequence or prompt had to give its memory to an older one."""

    @property
    def computes_with(self) -> str:
        """What computes the numbers, for people: ``compiled (avx2)``, or ``torch`` and why."""
        return self._compute.description

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._requests)

    @property
    def num_sequences(self) -> int:
        """How many sequences have not ended, those in line included."""
        return sum(request.num_open for request in self._requests.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values, those of prompts kept for later included."""
        return self._prompts.nbytes + self._slots.nbytes

    def check(self, job: SampleJob) -> None:
        """Raises ``InvalidInput`` for a job that cannot be run; quick, and safe from any thread."""
        self.limits.check(job)

    def add(self, job: SampleJob) -> None:
        """Puts a job in line."""
        stop, most_new = self.limits.check(job)
        if job.request_id in self._requests:
            raise Conflict(
                f"request {job.request_id!r} is already being sampled; give each request an id of its own"
            )
        request = Request(
            job, order=self._next_order, arch=self._arch, stop=stop, token_bytes=self._token_bytes
        )
        for continuation in request.continuations:
            continuation.limit = min(continuation.limit, most_new)
        if self._compute.core_error is not None:
            warn_without_core(self._compute.core_error)
        self._next_order += 1
        self._requests[job.request_id] = request
        self._waiting.append(Prefill(request, job.prompt_P, list(request.continuations), request.scores))

    @torch.inference_mode()
    def cancel(self, request_id: str) -> bool:
        """Drops a request wherever it is; False if it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._drop(request)
        return True

    def watch(self, request_id: str, on_token: Callable[[Continuation], None]) -> bool:
        """Has every further token of a request reported, and first how far it is; False if it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.on_token = on_token
        for continuation in request.continuations:
            on_token(continuation)
        return True

    @torch.inference_mode()
    def step(self) -> list[tuple[str, SampleResponse | TinkexError]]:
        """One prefill pass or one decode step, in turns when there is work for both; returns what finished."""
        self._finished = []
        try:
            self._advance()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            self._make_do()
        return self._finished

    def _advance(self) -> None:
        self._fill_slots()
        self._admit()
        if self._prefilling and not (self._decode_next and self._decoding):
            self._prefill()
            self._decode_next = True
        elif self._decoding:
            self._decode()
            self._decode_next = False

    def _make_do(self) -> None:
        """After memory ran out in the middle of a step: whatever can be spared goes, so that the step can be repeated."""
        spared = self._prompts.evict()
        while self._prompts.evict():
            pass
        for request in [request for request in self._requests.values() if request.done]:
            self._complete(request)
        holders = self._holders()
        if not spared and len(holders) > 1:
            self._send_back(max(holders, key=lambda holder: holder.age))
        elif not spared and self._requests:
            alone = [*holders, *self._waiting][0].request
            self._drop(alone)
            self._finished.append((alone.job.request_id, _too_large(alone)))
        self._room_bytes = self.kv_bytes

    def _holders(self) -> list[Continuation | Prefill]:
        """Everyone who has memory."""
        return [*self._decoding, *(ready for ready, _ in self._ready), *self._prefilling]

    def _admit(self) -> None:
        """Lets requests in while the batch and the memory have room for them."""
        in_flight = (
            len(self._decoding) + len(self._ready) + sum(len(p.continuations) for p in self._prefilling)
        )
        if not in_flight:
            self._room_bytes = self._kv_budget_bytes
        still_waiting: list[Prefill] = []
        for place, prefill in enumerate(self._waiting):
            if in_flight >= self._max_batch:
                still_waiting += self._waiting[place:]
                break
            in_flight += len(prefill.continuations)
            match = self._prompts.match(prefill.adapter, prefill.tokens_P, prefill.reusable, prefill.owner)
            if match.worth_waiting:
                still_waiting.append(prefill)  # another prompt is about to fill what this one begins with
            elif not self._start(prefill, match):
                still_waiting += self._waiting[place:]
                break
        self._waiting = still_waiting

    def _start(self, prefill: Prefill, match: PromptMatch) -> bool:
        """Gives a prompt its place in memory; False if there is none now."""
        needs_last_row_only = prefill.reusable == len(prefill.tokens_P) - 1
        prompt = (
            self._prompts.exact(prefill.adapter, prefill.tokens_P, prefill.owner)
            if needs_last_row_only
            else None
        )
        if prompt is None:
            prompt = self._open(prefill, match)
        if prompt is None and not self._holders():
            prompt = self._open(prefill, PromptMatch())  # what it could begin with is itself in the way
        if prompt is None:
            return False
        prefill.prompt = prompt
        if prefill.scores is not None:
            prefill.request.cache_hit_tokens = prompt.kv.filled
        self._prefilling.append(prefill)
        return True

    def _open(self, prefill: Prefill, match: PromptMatch) -> CachedPrompt | None:
        """A new prompt in memory, begun with what ``match`` has; None if there is no room."""
        # A prompt without room for a slot beside it would hold its memory for nothing.
        needed = self._prompts.cost(len(prefill.tokens_P))
        if prefill.needs_slot:
            needed += self._slots.cost(self._slots.sizes.own_length(len(prefill.tokens_P)))
        if match.source is not None:
            self._prompts.use(match.source)  # not to be dropped while room is made
        try:
            if self._make_room(needed):
                return self._prompts.open(prefill.adapter, prefill.tokens_P, match, prefill.owner)
        except (MemoryError, RuntimeError) as error:
            if not (out_of_memory(error) and self._holders()):
                raise
            self._room_bytes = self.kv_bytes
        finally:
            if match.source is not None:
                self._prompts.release(match.source)
        return None

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be allocated, once everything that nobody uses is let go if need be."""
        trimmed = False
        while self.kv_bytes + num_bytes > self._room_bytes:
            if self._prompts.evict():
                continue
            if trimmed:
                return False
            self._slots.trim()
            trimmed = True
        return True

    def _prefill(self) -> None:
        """Brings the next chunk of prompt tokens into memory; prompts that are complete draw their first tokens."""
        counts = share_chunk([prefill.remaining for prefill in self._prefilling], self._prefill_chunk)
        pieces = [(prefill, count) for prefill, count in zip(self._prefilling, counts, strict=True) if count]
        pieces.sort(key=lambda piece: id(piece[0].adapter))
        if pieces:
            self._run_prefill(pieces)
        complete = [prefill for prefill in self._prefilling if not prefill.remaining]
        complete.sort(key=lambda prefill: id(prefill.adapter))
        for start in range(0, len(complete), _HEAD_ROWS):
            self._start_continuations(complete[start : start + _HEAD_ROWS])

    def _run_prefill(self, pieces: Sequence[tuple[Prefill, int]]) -> None:
        """One pass over the next ``count`` tokens of each prompt."""
        spans = [(prefill.filled, prefill.filled + count) for prefill, count in pieces]
        tokens = [
            prefill.tokens_P[start:end] for (prefill, _), (start, end) in zip(pieces, spans, strict=True)
        ]
        hidden_TD = self._compute.prefill(
            np.concatenate(tokens),
            [(prefill.kv, count) for prefill, count in pieces],
            [(prefill.adapter, count) for prefill, count in pieces],
        )
        rows = torch.split(hidden_TD, [count for _, count in pieces])
        for (prefill, _), (start, end), rows_TD in zip(pieces, spans, rows, strict=True):
            if prefill.scores is not None:
                needed = prefill.scores.rows_needed(start, end)
                for first in needed[::_HEAD_ROWS]:
                    part_RD = rows_TD[first - start : min(first + _HEAD_ROWS, needed.stop) - start]
                    prefill.scores.add(
                        first, self._compute.logits(part_RD, [(prefill.adapter, len(part_RD))])
                    )
            prefill.kv.filled = end
            if not prefill.remaining:
                prefill.kv.last_hidden_D = rows_TD[-1].clone()  # not a view that keeps the whole pass

    def _start_continuations(self, complete: Sequence[Prefill]) -> None:
        """Draws the next token of every continuation of these prompts; those that go on are ready for a slot."""
        last_ND = torch.stack(
            [prefill.kv.last_hidden_D for prefill in complete if prefill.kv.last_hidden_D is not None]
        )
        logits_NV = self._compute.logits(last_ND, [(prefill.adapter, 1) for prefill in complete])
        rows = [(row, new) for row, prefill in enumerate(complete) for new in prefill.not_begun]
        for start in range(0, len(rows), _HEAD_ROWS):
            part = rows[start : start + _HEAD_ROWS]
            self._extend([new for _, new in part], logits_NV[[row for row, _ in part]])
        for prefill in complete:
            if prefill not in self._prefilling:
                continue  # its request failed
            self._prefilling.remove(prefill)
            going_on = [new for new in prefill.continuations if self._is_open(new)]
            self._prompts.share(prefill.cached, len(going_on))
            self._ready += [(new, prefill.cached) for new in going_on]
            self._prompts.release(prefill.cached)

    def _fill_slots(self) -> None:
        """Moves continuations that are ready into the decode batch while it and the memory have room."""
        while self._ready and len(self._decoding) < self._max_batch:
            continuation, prompt = self._ready[0]
            own_length = self._slots.sizes.own_length(prompt.kv.length)
            if self._decoding and not self._make_room(self._slots.cost(own_length)):
                break  # until one of those that decode has ended
            if not self._claim(continuation, own_length):
                continue
            continuation.slot = self._slots.join(prompt.kv)
            insort(self._decoding, continuation, key=lambda other: id(other.request.job.adapter))
            self._ready.popleft()
            if continuation.slot.shared is None:
                self._prompts.release(prompt)
            else:
                self._lenders[continuation.slot] = prompt

    def _decode(self) -> None:
        """One more token for every continuation in the batch."""
        self._grow_slots()
        batch = self._decoding
        if not batch:
            return  # all of them gave way to older prompts
        slots = [continuation.slot for continuation in batch if continuation.slot is not None]
        segments = [(continuation.request.job.adapter, 1) for continuation in batch]
        hidden_BD = self._compute.decode(
            [continuation.tokens[-1] for continuation in batch], self._slots, slots, segments
        )
        self._extend(batch, self._compute.logits(hidden_BD, segments))

    def _grow_slots(self) -> None:
        """Makes room for one more token in every slot, the oldest first."""
        for continuation in sorted(self._decoding, key=lambda continuation: continuation.age):
            slot = continuation.slot
            if slot is not None and self._slots.is_full(slot) and self._claim(continuation, slot.own_length):
                self._slots.grow(slot)

    def _claim(self, continuation: Continuation, own_length: int) -> bool:
        """Makes room for a slot that holds so many tokens: the youngest give way, until one is left, which fits alone.

        False if this continuation was the youngest and had to go back itself.
        """
        while not self._make_room(self._slots.cost(own_length)):
            holders = self._holders()
            if len(holders) == 1:
                return True
            youngest = max(holders, key=lambda holder: holder.age)
            self._send_back(youngest)
            if youngest is continuation:
                return False
        return True

    def _send_back(self, holder: Continuation | Prefill) -> None:
        """Takes away the memory of a prompt or continuation and puts it back in line, with what it has so far."""
        self.num_preemptions += 1
        if isinstance(holder, Prefill):
            self._prefilling.remove(holder)
            self._prompts.release(holder.cached)
            holder.prompt = None
            again = holder
        else:
            self._leave(holder)
            output_P = np.array(holder.tokens, np.int32)
            again = Prefill(holder.request, np.concatenate([holder.request.job.prompt_P, output_P]), [holder])
        insort(self._waiting, again, key=lambda prefill: prefill.age)

    def _extend(self, continuations: Sequence[Continuation], logits_BV: Tensor) -> None:
        """Draws a token for each row's continuation, and completes what ends with it."""
        drawn = self._compute.draw(
            logits_BV, [each.settings for each in continuations], [each.uniform() for each in continuations]
        )
        tokens, logprobs, finite = drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), drawn.finite_B.tolist()
        for row, continuation in enumerate(continuations):
            request = continuation.request
            if not self._is_open(continuation):
                continue  # its request failed in an earlier row
            if not finite[row]:
                self._drop(request)
                self._finished.append((request.job.request_id, _not_finite(request)))
                continue
            if request.job.topk_sample_logprobs:
                best = drawn.distribution([row])[0].topk(request.job.topk_sample_logprobs)
                continuation.take_topk(best.indices, best.values)
            continuation.take(tokens[row], logprobs[row])
            if continuation.slot is not None:
                continuation.slot.length += 1
            if continuation.stop_reason is not None:
                self._leave(continuation)
            if request.done:
                self._complete(request)

    def _is_open(self, continuation: Continuation) -> bool:
        """Whether a continuation goes on: it has not ended, nor was its request dropped."""
        return continuation.stop_reason is None and continuation.request.job.request_id in self._requests

    def _leave(self, continuation: Continuation) -> None:
        """Takes a continuation out of the decode batch, or out of the line before it."""
        if continuation.slot is not None:
            self._slots.leave(continuation.slot)
            lender = self._lenders.pop(continuation.slot, None)
            if lender is not None:
                self._prompts.release(lender)
            continuation.slot = None
            self._decoding = [other for other in self._decoding if other is not continuation]
            return
        for item in self._ready:
            if item[0] is continuation:
                self._ready.remove(item)
                self._prompts.release(item[1])
                return

    def _drop(self, request: Request) -> None:
        """Forgets a request, wherever its parts are."""
        self._forget(request)
        self._waiting = [prefill for prefill in self._waiting if prefill.request is not request]
        for prefill in self._prefilling:
            if prefill.request is request:
                self._prompts.release(prefill.cached)
        self._prefilling = [prefill for prefill in self._prefilling if prefill.request is not request]
        for continuation in request.continuations:
            self._leave(continuation)

    def _complete(self, request: Request) -> None:
        self._finished.append((request.job.request_id, request.response()))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.job.request_id]
        self._room_bytes = self._kv_budget_bytes


def _too_large(request: Request) -> EngineFailure:
    return EngineFailure(
        f"request {request.job.request_id!r}: a prompt of {len(request.job.prompt_P):,} tokens needs more memory than is free, even "
        "alone; send a shorter one, or run the engine with more memory"
    )


def _not_finite(request: Request) -> NumericalError:
    weights = "the base model" if request.job.adapter is None else "this sampler's weights"
    return NumericalError(
        f"request {request.job.request_id!r}: {weights} gave logits that are not finite; the training run behind "
        "them has probably diverged, so sample from an earlier checkpoint"
    )
