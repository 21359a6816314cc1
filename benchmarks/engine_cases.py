"""The cases of the engine benchmark: each measures both sides alternately in one process."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from engine_sides import Ours, Theirs, answers, datum, finish, random_tokens, timed

from tinkex import types
from tinkex.engine.model.catalog import DEFAULT_MODEL
from tinkex.engine.model.products import back_product

__all__ = ["CASES", "GROWTH"]

Measurements = dict[str, float]

WEIGHTED = 0.4
UNEVEN = (16, 24, 40, 48, 64, 96, 160, 384)
DECODE = (1, 8, 32, 64)
CONTEXT, STEPS = 80, 32


def best_times(rounds: int, ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """Returns the best time of each side in alternating rounds; the first round is a warm-up."""
    mine: list[float] = []
    other: list[float] = []
    for number in range(rounds + 1):
        for run, times in ((ours, mine), (theirs, other)) if number % 2 else ((theirs, other), (ours, mine)):
            with timed(times):
                run()
    return min(mine[1:]), min(other[1:])


def median_pair(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Measurements:
    """Returns the times of the adjacent pair with the median ratio; for sides that differ by less than the noise of
    the machine."""
    pairs: list[tuple[float, float]] = []
    for number in range(2 * rounds + 2):
        if number % 2:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        pairs.append((mine, other))
    mine, other = sorted(pairs[1:], key=lambda pair: pair[0] / pair[1])[rounds]
    return {"ours": mine, "theirs": other}


def timer(run: Callable[[], None]) -> Callable[[], float]:
    """Returns a function that measures the duration of a call."""

    def measure() -> float:
        times: list[float] = []
        with timed(times):
            run()
        return times[0]

    return measure


def gemm_gflops() -> float:
    """Returns the current matmul peak of this machine, by its faster library, measured for a second."""
    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)
    times: list[float] = []
    while sum(times) < 1:
        for product in (torch.mm, back_product):
            with timed(times):
                product(a, b)
    return 2 * 1024 * 1536 * 1536 / min(times) / 1e9


# ---- training ----


def training(rounds: int) -> Measurements:
    ours, theirs = Ours(), Theirs()
    data = [datum(128, seed) for seed in range(8)]
    state, tokens = ours.state(), 8 * 128
    before = gemm_gflops()
    mine, other = best_times(
        rounds, lambda: ours.forward_backward([(state, data)]), lambda: theirs.forward_backward(data)
    )
    gflops = max(before, gemm_gflops())
    num_params = sum(p.numel() for name, p in theirs.model.named_parameters() if "lora" not in name)
    # the forward pass and the activation gradients use every weight; base weights have no gradient
    per_token = 4 * num_params + 6 * state.adapter.params.numel()
    bound = gflops * 1e9 / per_token
    return {
        "ours": tokens / mine,
        "theirs": tokens / other,
        "matmul peak, GFLOP/s": gflops,
        "bound, tokens/s": bound,
        "share of the bound": tokens / mine / bound,
    }


def uneven(rounds: int) -> Measurements:
    ours, theirs = Ours(), Theirs()
    data = [datum(length, seed, WEIGHTED) for seed, length in enumerate(UNEVEN)]
    state = ours.state()
    mine, other = best_times(
        rounds, lambda: ours.forward_backward([(state, data)]), lambda: theirs.forward_backward(data)
    )
    return {"ours": sum(UNEVEN) / mine, "theirs": sum(UNEVEN) / other}


def sharing(rounds: int) -> Measurements:
    """Measures passes with and without shared prefixes, in CPU time per thread, which other load changes least."""
    ours = Ours()
    state = ours.state()
    cases = {
        "8 × 64 on 256": answers(256, 8, 64),
        "16 × 64 on 512": answers(512, 16, 64),
        "8 × 128": [datum(128, seed) for seed in range(8)],
    }
    measurements: Measurements = {}
    for name, data in cases.items():

        def run(*, shared: bool, data: Sequence[types.Datum] = data) -> float:
            start = time.process_time()
            ours.forward_backward([(state, data)], share_prefixes=shared)
            return (time.process_time() - start) / torch.get_num_threads()

        pair = median_pair(rounds, partial(run, shared=True), partial(run, shared=False))
        print(f"{name}: {pair['theirs'] / pair['ours']:.2f} ×", file=sys.stderr, flush=True)
        measurements |= {f"{side}, {name}": seconds for side, seconds in pair.items()}
    return measurements


def adam(rounds: int) -> Measurements:
    ours, theirs = Ours(), Theirs()
    state = ours.state()
    params = types.AdamParams(learning_rate=1e-5)
    adapters = [p for p in theirs.trained.parameters() if p.requires_grad]
    for p in adapters:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW(adapters, lr=1e-5)
    grad = torch.full_like(state.adapter.params, 1e-3)
    times: list[float] = []
    other: list[float] = []
    for _ in range(4 * rounds):
        state.grad = grad.clone()
        with timed(times):
            ours.trainer.optim_step(state, params)
        with timed(other):  # our step returns the gradient norm, so the other side computes it too
            torch.nn.utils.get_total_norm([p.grad for p in adapters if p.grad is not None])
            optimizer.step()
    return {"ours": min(times[1:]) * 1e3, "theirs": min(other[1:]) * 1e3}


def tenants(rounds: int) -> Measurements:
    ours = Ours()
    data = [datum(128, seed) for seed in range(8)]
    one, eight = ours.state(), [ours.state(seed) for seed in range(8)]
    return median_pair(
        rounds,
        timer(lambda: ours.forward_backward([(state, [data[i]]) for i, state in enumerate(eight)])),
        timer(lambda: ours.forward_backward([(one, data)])),
    )


def memory_ours(_: int) -> Measurements:
    ours = Ours()
    state, data = ours.state(), [datum(512, seed) for seed in range(8)]
    ours.forward_backward([(state, data)])
    ours.trainer.optim_step(state, types.AdamParams())
    return {"peak, MB": peak_memory()}


def memory_theirs(_: int) -> Measurements:
    theirs = Theirs()
    theirs.forward_backward([datum(512, seed) for seed in range(8)])
    torch.optim.AdamW([p for p in theirs.trained.parameters() if p.requires_grad]).step()
    return {"peak, MB": peak_memory()}


def peak_memory() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def served(rounds: int) -> Measurements:
    """Measures a training step of the bare engine and of the embedded server with its journal."""
    import tinkex

    ours = Ours()
    state, data = ours.state(), [datum(128, seed) for seed in range(8)]
    params = types.AdamParams(learning_rate=1e-5)

    def bare() -> None:
        ours.forward_backward([(state, data)])
        ours.trainer.optim_step(state, params)

    with tinkex.ServiceClient(base_url="local") as service:
        client = service.create_lora_training_client(DEFAULT_MODEL, rank=32, train_unembed=False)

        def through_server() -> None:
            passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(params)
            passed.result()
            stepped.result()

        return median_pair(rounds, timer(through_server), timer(bare))


# ---- sampling ----


def decode(rounds: int) -> Measurements:
    """Measures tokens per second of decode steps, with contexts from 80 to 112 tokens."""
    ours, theirs = Ours(), Theirs()
    measurements: Measurements = {}
    for batch in DECODE:
        mine: list[float] = []
        other: list[float] = []
        for number in range(rounds):
            prompts = [random_tokens(CONTEXT, 1000 * number + 100 * batch + i) for i in range(batch)]
            mine.append(decode_seconds(ours, prompts, STEPS))
            other.append(theirs.decode(prompts, STEPS))
        measurements |= {
            f"ours at {batch}": batch * STEPS / min(mine),
            f"theirs at {batch}": batch * STEPS / min(other),
        }
    return measurements


def decode_seconds(
    ours: Ours, prompts: Sequence[Sequence[int]], steps: int, adapters: Sequence[Any] = (None,)
) -> float:
    """Measures ``steps`` tokens of every prompt, with the prompts in the sampler's prefix cache."""
    sampler = ours.sampler(max_batch=max(64, len(prompts)), prompt_cache_bytes=2 << 30)
    times: list[float] = []
    for new_tokens in (1, steps):
        for i, prompt in enumerate(prompts):
            sampler.add(ours.job(prompt, new_tokens, adapters[i % len(adapters)]))
        with timed(times):
            finish(sampler)
    return times[-1]


