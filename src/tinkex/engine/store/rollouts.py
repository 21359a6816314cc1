"""Rollouts of reinforcement learning that loops report: what was sampled in each step, with rewards and advantages.

What a run and a user may store is bounded: the oldest steps are deleted for new ones.
"""

# ruff: noqa: S608 -- the statements are made of this module's constants
from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tinkex.engine.store.database import BATCH_ROWS, Database, Execute
from tinkex.engine.store.reading import Rows
from tinkex.engine.store.run_changes import RunChanges

ROW_BYTES = 300
"""What a rollout counts for besides its content."""


class RolloutContent(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled; ``logprobs`` and ``advantages`` have a value per token of the answer."""

    group: str = ""
    """Rollouts of one step with the same group are answers to one prompt."""
    prompt: str | None = None
    text: str | None = None
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Parts of the reward, and whatever else the loop measured."""


@dataclass(frozen=True)
class RolloutRow:
    """One rollout; ``place`` is its number within the step."""

    run_id: str
    step: int
    place: int
    at: float
    reward: float | None
    advantage: float | None
    content: RolloutContent


@dataclass(frozen=True)
class RolloutStep:
    """The rollouts of one step together."""

    step: int
    num_rollouts: int
    num_tokens: int
    mean_reward: float | None
    min_reward: float | None
    max_reward: float | None
    at: float


@dataclass(frozen=True)
class RewardHistogram:
    """How many rollouts of each step have a reward in each bin.

    ``edges`` are one more than the bins. Where there are more steps than were asked for, neighbours are counted together, and
    ``steps`` has the first of them.
    """

    edges: Sequence[float]
    steps: Sequence[int]
    counts: Sequence[Sequence[int]]
    """By step, then by bin."""


class RolloutReader:
    """Reads the rollouts of runs; with an ``owner``, only those of that user. Safe on any thread.

    Example:
        >>> RolloutReader(reader).of_step(run_id, 12, limit=16)
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def steps(
        self, run_id: str, *, start: int = 0, limit: int = 1000, owner: str | None = None
    ) -> Sequence[RolloutStep]:
        """Returns the steps from ``start`` on that have rollouts, in order."""
        rows = self._rows.all(
            "SELECT step, count(*) AS num, sum(num_tokens) AS num_tokens, avg(reward) AS mean, min(reward) AS low, "
            f"max(reward) AS high, max(at) AS at FROM rollouts {_OF_RUN} AND step >= ?3 GROUP BY step ORDER BY step LIMIT ?4",
            (run_id, owner, start, limit),
        )
        return [
            RolloutStep(
                row["step"], row["num"], row["num_tokens"], row["mean"], row["low"], row["high"], row["at"]
            )
            for row in rows
        ]

    def of_step(
        self, run_id: str, step: int, *, limit: int = 64, offset: int = 0, owner: str | None = None
    ) -> Sequence[RolloutRow]:
        """Returns a page of the rollouts of one step, in the order in which the loop reported them."""
        rows = self._rows.all(
            f"SELECT * FROM rollouts {_OF_RUN} AND step = ?3 ORDER BY place LIMIT ?4 OFFSET ?5",
            (run_id, owner, step, limit, offset),
        )
        return [_rollout(row) for row in rows]

    def histogram(
        self, run_id: str, *, num_bins: int = 20, max_steps: int = 200, owner: str | None = None
    ) -> RewardHistogram | None:
        """Returns the rewards of a run by step; None if no rollout has one."""
        rows = self._rows.all(
            f"SELECT step, reward FROM rollouts {_OF_RUN} AND reward IS NOT NULL ORDER BY step",
            (run_id, owner),
        )
        if not rows:
            return None
        steps_N = np.array([row["step"] for row in rows])
        rewards_N = np.array([row["reward"] for row in rows])
        edges = np.histogram_bin_edges(rewards_N, num_bins)
        distinct, places_N = np.unique(steps_N, return_inverse=True)
        together = -(-len(distinct) // max_steps)
        places_N = places_N // together
        bins_N = np.clip(np.searchsorted(edges, rewards_N, "right") - 1, 0, num_bins - 1)
        counts: npt.NDArray[np.int64] = np.zeros((int(places_N.max()) + 1, num_bins), np.int64)
        np.add.at(counts, (places_N, bins_N), 1)
        return RewardHistogram(edges.tolist(), distinct[::together].tolist(), counts.tolist())


class Rollouts(RolloutReader):
    """The rollouts of all runs. They are written through the engine's database and read through another connection."""

    def __init__(self, database: Database, rows: Rows, changes: RunChanges) -> None:
        super().__init__(rows)
        self._database = database
        self._changes = changes

    def add(
        self, rollouts: Collection[RolloutRow], owner: str, *, max_bytes_per_run: int, max_bytes_per_user: int
    ) -> None:
        """Write rollouts of a user's runs; one that has the place of another replaces it, so a call can be repeated.

        Then the oldest steps of these runs are deleted, and the oldest rollouts of the user, until the rest fits.
        """
        rows = []
        for each in rollouts:
            content = zlib.compress(_encoder.encode(_packed(each.content)), 1)
            size = ROW_BYTES + len(content)
            tokens = len(each.content.tokens)
            key = (each.run_id, each.step, each.place, owner, each.at)
            rows.append((*key, each.reward, each.advantage, tokens, size, content))
        run_ids = {each.run_id for each in rollouts}
        with self._database.transaction() as execute:
            execute.many(
                "INSERT INTO rollouts (run_id, step, place, owner, at, reward, advantage, num_tokens, size_bytes, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET at = excluded.at, reward = excluded.reward, "
                "advantage = excluded.advantage, num_tokens = excluded.num_tokens, size_bytes = excluded.size_bytes, "
                "content = excluded.content",
                rows,
            )
            for run_id in run_ids:
                self._drop_oldest(execute, "run_id = ?1", "step", run_id, max_bytes_per_run)
            self._drop_oldest(execute, "owner = ?1", "at", owner, max_bytes_per_user)
        self._changes.notify(run_ids)

    def prune(self) -> int:
        """Delete a batch of the rollouts of runs that no longer exist; returns how many, 0 if none are left."""
        with self._database.transaction() as execute:
            gone = self._database.one(
                "SELECT run_id FROM (SELECT DISTINCT run_id FROM rollouts) WHERE run_id NOT IN (SELECT run_id FROM runs) LIMIT 1"
            )
            if gone is None:
                return 0
            return execute(
                f"DELETE FROM rollouts WHERE rowid IN (SELECT rowid FROM rollouts WHERE run_id = ? LIMIT {BATCH_ROWS})",
                (gone["run_id"],),
            )

    def _drop_oldest(self, execute: Execute, condition: str, order: str, of: str, max_bytes: int) -> None:
        """Delete the oldest steps, or rollouts of the same time, until the rest takes ``max_bytes`` at most."""
        row = self._database.one(f"SELECT sum(size_bytes) AS total FROM rollouts WHERE {condition}", (of,))
        excess = (row["total"] or 0) - max_bytes if row is not None else 0
        if excess <= 0:
            return
        sizes = self._database.all(
            f"SELECT {order} AS age, sum(size_bytes) AS size FROM rollouts WHERE {condition} GROUP BY 1 ORDER BY 1",
            (of,),
        )
        for oldest in sizes:
            execute(f"DELETE FROM rollouts WHERE {condition} AND {order} = ?2", (of, oldest["age"]))
            excess -= oldest["size"]
            if excess <= 0:
                return


# The run has the owner too, so that these queries need nothing but their index.
_OF_RUN = "WHERE run_id = ?1 AND (?2 IS NULL OR EXISTS (SELECT 1 FROM runs WHERE run_id = ?1 AND owner = ?2))"


class _Packed(msgspec.Struct, array_like=True):
    """A rollout's content with numbers as arrays of four bytes each."""

    group: str
    prompt: str | None
    text: str | None
    prompt_tokens: bytes
    tokens: bytes
    logprobs: bytes | None
    advantages: bytes | None
    metrics: dict[str, float]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def _packed(content: RolloutContent) -> _Packed:
    return _Packed(
        content.group,
        content.prompt,
        content.text,
        np.array(content.prompt_tokens, "<i4").tobytes(),
        np.array(content.tokens, "<i4").tobytes(),
        None if content.logprobs is None else np.array(content.logprobs, "<f4").tobytes(),
        None if content.advantages is None else np.array(content.advantages, "<f4").tobytes(),
        dict(content.metrics),
    )


def _rollout(row: sqlite3.Row) -> RolloutRow:
    packed = _decoder.decode(zlib.decompress(row["content"]))
    content = RolloutContent(
        group=packed.group,
        prompt=packed.prompt,
        text=packed.text,
        prompt_tokens=tuple(np.frombuffer(packed.prompt_tokens, "<i4").tolist()),
        tokens=tuple(np.frombuffer(packed.tokens, "<i4").tolist()),
        logprobs=_floats(packed.logprobs),
        advantages=_floats(packed.advantages),
        metrics=packed.metrics,
    )
    return RolloutRow(
        row["run_id"], row["step"], row["place"], row["at"], row["reward"], row["advantage"], content
    )


def _floats(packed: bytes | None) -> tuple[float, ...] | None:
    return None if packed is None else tuple(np.frombuffer(packed, "<f4").tolist())
