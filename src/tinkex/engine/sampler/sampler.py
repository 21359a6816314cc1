"""The sampler: continuous batching of many requests, adapters and prompts, which enter and leave at every step.

The stages of a request: ``add`` queues it → it is admitted when the batch and the memory have room → its prompt is
prefilled in chunks, between decode steps of the others → its continuations draw their first token and get slots → every
decode step adds one token to each → the request completes with its last continuation.

Memory: keys and values of prompts and slots together stay within ``kv_budget_bytes``. When the budget is exhausted, new
requests wait. When running sequences outgrow it, idle cached prompts are evicted first, then the youngest sequence is
preempted: it loses its slot and is queued again with its output and random numbers. A job that would not fit even alone
is rejected on arrival, so every accepted job completes. The budget does not include weights, nor the activations of a
pass, which ``prefill_chunk`` and ``max_batch`` bound. If the machine has less memory than the budget, the same happens:
the youngest is preempted, the step is repeated, and nothing is admitted until a request has ended.

Shapes: B rows of a decode step, T packed rows of a prefill pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.model.memory import is_out_of_memory
from tinkex.engine.sampler.batch_places import admits, count_places, next_ready
from tinkex.engine.sampler.compute import choose_compute, warn_without_core
from tinkex.engine.sampler.grammar import GrammarCompiler
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.limits import SamplerLimits
from tinkex.engine.sampler.prefill import Prefill, split_token_budget
from tinkex.engine.sampler.prompt_cache import CachedPrompt, PromptCache, PromptMatch
from tinkex.engine.sampler.request import Continuation, RunningRequest
from tinkex.errors import Conflict, InvalidInput, TinkexError
from tinkex.types import SampleResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.model.transformer import Transformer
    from tinkex.engine.sampler.decode_cache import DecodeSlot

__all__ = ["Sampler"]

_HEAD_ROWS = 128
"""Rows whose logits exist simultaneously: 25 MB for a vocabulary of 49,152."""


class Sampler:
    """Continues prompts, for any number of requests simultaneously.

    All methods except ``check`` must be called on one thread. Logprobs are those of the temperature-scaled distribution,
    after penalties, biases and the mask of a grammar, before min-p, top-k and top-p; those of greedy sequences, and of
    prompts, are at temperature 1. Those of prompts are the model's own.

    ``compute`` is ``"compiled"``, ``"torch"`` or ``"auto"``: the compiled core if there is one.

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
        self._grammars = GrammarCompiler(tokenizer, model.arch.vocab_size)
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._kv_budget_bytes = kv_budget_bytes
        self._kv_limit_bytes = kv_budget_bytes
        """The current limit for keys and values: the budget, or less after memory ran out."""
        self._prompts = PromptCache(
            model.arch, model.dtype, keep_bytes=min(prompt_cache_bytes, kv_budget_bytes)
        )
        self._slots = self._compute.new_decode_cache()
        self.limits = SamplerLimits(
            arch=model.arch,
            eos_token_ids=tokenizer.eos_token_ids,
            kv_budget_bytes=kv_budget_bytes,
            budget_tokens=kv_budget_bytes // bytes_per_token(model.arch, model.dtype),
            sizes=self._slots.sizes,
        )
        self._requests: dict[str, RunningRequest] = {}
        self._next_order = 0
        # The stages, each in the order of arrival; decoding rows in the order of their adapters.
        self._waiting: list[Prefill] = []
        self._prefilling: list[Prefill] = []
        self._ready: deque[tuple[Continuation, CachedPrompt]] = deque()
        self._decoding: list[Continuation] = []
        self._shared_prompts: dict[DecodeSlot, CachedPrompt] = {}
        self._finished: list[tuple[str, SampleResponse | TinkexError]] = []
        self._decode_next = False
        self.num_preemptions = 0
        """How many times a sequence or prompt was preempted."""

    @property
    def computes_with(self) -> str:
        """What computes the passes, for people: ``compiled (avx2)``, or ``torch`` and why."""
        return self._compute.description

    @property
    def busy(self) -> bool:
        """Whether any request has not completed."""
        return bool(self._requests)

    @property
    def num_sequences(self) -> int:
        """How many sequences have not ended, queued ones included."""
        return sum(request.num_open for request in self._requests.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values, idle cached prompts included."""
        return self._prompts.nbytes + self._slots.nbytes

    def check(self, job: SampleJob) -> None:
        """Raises ``InvalidInput`` for a job that cannot run; fast, and safe to call from any thread."""
        self.limits.check(job)

    def add(self, job: SampleJob) -> None:
        """Queues a job."""
        stop, max_new = self.limits.check(job)
        if job.request_id in self._requests:
            raise Conflict(
                f"request {job.request_id!r} is already being sampled; give each request a unique id"
            )
        wanted = job.params.structured_output
        request = RunningRequest(
            job,
            order=self._next_order,
            arch=self._arch,
            stop=stop,
            token_bytes=self._token_bytes,
            new_grammar=lambda: None if wanted is None else self._grammars.start(wanted),
        )
        for continuation in request.continuations:
            continuation.limit = min(continuation.limit, max_new)
        if self._compute.core_error is not None:
            warn_without_core(self._compute.core_error)
        self._next_order += 1
        self._requests[job.request_id] = request
        self._waiting.append(Prefill(request, job.prompt_P, list(request.continuations), request.scores))

    @torch.inference_mode()
    def cancel(self, request_id: str) -> bool:
        """Aborts a request in any stage; False if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._abort(request)
        return True

    def watch(self, request_id: str, on_token: Callable[[Continuation], None]) -> bool:
        """Calls ``on_token`` for the current state and every further token; False if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.on_token = on_token
        for continuation in request.continuations:
            on_token(continuation)
        return True

    @torch.inference_mode()
    def step(self) -> list[tuple[str, SampleResponse | TinkexError]]:
        """Runs one prefill pass or one decode step, alternating if there is work for both; returns what finished."""
        self._finished = []
        try:
            self._advance()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._recover_from_oom()
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

    def _recover_from_oom(self) -> None:
        """Frees memory after it ran out during a step, so that the step can be repeated."""
        evicted = self._prompts.evict()
        while self._prompts.evict():
            pass
        for request in [request for request in self._requests.values() if request.done]:
            self._complete(request)
        holders = self._memory_holders()
        if not evicted and len(holders) > 1:
            self._preempt(max(holders, key=lambda holder: holder.age))
        elif not evicted and self._requests:
            alone = [*holders, *self._waiting][0].request
            self._abort(alone)
            self._finished.append((alone.job.request_id, alone.too_large()))
        self._kv_limit_bytes = self.kv_bytes

    def _memory_holders(self) -> list[Continuation | Prefill]:
        """All continuations and prefills that hold memory."""
        return [*self._decoding, *(ready for ready, _ in self._ready), *self._prefilling]

    def _admit(self) -> None:
        """Admits requests while the batch and the memory have room for them."""
        places = count_places([*self._decoding, *(ready for ready, _ in self._ready)], self._prefilling)
        if not places:
            self._kv_limit_bytes = self._kv_budget_bytes
        still_waiting: list[Prefill] = []
        for index, prefill in enumerate(self._waiting):
            if not admits(places.total(), places, prefill.owner, self._max_batch):
                still_waiting.append(prefill)
                continue
            places[prefill.owner] += len(prefill.continuations)
            match = prefill.match_in(self._prompts)
            if match.worth_waiting:
                still_waiting.append(prefill)  # a prefill in flight computes its prefix
            elif not self._start(prefill, match):
                still_waiting += self._waiting[index:]
                break
        self._waiting = still_waiting

    def _start(self, prefill: Prefill, match: PromptMatch) -> bool:
        """Starts a prefill; False if there is no memory for it now."""
        needs_last_row_only = prefill.reusable == len(prefill.tokens_P) - 1
        prompt = (
            self._prompts.acquire_exact(prefill.adapter, prefill.tokens_P, prefill.owner)
            if needs_last_row_only
            else None
        )
        if prompt is None:
            prompt = self._allocate(prefill, match)
        if prompt is None and not self._memory_holders():
            prompt = self._allocate(prefill, PromptMatch())  # evicting the prompt that matches makes room
        if prompt is None:
            return False
        prefill.prompt = prompt
        if prefill.scores is not None:
            prefill.request.cache_hit_tokens = prompt.kv.filled
        self._prefilling.append(prefill)
        return True

    def _allocate(self, prefill: Prefill, match: PromptMatch) -> CachedPrompt | None:
        """A new cached prompt with the tokens of ``match``; None if there is no room."""
        # A prompt is useless without room for a slot that continues it.
        needed = self._prompts.cost(len(prefill.tokens_P))
        if prefill.needs_slot:
            needed += self._slots.cost(self._slots.sizes.own_length(len(prefill.tokens_P)))
        if match.source is not None:
            self._prompts.acquire(match.source)  # not to be evicted while room is made
        try:
            if self._make_room(needed):
                prompt = self._prompts.allocate(prefill.adapter, prefill.tokens_P, match, prefill.owner)
                prefill.start_scores(prompt, match)
                return prompt
        except (MemoryError, RuntimeError) as error:
            if not (is_out_of_memory(error) and self._memory_holders()):
                raise
            self._kv_limit_bytes = self.kv_bytes
        finally:
            if match.source is not None:
                self._prompts.release(match.source)
        return None

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts idle prompts and trims slots as needed; returns whether ``num_bytes`` can be allocated."""
        trimmed = False
        while self.kv_bytes + num_bytes > self._kv_limit_bytes:
            if self._prompts.evict():
                continue
            if trimmed:
                return False
            self._slots.trim()
            trimmed = True
        return True

    def _prefill(self) -> None:
        """Computes the next chunk of prompt tokens; prompts that are complete draw their first tokens."""
        counts = split_token_budget([prefill.remaining for prefill in self._prefilling], self._prefill_chunk)
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
        """Draws the next token of every continuation of these prompts; those that have not ended wait for a slot."""
        last_ND = torch.stack(
            [prefill.kv.last_hidden_D for prefill in complete if prefill.kv.last_hidden_D is not None]
        )
        logits_NV = self._compute.logits(last_ND, [(prefill.adapter, 1) for prefill in complete])
        rows = [(row, new) for row, prefill in enumerate(complete) for new in prefill.unstarted]
        for start in range(0, len(rows), _HEAD_ROWS):
            part = rows[start : start + _HEAD_ROWS]
            self._extend([new for _, new in part], logits_NV[[row for row, _ in part]])
        for prefill in complete:
            if prefill not in self._prefilling:
                continue  # its request failed
            self._prefilling.remove(prefill)
            running = [new for new in prefill.continuations if self._is_open(new)]
            self._prompts.add_users(prefill.cached, len(running))
            self._ready += [(new, prefill.cached) for new in running]
            self._prompts.release(prefill.cached)

    def _fill_slots(self) -> None:
        """Moves continuations that are ready into the decode batch while it and the memory have room."""
        while (place := next_ready(self._ready, self._decoding, self._max_batch)) is not None:
            continuation, prompt = self._ready[place]
            own_length = self._slots.sizes.own_length(prompt.kv.length)
            if self._decoding and not self._make_room(self._slots.cost(own_length)):
                break  # until a decoding sequence has ended
            if not self._reserve(continuation, own_length):
                continue
            continuation.slot = self._slots.add(prompt.kv)
            insort(self._decoding, continuation, key=lambda other: id(other.request.job.adapter))
            del self._ready[place]
            if continuation.slot.shared is None:
                self._prompts.release(prompt)
            else:
                self._shared_prompts[continuation.slot] = prompt

    def _decode(self) -> None:
        """One more token for every continuation in the batch."""
        self._grow_slots()
        batch = self._decoding
        if not batch:
            return  # all of them were preempted by older prompts
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
            if (
                slot is not None
                and self._slots.is_full(slot)
                and self._reserve(continuation, slot.own_length)
            ):
                self._slots.grow(slot)

    def _reserve(self, continuation: Continuation, own_length: int) -> bool:
        """Reserves memory for a slot of ``own_length`` tokens by preempting the youngest; the last one fits alone.

        False if this continuation was the youngest and was preempted itself.
        """
        while not self._make_room(self._slots.cost(own_length)):
            holders = self._memory_holders()
            if len(holders) == 1:
                return True
            youngest = max(holders, key=lambda holder: holder.age)
            self._preempt(youngest)
            if youngest is continuation:
                return False
        return True

    def _preempt(self, holder: Continuation | Prefill) -> None:
        """Frees the memory of a prompt or continuation and queues it again, with its output so far."""
        self.num_preemptions += 1
        if isinstance(holder, Prefill):
            self._prefilling.remove(holder)
            self._prompts.release(holder.cached)
            holder.prompt = None
            resumed = holder
        else:
            self._release(holder)
            output_P = np.array(holder.tokens, np.int32)
            resumed = Prefill(
                holder.request, np.concatenate([holder.request.job.prompt_P, output_P]), [holder]
            )
        insort(self._waiting, resumed, key=lambda prefill: prefill.age)

    def _extend(self, continuations: Sequence[Continuation], logits_BV: Tensor) -> None:
        """Draws a token for each row's continuation, and completes the requests that end with it."""
        self._adjust(continuations, logits_BV)
        drawn = self._compute.draw(
            logits_BV, [each.settings for each in continuations], [each.uniform() for each in continuations]
        )
        tokens, logprobs, finite = drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), drawn.finite_B.tolist()
        for row, continuation in enumerate(continuations):
            request = continuation.request
            if not self._is_open(continuation):
                continue  # its request failed in an earlier row
            if not finite[row]:
                self._abort(request)
                self._finished.append((request.job.request_id, request.not_finite()))
                continue
            if request.job.topk_sample_logprobs:
                best = drawn.distribution([row])[0].topk(request.job.topk_sample_logprobs)
                continuation.append_topk(best.indices, best.values)
            continuation.append(tokens[row], logprobs[row])
            if continuation.slot is not None:
                continuation.slot.length += 1
            if continuation.stop_reason is not None:
                self._release(continuation)
            if request.done:
                self._complete(request)

    def _adjust(self, continuations: Sequence[Continuation], logits_BV: Tensor) -> None:
        """Applies penalties, biases and grammars to the rows that have them."""
        for row, continuation in enumerate(continuations):
            if continuation.adjustments is None or not self._is_open(continuation):
                continue
            try:
                continuation.adjustments.apply(logits_BV[row].numpy())
            except InvalidInput as error:
                self._abort(continuation.request)
                self._finished.append((continuation.request.job.request_id, error))

    def _is_open(self, continuation: Continuation) -> bool:
        """Whether a continuation is running: it has not ended, and its request was not aborted."""
        return continuation.stop_reason is None and continuation.request.job.request_id in self._requests

    def _release(self, continuation: Continuation) -> None:
        """Removes a continuation from the decode batch, or from the queue for it."""
        if continuation.slot is not None:
            self._slots.remove(continuation.slot)
            shared = self._shared_prompts.pop(continuation.slot, None)
            if shared is not None:
                self._prompts.release(shared)
            continuation.slot = None
            self._decoding = [other for other in self._decoding if other is not continuation]
            return
        for item in self._ready:
            if item[0] is continuation:
                self._ready.remove(item)
                self._prompts.release(item[1])
                return

    def _abort(self, request: RunningRequest) -> None:
        """Removes a request from every stage."""
        self._forget(request)
        self._waiting = [prefill for prefill in self._waiting if prefill.request is not request]
        for prefill in self._prefilling:
            if prefill.request is request:
                self._prompts.release(prefill.cached)
        self._prefilling = [prefill for prefill in self._prefilling if prefill.request is not request]
        for continuation in request.continuations:
            self._release(continuation)

    def _complete(self, request: RunningRequest) -> None:
        self._finished.append((request.job.request_id, request.response()))
        self._forget(request)

    def _forget(self, request: RunningRequest) -> None:
        del self._requests[request.job.request_id]
        self._kv_limit_bytes = self._kv_budget_bytes