def adapters(rounds: int) -> Measurements:
    """Measures decoding of 32 sequences with eight adapters, and with one."""
    ours = Ours()
    eight = [ours.adapter(seed) for seed in range(8)]
    prompts = [random_tokens(64, i) for i in range(32)]
    return median_pair(
        2 * rounds,
        lambda: decode_seconds(ours, prompts, 32, eight),
        lambda: decode_seconds(ours, prompts, 32, eight[:1]),
    )


def end_to_end(rounds: int) -> Measurements:
    ours, theirs = Ours(), Theirs()
    prompts = [random_tokens(64, i) for i in range(32)]

    def sample() -> None:
        sampler = ours.sampler()
        for prompt in prompts:
            sampler.add(ours.job(prompt, 64))
        finish(sampler)

    mine, other = best_times(rounds, sample, lambda: theirs.generate(prompts, 64))
    return {"ours": 32 * 64 / mine, "theirs": 32 * 64 / other}


def arrivals(count: int) -> Measurements:
    """Measures requests at random times: ours join the batch immediately, theirs wait for a batch of eight.

    Only the requested tokens count.
    """
    ours, theirs = Ours(), Theirs()
    rng = np.random.default_rng(11)
    lengths, wanted = rng.integers(16, 513, size=count), rng.integers(16, 129, size=count)
    prompts = [random_tokens(int(n), seed) for seed, n in enumerate(lengths)]
    times = np.sort(rng.uniform(0, count / 32, size=count))
    sampler, num_arrived, start = ours.sampler(), 0, time.perf_counter()
    while num_arrived < count or sampler.busy:
        now = time.perf_counter() - start
        while num_arrived < count and times[num_arrived] <= now:
            sampler.add(ours.job(prompts[num_arrived], int(wanted[num_arrived])))
            num_arrived += 1
        if sampler.busy:
            for _, outcome in sampler.step():
                assert isinstance(outcome, types.SampleResponse)
        else:
            time.sleep(max(0.0, float(times[num_arrived]) - now))
    mine = time.perf_counter() - start
    start = time.perf_counter()
    for first in range(0, count, 8):
        wait = float(times[first : first + 8].max()) - (time.perf_counter() - start)
        time.sleep(max(0.0, wait))
        theirs.generate(prompts[first : first + 8], int(wanted[first : first + 8].max()))
    other = time.perf_counter() - start
    return {"ours": float(wanted.sum()) / mine, "theirs": float(wanted.sum()) / other}


