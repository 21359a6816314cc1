"""What the engine benchmark measures: every case gives figures of both sides, taken in turns in one process."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from engine_sides import Ours, Theirs, datum, finish, random_tokens, timed

from tinkex import types

__all__ = ["CASES", "GROWTH"]

Figures = dict[str, float]

WEIGHTED = 0.4
UNEVEN = (16, 24, 40, 48, 64, 96, 160, 384)
DECODE = (1, 8, 32, 64)
CONTEXT, STEPS = 80, 32


def turns(rounds: int, ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """The best time of each side; the sides take turns, and the first round only warms up."""
    mine: list[float] = []
    other: list[float] = []
    for turn in range(rounds + 1):
        for run, times in ((ours, mine), (theirs, other)) if turn % 2 else ((theirs, other), (ours, mine)):
            with timed(times):
                run()
    return min(mine[1:]), min(other[1:])


def middle_pair(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Figures:
    """The seconds of both sides in the pair of neighbouring turns whose ratio is the median one; for sides that differ
    by less than a busy moment of the machine does."""
    pairs: list[tuple[float, float]] = []
    for turn in range(2 * rounds + 2):
        if turn % 2:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        pairs.append((mine, other))
    mine, other = sorted(pairs[1:], key=lambda pair: pair[0] / pair[1])[rounds]
    return {"ours": mine, "theirs": other}


def seconds_of(run: Callable[[], None]) -> Callable[[], float]:
    """What a call takes."""

    def measure() -> float:
        times: list[float] = []
        with timed(times):
            run()
        return times[0]

    return measure


def gemm_gflops() -> float:
    """The matmul peak of this machine as it is at the moment, from a second of products."""
    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)
    times: list[float] = []
    while sum(times) < 1:
        with timed(times):
            torch.mm(a, b)
    return 2 * 1024 * 1536 * 1536 / min(times) / 1e9


# ---- training ----


def training(rounds: int) -> Figures:
    ours, theirs = Ours(), Theirs()
    data = [datum(128, seed) for seed in range(8)]
    state, tokens = ours.state(), 8 * 128
    before = gemm_gflops()
    mine, other = turns(
        rounds, lambda: ours.forward_backward([(state, data)]), lambda: theirs.forward_backward(data)
    )
    gflops = max(before, gemm_gflops())
    num_params = sum(p.numel() for name, p in theirs.model.named_parameters() if "lora" not in name)
    # forward and the gradient of the activations go through every weight; base weights have no gradient
    per_token = 4 * num_params + 6 * state.adapter.params.numel()
    bound = gflops * 1e9 / per_token
    return {
        "ours": tokens / mine,
        "theirs": tokens / other,
        "matmul peak, GFLOP/s": gflops,
        "bound, tokens/s": bound,
        "share of the bound": tokens / mine / bound,
    }


def uneven(rounds: int) -> Figures:
    ours, theirs = Ours(), Theirs()
    data = [datum(length, seed, WEIGHTED) for seed, length in enumerate(UNEVEN)]
    state = ours.state()
    mine, other = turns(
        rounds, lambda: ours.forward_backward([(state, data)]), lambda: theirs.forward_backward(data)
    )
    return {"ours": sum(UNEVEN) / mine, "theirs": sum(UNEVEN) / other}


def adam(rounds: int) -> Figures:
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
        with timed(other):  # ours reports the gradient's norm, so theirs computes it too
            torch.nn.utils.get_total_norm([p.grad for p in adapters if p.grad is not None])
            optimizer.step()
    return {"ours": min(times[1:]) * 1e3, "theirs": min(other[1:]) * 1e3}


def tenants(rounds: int) -> Figures:
    ours = Ours()
    data = [datum(128, seed) for seed in range(8)]
    one, eight = ours.state(), [ours.state(seed) for seed in range(8)]
    return middle_pair(
        rounds,
        seconds_of(lambda: ours.forward_backward([(state, [data[i]]) for i, state in enumerate(eight)])),
        seconds_of(lambda: ours.forward_backward([(one, data)])),
    )


def memory_ours(_: int) -> Figures:
    ours = Ours()
    state, data = ours.state(), [datum(512, seed) for seed in range(8)]
    ours.forward_backward([(state, data)])
    ours.trainer.optim_step(state, types.AdamParams())
    return {"peak, MB": peak_memory()}


def memory_theirs(_: int) -> Figures:
    theirs = Theirs()
    theirs.forward_backward([datum(512, seed) for seed in range(8)])
    torch.optim.AdamW([p for p in theirs.trained.parameters() if p.requires_grad]).step()
    return {"peak, MB": peak_memory()}


def peak_memory() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def served(rounds: int) -> Figures:
    """A training step of the engine alone, and the same through the embedded server with its journal."""
    import tinkex

    ours = Ours()
    state, data = ours.state(), [datum(128, seed) for seed in range(8)]
    params = types.AdamParams(learning_rate=1e-5)

    def bare() -> None:
        ours.forward_backward([(state, data)])
        ours.trainer.optim_step(state, params)

    with tinkex.ServiceClient(base_url="local") as service:
        client = service.create_lora_training_client(
            service.get_server_capabilities().supported_models[0].model_name, rank=32, train_unembed=False
        )

        def through_the_server() -> None:
            passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(params)
            passed.result()
            stepped.result()

        return middle_pair(rounds, seconds_of(through_the_server), seconds_of(bare))


# ---- sampling ----


def decode(rounds: int) -> Figures:
    """Tokens per second of the steps alone, contexts growing from 80 to 112."""
    ours, theirs = Ours(), Theirs()
    figures: Figures = {}
    for batch in DECODE:
        mine: list[float] = []
        other: list[float] = []
        for turn in range(rounds):
            prompts = [random_tokens(CONTEXT, 1000 * turn + 100 * batch + i) for i in range(batch)]
            mine.append(decode_seconds(ours, prompts, STEPS))
            other.append(theirs.decode(prompts, STEPS))
        figures |= {
            f"ours at {batch}": batch * STEPS / min(mine),
            f"theirs at {batch}": batch * STEPS / min(other),
        }
    return figures


def decode_seconds(
    ours: Ours, prompts: Sequence[Sequence[int]], steps: int, adapters: Sequence[Any] = (None,)
) -> float:
    """What ``steps`` tokens of every prompt cost when the prompts themselves are in the sampler's cache."""
    sampler = ours.sampler(max_batch=max(64, len(prompts)), prompt_cache_bytes=2 << 30)
    taken: list[float] = []
    for new_tokens in (1, steps):
        for i, prompt in enumerate(prompts):
            sampler.add(ours.job(prompt, new_tokens, adapters[i % len(adapters)]))
        with timed(taken):
            finish(sampler)
    return taken[-1]


