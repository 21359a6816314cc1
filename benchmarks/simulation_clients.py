"""What simulated users send: steps of SFT in bursts, iterations of RL, and the requests of a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from simulation_cluster import MODEL, Cluster, Work
from simulation_traces import Request, Trace

from tinkex.engine.operation import Kind, Operation
from tinkex.types import ModelInput, SampleRequest, SamplingParams

MAX_CHUNK_TOKENS = 4096


class Client(Protocol):
    """A user, or many."""

    @property
    def run_ids(self) -> Sequence[str]:
        """The runs it has."""
        ...

    def start(self) -> None:
        """Begin to send."""
        ...


class Sender:
    """Sends the operations of one user, numbered as a client numbers them."""

    _ids = count()

    def __init__(self, cluster: Cluster, owner: str) -> None:
        self.cluster, self.owner = cluster, owner
        self.run_id = f"run-{owner}"
        self._seq_ids = count(1)

    def train(self, kind: Kind, tokens: int, on_done: Callable[[Operation], None]) -> None:
        """Send an operation of the user's run."""
        name = f"op-{next(self._ids)}"
        operation = Operation(name, self.owner, MODEL, self.run_id, next(self._seq_ids), kind, tokens)
        self.cluster.submit(operation, Work(self.cluster.clock.now, on_done))

    def sample(
        self, prompt_tokens: int, new_tokens: Sequence[int], on_done: Callable[[Operation], None]
    ) -> None:
        """Send a sample of so many sequences, which end after so many tokens."""
        number = next(self._ids)
        # Every prompt is new, so no sampler has its beginning in memory.
        request = SampleRequest(
            prompt=ModelInput.from_ints([number]),
            sampling_params=SamplingParams(),
            num_samples=len(new_tokens),
        )
        operation = Operation(
            f"op-{number}",
            self.owner,
            MODEL,
            self.run_id,
            0,
            Kind.SAMPLE,
            prompt_tokens + sum(new_tokens),
            request,
        )
        work = Work(self.cluster.clock.now, on_done, prompt_tokens, new_tokens)
        self.cluster.submit(operation, work)


@dataclass(frozen=True)
class SftShape:
    """Steps of a fixed size, the next one sent before the last has ended; after some of them the user pauses."""

    step_tokens: int = 8192
    burst_steps: int = 10
    pause_s: float = 60.0


@dataclass(frozen=True)
class RlShape:
    """An iteration samples groups, computes rewards, trains on all of it, and publishes the weights."""

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 256
    reward_s: float = 5.0


class SftClient:
    """A user who trains in bursts, with two steps in flight."""

    def __init__(self, sender: Sender, shape: SftShape, until: float, rng: random.Random) -> None:
        self._sender, self._shape, self._until, self._rng = sender, shape, until, rng
        self.run_ids: Sequence[str] = [sender.run_id]
        self._left = 0

    def start(self) -> None:
        delay = self._rng.uniform(0, self._shape.pause_s)
        self._sender.cluster.clock.at(self._sender.cluster.clock.now + delay, self._burst)

    def _burst(self) -> None:
        # Users are in different phases, so the first burst may be shorter; all bursts have the same steps.
        self._left = self._shape.burst_steps
        self._step()
        self._step()

    def _step(self) -> None:
        if not self._left or self._sender.cluster.clock.now >= self._until:
            return
        self._left -= 1
        for tokens in chunks(self._shape.step_tokens):
            self._sender.train(Kind.FORWARD_BACKWARD, tokens, nothing)
        self._sender.train(Kind.OPTIM_STEP, 0, self._next if self._left else self._pause)

    def _next(self, _: Operation) -> None:
        self._step()

    def _pause(self, _: Operation) -> None:
        pause = self._rng.expovariate(1 / self._shape.pause_s)
        self._sender.cluster.clock.at(self._sender.cluster.clock.now + pause, self._burst_again)

    def _burst_again(self) -> None:
        if self._sender.cluster.clock.now < self._until:
            self._burst()


class RlClient:
    """A user who samples, waits for all of it, trains, and starts again."""

    def __init__(
        self, sender: Sender, shape: RlShape, lengths: Callable[[], int], until: float, rng: random.Random
    ) -> None:
        self._sender, self._shape, self._lengths, self._until, self._rng = sender, shape, lengths, until, rng
        self.run_ids: Sequence[str] = [sender.run_id]
        self._num_running = 0
        self._tokens = 0

    def start(self) -> None:
        clock = self._sender.cluster.clock
        clock.at(clock.now + self._rng.uniform(0, 2 * self._shape.reward_s), self._sample)

    def _sample(self) -> None:
        if self._sender.cluster.clock.now >= self._until:
            return
        shape, self._num_running, self._tokens = self._shape, self._shape.prompts, 0
        for _ in range(shape.prompts):
            new_tokens = [self._lengths() for _ in range(shape.group_size)]
            self._tokens += shape.prompt_tokens + sum(new_tokens)  # a prompt counts once in a group
            self._sender.sample(shape.prompt_tokens, new_tokens, self._sampled)

    def _sampled(self, _: Operation) -> None:
        self._num_running -= 1
        if not self._num_running:
            clock = self._sender.cluster.clock
            clock.at(clock.now + self._rng.expovariate(1 / self._shape.reward_s), self._train)

    def _train(self) -> None:
        for tokens in chunks(self._tokens):
            self._sender.train(Kind.FORWARD_BACKWARD, tokens, nothing)
        self._sender.train(Kind.OPTIM_STEP, 0, nothing)
        self._sender.train(Kind.SAVE_FOR_SAMPLER, 0, lambda _: self._sample())


class TraceClients:
    """The requests of a trace at some rate, each of a random one of the users."""

    def __init__(
        self, cluster: Cluster, trace: Trace, per_s: float, users: int, until: float, rng: random.Random
    ) -> None:
        self._cluster, self._until, self._rng = cluster, until, rng
        self._senders = [Sender(cluster, f"trace-{number}") for number in range(users)]
        self._arrivals: Iterator[Request] = trace.arrivals(per_s)
        self.run_ids: Sequence[str] = []

    def start(self) -> None:
        self._wait_for(next(self._arrivals))

    def _wait_for(self, request: Request) -> None:
        if request.seconds < self._until:
            self._cluster.clock.at(request.seconds, lambda: self._send(request))

    def _send(self, request: Request) -> None:
        self._rng.choice(self._senders).sample(request.prompt_tokens, [request.new_tokens], nothing)
        self._wait_for(next(self._arrivals))


def chunks(tokens: int) -> Sequence[int]:
    """The passes that a client makes of a batch."""
    full, rest = divmod(tokens, MAX_CHUNK_TOKENS)
    return [MAX_CHUNK_TOKENS] * full + [rest] * (rest > 0)


def nothing(_: Operation) -> None:
    """Wait for other operations."""
