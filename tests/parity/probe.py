"""Calls every public method of the `tinker` package it finds, against one server; run in a process of its own.

It uses nothing but that package, so it works with every version of it. Prints one JSON object: method → "works", or how it
failed; a method without a case here is "not driven".
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from tinker import types

MODEL = "tiny/llama"
ON_ITS_OWN_LOOP = frozenset({"get_audit_log_async"})
"""Coroutines that the official client can run on its own event loop only."""
PATIENCE_S = 60
TOKENS = [5, 6, 7, 8, 9]


def per_datum(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


def over_all(_data: Any, logprobs: Any) -> Any:
    return sum((each**2).sum() for each in logprobs), {"mean:mean": 1.0}


class World:
    """What the calls need: clients, a run, weights under fresh names."""

    def __init__(self, url: str, key: str, directory: str) -> None:
        self.login = {"base_url": url, "api_key": key}
        self.service = tinker.ServiceClient(**self.login)
        self.training = self.service.create_lora_training_client(MODEL, rank=2, user_metadata={"step": 1})
        self.sampling = self.service.create_sampling_client(
            base_model=directory
        )  # so that its tokenizer is found
        self.rest = (
            tinker.RestClient(**self.login)
            if hasattr(tinker, "RestClient")
            else self.service.create_rest_client()
        )
        self.admin = tinker.AdminClient(**self.login) if hasattr(tinker, "AdminClient") else None
        self.names = (f"n{number}" for number in range(10_000))
        self.path = self.saved()
        self.run = self.path.split("/")[2]
        self.session = self.run.partition(":")[0]
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        self.hours = (hour - timedelta(hours=1), hour + timedelta(hours=1))
        self.prompt = types.ModelInput.from_ints(TOKENS)
        self.params = types.SamplingParams(max_tokens=2)
        self.data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 4},
            )
        ]

    def saved(self) -> str:
        return self.training.save_state(next(self.names)).result().path


Case = Callable[[World], tuple[Any, ...]]


def nothing(_world: World) -> tuple[Any, ...]:
    return ()


def fresh_path(world: World) -> tuple[Any, ...]:
    return (world.saved(),)


def checkpoint(world: World) -> tuple[Any, ...]:
    return (world.run, "weights/" + world.saved().split("/")[-1])


CASES: dict[str, dict[str, Case]] = {
    "ServiceClient": {
        "get_server_capabilities": nothing,
        "create_lora_training_client": lambda _: (MODEL, 2),
        "create_sampling_client": lambda _: (None, MODEL),
        "create_training_client_from_state": lambda w: (w.path,),
        "create_training_client_from_state_with_optimizer": lambda w: (w.path,),
        "create_custom_loss": lambda _: (per_datum, {"logprobs": 1, "weights": 1}),
        "copy_weights": lambda w: (w.path,),
        "create_rest_client": nothing,
        "get_console_url": nothing,
        "get_telemetry": nothing,
        "close": lambda _: ("success",),
    },
    "TrainingClient": {
        "forward": lambda w: (w.data, "cross_entropy"),
        "forward_backward": lambda w: (w.data, "cross_entropy"),
        "forward_backward_custom": lambda w: (w.data, over_all),
        "optim_step": lambda _: (types.AdamParams(),),
        "save_state": lambda w: (next(w.names),),
        "load_state": fresh_path,
        "load_state_with_optimizer": fresh_path,
        "save_weights_for_sampler": lambda w: (next(w.names),),
        "save_weights_external": lambda w: (next(w.names),),
        "save_weights_and_get_sampling_client": nothing,
        "save_weights_and_get_sampling_client_submit": nothing,
        "create_sampling_client": fresh_path,
        "get_info": nothing,
        "get_tokenizer": nothing,
        "get_console_url": nothing,
        "get_telemetry": nothing,
        "on_queue_state_change": lambda _: (queue_state(), None),
    },
    "SamplingClient": {
        "sample": lambda w: (w.prompt, 2, w.params),
        "compute_logprobs": lambda w: (w.prompt,),
        "create": lambda w: (w.service.holder,),
        "get_base_model": nothing,
        "get_tokenizer": nothing,
        "get_sampler_handle": nothing,
        "from_sampler_handle": lambda w: (w.sampling.get_sampler_handle(),),
        "get_telemetry": nothing,
        "on_queue_state_change": lambda _: (queue_state(), None),
    },
    "RestClient": {
        "get_training_run": lambda w: (w.run,),
        "get_training_run_by_tinker_path": lambda w: (w.path,),
        "get_weights_info_by_tinker_path": lambda w: (w.path,),
        "list_training_runs": nothing,
        "list_checkpoints": lambda w: (w.run,),
        "list_user_checkpoints": nothing,
        "get_external_weights_urls": lambda w: (
            w.training.save_weights_external(next(w.names)).result().path,
        ),
        "get_checkpoint_archive_url": checkpoint,
        "get_checkpoint_archive_url_from_tinker_path": fresh_path,
        "copy_weights": lambda w: (w.path, "project"),
        "delete_checkpoint": checkpoint,
        "delete_checkpoint_from_tinker_path": fresh_path,
        "publish_checkpoint_from_tinker_path": lambda w: (w.path,),
        "unpublish_checkpoint_from_tinker_path": lambda w: (w.path,),
        "set_checkpoint_ttl_from_tinker_path": lambda w: (w.saved(), 3600),
        "get_session": lambda w: (w.session,),
        "list_sessions": nothing,
        "search_sessions": lambda _: (types.SessionSearchRequest(),),
        "assign_session_project": lambda w: (w.session, "project"),
        "export_session_trace": lambda w: (w.session,),
        "get_sampler": lambda w: (settle(w.sampling)._sampling_session_id,),
        "get_audit_log": nothing,
        "get_billing_usage": lambda w: w.hours,
        "get_current_checkpoint_storage_usage": nothing,
        "whoami": nothing,
        "get_server_capabilities": nothing,
        "get_telemetry": nothing,
    },
    "AdminClient": {
        "get_audit_log": nothing,
        "get_billing_usage": lambda w: w.hours,
        "get_current_checkpoint_storage_usage": nothing,
        "get_telemetry": nothing,
    },
}

KEYWORDS: dict[str, dict[str, Any]] = {"SamplingClient.create": {"base_model": MODEL}}


def queue_state() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


def target_of(world: World, client: str, method: str) -> Any:
    if method == "close" or (client == "ServiceClient" and method == "copy_weights"):
        return tinker.ServiceClient(**world.login, project_id="project")
    clients = {
        "ServiceClient": world.service,
        "TrainingClient": world.training,
        "SamplingClient": world.sampling,
        "RestClient": world.rest,
        "AdminClient": world.admin,
    }
    return clients[client]


def settle(value: Any) -> Any:
    """The value behind futures, of whichever kind."""
    for _ in range(3):
        if isinstance(value, Future) or hasattr(value, "result_async"):
            value = value.result(PATIENCE_S)
    return value


async def settle_async(value: Any) -> Any:
    for _ in range(3):
        if inspect.isawaitable(value):
            value = await asyncio.wait_for(value, PATIENCE_S)
    return value


def drive(world: World, client: str, method: str) -> str:
    plain = method.removesuffix("_async")
    case = CASES[client].get(plain)
    if case is None:
        return "not driven"
    arguments, keywords = case(world), KEYWORDS.get(f"{client}.{plain}", {})
    if plain == "on_queue_state_change":
        accepted = inspect.signature(getattr(target_of(world, client, plain), plain)).parameters
        arguments = arguments[: len(accepted)]
    function = getattr(target_of(world, client, plain), method)
    try:
        if method in ON_ITS_OWN_LOOP:
            settle(world.service.holder.run_coroutine_threadsafe(function(*arguments, **keywords)))
        elif method != plain:

            async def run() -> Any:
                return await settle_async(function(*arguments, **keywords))

            asyncio.run(run())
        else:
            settle(function(*arguments, **keywords))
    except Exception as error:  # noqa: BLE001 -- it is the finding
        return f"{type(error).__name__}: {error}"[:300]
    return "works"


def methods() -> Iterator[tuple[str, str]]:
    """Every public method of every client of this version."""
    import tinker.lib.public_interfaces as public
    from tinker.lib.public_interfaces.rest_client import RestClient

    found = {name: getattr(public, name, None) for name in CASES} | {"RestClient": RestClient}
    for client, kind in found.items():
        if kind is None:
            continue
        for name, value in vars(kind).items():
            if not name.startswith("_") and not isinstance(value, property):
                yield client, name


def main() -> None:
    warnings.simplefilter("ignore")
    world = World(*sys.argv[1:4])
    print(json.dumps({f"{client}.{method}": drive(world, client, method) for client, method in methods()}))


if __name__ == "__main__":
    main()
