"""Executes a random program through a retrying client; the results of two executions can be compared."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import tarfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.numpy

from tests.durability import programs
from tests.durability.killable import MODEL
from tests.durability.programs import ORIGIN, Body, Program, Run, Step
from tests.durability.retrying_client import Answer, RetryingClient, UnexpectedResponseError
from tests.unit.engine.kernels.cores import CORES
from tinkex._wire import proto
from tinkex._wire import tinkex_wire_pb2 as pb

Comparable = tuple[Any, ...]
"""The result of an operation; two executions of a program give equal ones."""


@dataclass
class Execution:
    """All results of one execution of a program, by run and position."""

    session_id: str
    results: dict[tuple[int, int | str], Comparable] = field(default_factory=dict)
    weights: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    checkpoints: dict[int, list[str]] = field(default_factory=dict)
    accepted: dict[str, set[int]] = field(default_factory=dict)
    """The accepted seq_ids of each run."""


async def execute(client: RetryingClient, program: Program) -> Execution:
    """Execute a program from its first request to the download of the trained weights."""
    created = await client.post(lambda: Body("create_session", b'{"tags":["durability"]}'))
    done = Execution(created.json["session_id"])
    performer = _Executor(client, program, done)
    async with asyncio.TaskGroup() as group:
        for run in program.runs:
            group.create_task(performer.run(run))
    return done


class _Executor:
    def __init__(self, client: RetryingClient, program: Program, done: Execution) -> None:
        self._client = client
        self._program = program
        self._done = done
        self._samplers = itertools.count()
        """Numbers of samplers, one for each attempt to create an unnamed one, like the official client."""

    async def run(self, run: Run) -> None:
        run_id = f"{self._done.session_id}:train:{run.place}"
        lora = {"rank": run.rank, "seed": run.seed}
        create = _body(
            "create_model",
            session_id=self._done.session_id,
            model_seq_id=run.place,
            base_model=MODEL,
            lora_config=lora,
        )
        made = await self._outcome(create)
        if made.get("model_id") != run_id:
            raise UnexpectedResponseError(f"{run_id} was not created: {made}")
        self._done.accepted[run_id] = {0, ORIGIN}
        origin = await self._outcome(programs.save_body(run_id, ORIGIN, "origin"))
        results: dict[int | None, asyncio.Future[Answer | None]] = {
            step.place: asyncio.get_running_loop().create_future() for step in run.steps
        }
        numbered = [step for step in run.steps if step.kind != "sample"]
        async with asyncio.TaskGroup() as group:
            for step in run.steps:
                if step.kind == "sample":
                    group.create_task(self._sample(run, step, results))
            for first in range(0, len(numbered), self._program.window):
                window = numbered[first : first + self._program.window]
                random.Random(window[0].draw).shuffle(window)
                async with asyncio.TaskGroup() as submissions:
                    for step in window:
                        submissions.create_task(self._step(run, step, run_id, origin["path"], results, group))
        await self._finish(run, run_id)

    async def _step(
        self,
        run: Run,
        step: Step,
        run_id: str,
        origin: str,
        results: dict[int | None, asyncio.Future[Answer | None]],
        group: asyncio.TaskGroup,
    ) -> None:
        path = origin
        if step.kind == "load" and step.after is not None:
            saved = await asyncio.shield(results[step.after])
            assert saved is not None
            path = _path(saved)

        def make() -> Body:
            match step.kind:
                case "step":
                    return programs.step_body(run_id, step)
                case "save":
                    return programs.save_body(run_id, step.number, f"n{step.number}")
                case "sampler":
                    return programs.sampler_body(run_id, step, None)
                case "snapshot":
                    return programs.sampler_body(run_id, step, next(self._samplers))
                case "load":
                    return programs.load_body(run_id, step, path)
                case _:
                    return programs.pass_body(self._program.dialect, run_id, step)

        request_id = await self._client.submit(make)
        if request_id is None and step.kind != "bad":
            raise UnexpectedResponseError(f"operation {step} of {run_id} was rejected")
        if request_id is not None:
            self._done.accepted[run_id].add(step.number)

        async def fetch() -> None:
            answer = await self._client.result(request_id) if request_id is not None else None
            self._done.results[run.place, step.place] = self._comparable(step.kind, answer)
            results[step.place].set_result(answer)

        group.create_task(fetch())

    async def _sample(
        self, run: Run, step: Step, results: dict[int | None, asyncio.Future[Answer | None]]
    ) -> None:
        sampler, path = None, None
        if step.after is not None:
            saved = await asyncio.shield(results[step.after])
            assert saved is not None
            sampler = saved.json.get("sampling_session_id")
            path = _path(saved) if sampler is None else None
        if sampler is None:
            sampler = await self._new_sampler(path)
        await self._draw(run, step.place, sampler, step.draw)

    async def _draw(self, run: Run, place: int | str, sampler: str, draw: int) -> None:
        number = run.place * 1000 + (place if isinstance(place, int) else 999)
        request_id = await self._client.submit(lambda: programs.sample_body(sampler, number, draw))
        assert request_id is not None
        answer = await self._client.result(request_id)
        self._done.results[run.place, place] = self._comparable("sample", answer)

    async def _new_sampler(self, path: str | None) -> str:
        source = {"base_model": MODEL} if path is None else {"model_path": path}
        number = next(self._samplers)
        made = await self._client.post(
            lambda: _body(
                "create_sampling_session",
                session_id=self._done.session_id,
                sampling_session_seq_id=number,
                **source,
            )
        )
        return str(made.json["sampling_session_id"])

    async def _finish(self, run: Run, run_id: str) -> None:
        """Save, download and sample the result, and end the run in every other program."""
        saved = await self._outcome(programs.save_body(run_id, run.ends_at, "end"))
        end = Step(-1, "sampler", run.ends_at + 1, run.seed)
        sampler = await self._outcome(programs.sampler_body(run_id, end, None))
        self._done.accepted[run_id] |= {run.ends_at, end.number}
        await self._draw(run, "end", await self._new_sampler(sampler["path"]), run.seed)
        self._done.weights[run.place] = await self._download(run_id, saved["path"])
        listed = (await self._client.get(f"/api/v1/training_runs/{run_id}/checkpoints")).json
        self._done.checkpoints[run.place] = sorted(each["checkpoint_id"] for each in listed["checkpoints"])
        if self._program.seed % 2:
            self._done.accepted[run_id].add(end.number + 1)
            await self._outcome(_body("unload_model", model_id=run_id))

    async def _download(self, run_id: str, path: str) -> dict[str, np.ndarray]:
        checkpoint = path.removeprefix(f"tinker://{run_id}/")
        moved = await self._client.get(f"/api/v1/training_runs/{run_id}/checkpoints/{checkpoint}/archive")
        address = moved.headers["location"].partition(f":{self._client.port}")[2]
        content = (await self._client.get(address)).content
        found: dict[str, np.ndarray] = {}
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                if member.name.endswith(".safetensors") and file is not None:
                    tensors = safetensors.numpy.load(file.read())
                    found |= {f"{member.name}:{name}": tensor for name, tensor in tensors.items()}
        return found

    async def _outcome(self, body: Body) -> dict[str, Any]:
        request_id = await self._client.submit(lambda: body)
        assert request_id is not None
        outcome: dict[str, Any] = (await self._client.result(request_id)).json
        return outcome

    def _comparable(self, kind: str, answer: Answer | None) -> Comparable:
        """The part of a response that is equal in every execution; ids are not."""
        if answer is None:
            return ("rejected",)
        if answer.headers["content-type"] == programs.JSON:
            content = answer.json
            if "error" in content:
                # A bad request is rejected immediately or when it runs, depending on which models are in memory.
                return ("rejected",) if kind == "bad" else ("failed", content["category"])
            content.pop("sampling_session_id", None)
            return ("json", json.dumps(content, sort_keys=True).replace(self._done.session_id, "session"))
        if kind == "sample":
            message = pb.SampleResponse.FromString(answer.content)
            response = proto.decode_sample_response(answer.content, [""] * len(message.sequences))
            return (
                "sample",
                [(each.stop_reason, [*each.tokens]) for each in response.sequences],
                [np.asarray(each.logprobs) for each in response.sequences],
            )
        output = proto.decode_forward_backward_output(answer.content)
        arrays = [record[name].to_numpy() for record in output.loss_fn_outputs for name in sorted(record)]
        return ("pass", dict(output.metrics), arrays)


def _path(saved: Answer) -> str:
    path = saved.json.get("path")
    if path is None:
        raise UnexpectedResponseError(f"a checkpoint was not saved: {saved.json}")
    return str(path)


def _body(endpoint: str, **content: Any) -> Body:
    return Body(endpoint, json.dumps(content).encode())


def differences(expected: Execution, actual: Execution, *, exact: bool) -> list[str]:
    """Returns the differences between two executions; without ``exact``, those beyond rounding."""
    found = []
    for place in expected.results.keys() | actual.results.keys():
        ours, theirs = actual.results.get(place), expected.results.get(place)
        if ours is None or theirs is None or ours[0] != theirs[0] or not _same(ours, theirs, exact):
            found.append(f"{place}: {ours} instead of {theirs}")
    for run, tensors in expected.weights.items():
        others = actual.weights[run]
        if tensors.keys() != others.keys():
            found.append(f"run {run} has other tensors")
            continue
        different = [name for name in tensors if not _same_array(others[name], tensors[name], exact)]
        if different:
            found.append(f"weights of run {run} differ: {different[:3]} and so on, {len(different)} of them")
    if expected.checkpoints != actual.checkpoints:
        found.append(f"checkpoints: {actual.checkpoints} instead of {expected.checkpoints}")
    return found


def _same(ours: Comparable, theirs: Comparable, exact: bool) -> bool:
    match ours[0]:
        case "pass":
            return _same_numbers(ours[1], theirs[1], exact) and all(
                _same_array(mine, other, exact) for mine, other in zip(ours[2], theirs[2], strict=True)
            )
        case "sample":
            # Weights that differ by rounding may sample another token.
            return not exact or (
                ours[1] == theirs[1]
                and all(_same_logprobs(mine, other) for mine, other in zip(ours[2], theirs[2], strict=True))
            )
        case "json":
            if exact:
                return bool(ours == theirs)
            mine, other = json.loads(ours[1]), json.loads(theirs[1])
            return _same_numbers(mine.pop("metrics", {}), other.pop("metrics", {}), exact) and mine == other
        case _:
            return bool(ours == theirs)


def _same_numbers(ours: dict[str, float], theirs: dict[str, float], exact: bool) -> bool:
    if exact:
        return ours == theirs
    return ours.keys() == theirs.keys() and all(
        np.isclose(float(ours[name]), float(theirs[name]), rtol=5e-2, atol=1e-3) for name in ours
    )


def _same_array(ours: np.ndarray, theirs: np.ndarray, exact: bool) -> bool:
    if exact:
        return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=5e-2, atol=2e-3)


def _same_logprobs(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """The compiled core is batch-invariant; its torch fallback nearly so."""
    if CORES:
        return _same_array(ours, theirs, exact=True)
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=0, atol=1e-5)