def adapters(rounds: int) -> Figures:
    """Decoding 32 sequences under eight adapters, and under one."""
    ours = Ours()
    eight = [ours.adapter(seed) for seed in range(8)]
    prompts = [random_tokens(64, i) for i in range(32)]
    return middle_pair(
        2 * rounds,
        lambda: decode_seconds(ours, prompts, 32, eight),
        lambda: decode_seconds(ours, prompts, 32, eight[:1]),
    )


def end_to_end(rounds: int) -> Figures:
    ours, theirs = Ours(), Theirs()
    prompts = [random_tokens(64, i) for i in range(32)]

    def sample() -> None:
        sampler = ours.sampler()
        for prompt in prompts:
            sampler.add(ours.job(prompt, 64))
        finish(sampler)

    mine, other = turns(rounds, sample, lambda: theirs.generate(prompts, 64))
    return {"ours": 32 * 64 / mine, "theirs": 32 * 64 / other}


def arrivals(count: int) -> Figures:
    """Requests at random times: ours join at once, theirs wait for a batch of eight; wanted tokens count."""
    ours, theirs = Ours(), Theirs()
    rng = np.random.default_rng(11)
    lengths, wanted = rng.integers(16, 513, size=count), rng.integers(16, 129, size=count)
    prompts = [random_tokens(int(n), seed) for seed, n in enumerate(lengths)]
    times = np.sort(rng.uniform(0, count / 32, size=count))
    sampler, came, began = ours.sampler(), 0, time.perf_counter()
    while came < count or sampler.busy:
        now = time.perf_counter() - began
        while came < count and times[came] <= now:
            sampler.add(ours.job(prompts[came], int(wanted[came])))
            came += 1
        if sampler.busy:
            for _, outcome in sampler.step():
                assert isinstance(outcome, types.SampleResponse)
        else:
            time.sleep(max(0.0, float(times[came]) - now))
    mine = time.perf_counter() - began
    began = time.perf_counter()
    for first in range(0, count, 8):
        wait = float(times[first : first + 8].max()) - (time.perf_counter() - began)
        time.sleep(max(0.0, wait))
        theirs.generate(prompts[first : first + 8], int(wanted[first : first + 8].max()))
    other = time.perf_counter() - began
    return {"ours": float(wanted.sum()) / mine, "theirs": float(wanted.sum()) / other}


def shared_prompt(rounds: int) -> Figures:
    """Time until the first token of 16 samples of one prompt of 512, and of 16 different prompts."""
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

    mine, other = turns(rounds, one, sixteen)
    return {"ours": mine, "theirs": other}


# ---- growth: ours alone ----


def grow_batch(size: int) -> Figures:
    ours = Ours()
    state, data = ours.state(), [datum(128, seed) for seed in range(size)]
    return _grown(size * 128, lambda: ours.forward_backward([(state, data)]))


def grow_length(length: int) -> Figures:
    ours = Ours()
    state, data = ours.state(), [datum(length, 1)]
    return _grown(length, lambda: ours.forward_backward([(state, data)]))


def grow_adapters(count: int) -> Figures:
    ours = Ours()
    jobs = [(ours.state(seed, rank=8), [datum(32, seed)]) for seed in range(count)]
    return _grown(count * 32, lambda: ours.forward_backward(jobs))


def grow_sequences(count: int) -> Figures:
    ours = Ours()
    prompts = [random_tokens(64, i) for i in range(count)]
    seconds = min(decode_seconds(ours, prompts, 32) for _ in range(2))
    return {"s": seconds, "tokens/s": count * 32 / seconds, "peak, MB": peak_memory()}


def _grown(tokens: int, run: Callable[[], None]) -> Figures:
    run()
    times: list[float] = []
    for _ in range(2):
        with timed(times):
            run()
    return {"s": statistics.median(times), "tokens/s": tokens / min(times), "peak, MB": peak_memory()}


CASES: dict[str, Callable[[int], Figures]] = {
    "training": training,
    "uneven": uneven,
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

GROWTH: dict[str, tuple[str, Callable[[int], Figures], tuple[int, ...]]] = {
    "batch": ("training, datums of 128 tokens", grow_batch, (1, 2, 4, 8, 16, 32)),
    "length": ("training, one datum of so many tokens", grow_length, (128, 256, 512, 1024, 2048, 4096)),
    "adapters": ("training, adapters of rank 8 in one pass, 32 tokens each", grow_adapters, (1, 4, 16, 64)),
    "sequences": ("decoding, sequences at once", grow_sequences, (1, 2, 4, 8, 16, 32, 64, 128)),
}