def shared_prompt(rounds: int) -> Measurements:
    """Measures the time to first token of 16 samples of one prompt of 512 tokens, and of 16 different prompts."""
    ours = Ours()
    seeds = iter(range(10_000))

    def one() -> None:
        sampler = ours.sampler()
        sampler.add(ours.job(random_tokens(512, next(seeds)), 1, num_samples=16))
        finish(sampler)

    def sixteen() -> None:
        sampler = ours.sampler()
        for _ in range(16):
            sampler.add(ours.job(random_tokens(512, next(seeds)), 1))
        finish(sampler)

    mine, other = best_times(rounds, one, sixteen)
    return {"ours": mine, "theirs": other}


# ---- scaling: only our side ----


def grow_batch(size: int) -> Measurements:
    ours = Ours()
    state, data = ours.state(), [datum(128, seed) for seed in range(size)]
    return _measure(size * 128, lambda: ours.forward_backward([(state, data)]))


def grow_length(length: int) -> Measurements:
    ours = Ours()
    state, data = ours.state(), [datum(length, 1)]
    return _measure(length, lambda: ours.forward_backward([(state, data)]))


def grow_adapters(count: int) -> Measurements:
    ours = Ours()
    jobs = [(ours.state(seed, rank=8), [datum(32, seed)]) for seed in range(count)]
    return _measure(count * 32, lambda: ours.forward_backward(jobs))


def grow_sequences(count: int) -> Measurements:
    ours = Ours()
    prompts = [random_tokens(64, i) for i in range(count)]
    seconds = min(decode_seconds(ours, prompts, 32) for _ in range(2))
    return {"s": seconds, "tokens/s": count * 32 / seconds, "peak, MB": peak_memory()}


def _measure(tokens: int, run: Callable[[], None]) -> Measurements:
    run()
    times: list[float] = []
    for _ in range(2):
        with timed(times):
            run()
    return {"s": statistics.median(times), "tokens/s": tokens / min(times), "peak, MB": peak_memory()}


CASES: dict[str, Callable[[int], Measurements]] = {
    "training": training,
    "uneven": uneven,
    "sharing": sharing,
    "adam": adam,
    "tenants": tenants,
    "memory_ours": memory_ours,
    "memory_theirs": memory_theirs,
    "served": served,
    "decode": decode,
    "adapters": adapters,
    "end_to_end": end_to_end,
    "arrivals": arrivals,
    "shared_prompt": shared_prompt,
}

GROWTH: dict[str, tuple[str, Callable[[int], Measurements], tuple[int, ...]]] = {
    "batch": ("training, datums of 128 tokens", grow_batch, (1, 2, 4, 8, 16, 32)),
    "length": ("training, one datum, number of tokens", grow_length, (128, 256, 512, 1024, 2048, 4096)),
    "adapters": ("training, adapters of rank 8 in one pass, 32 tokens each", grow_adapters, (1, 4, 16, 64)),
    "sequences": ("decoding, batch size", grow_sequences, (1, 2, 4, 8, 16, 32, 64, 128)),
}
