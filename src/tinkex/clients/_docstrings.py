"""What ``help()`` shows of client methods beside their own docstrings: every argument, and an example.

An argument means the same in every method, so it is described once, in :data:`ARGUMENTS`; a docstring mentions only what is
special about it. :func:`documented` adds what a docstring does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from textwrap import indent
from typing import Any, TypeVar

__all__ = ["ARGUMENTS", "EXAMPLES", "documented"]

C = TypeVar("C", bound=type)

ARGUMENTS = {
    "access_scope": "'owned' for your own, 'accessible' for all that this key can read.",
    "adam_params": "the older spelling of ``optim_params``.",
    "age_encryption_recipients": "age public keys; the files are encrypted for them.",
    "api_key": "the API key; default: that of this process.",
    "asset_id": "the id of an uploaded image.",
    "base_model": "the name of a base model, such as 'HuggingFaceTB/SmolLM2-135M-Instruct'.",
    "body": "what is sent, as JSON.",
    "checkpoint_id": "the id as listed, such as 'weights/0001'.",
    "data": "the batch: a list of ``Datum``.",
    "day": "a day (UTC); default: today.",
    "destination_project_id": "the project of the result; default: TINKER_PROJECT_ID.",
    "detail": "a text that is stored with the outcome.",
    "ending_before": "the end of the time, a datetime or an RFC 3339 string.",
    "event_type": "the kind of events; default: all.",
    "file": "a path, bytes, or a file object opened with 'rb'.",
    "files": "several of these, as a list or by name.",
    "fn": "the loss of one datum, as a function of its logprobs and inputs.",
    "handle": "what ``get_sampler_handle`` returned.",
    "holder": "the session, which is the ``holder`` of another client.",
    "include_prompt_logprobs": "whether the logprob of every prompt token is returned.",
    "input_ranks": "the number of dimensions of each input of the loss, by name.",
    "kind": "'snapshot' or 'inflight'.",
    "limit": "the number of items on the page.",
    "lora_config": "the rank and the trained layers of the adapter.",
    "loss_fn": "the name of the loss, such as 'cross_entropy'.",
    "loss_fn_config": "settings of the loss, such as {'clip_low_threshold': 0.8}.",
    "loss_type_input": "what the function receives: 'logprobs'.",
    "method": "'GET', 'POST', 'PUT' or 'DELETE'.",
    "model_path": "the path of a checkpoint, 'tinker://<run>/sampler_weights/<name>'.",
    "name": "the name of the checkpoint.",
    "max_points": "the most points of each metric; longer ones keep their ends, lowest and highest values.",
    "metrics": "numbers by name.",
    "if_unsupported": "'error' raises ``Unsupported`` on a server that does not store it, 'warn' warns and goes on.",
    "num_samples": "the number of sequences.",
    "offset": "the number of items before the page.",
    "optim_params": "learning rate and other parameters of the step.",
    "optimizer": "the optimizer of the run; default: AdamW.",
    "options": "query, headers, timeout and retries of this request.",
    "overwrite": "whether a checkpoint of this name is replaced.",
    "page_size": "the number of items per request.",
    "path": "the path of a checkpoint, 'tinker://<run>/weights/<name>'; of a request, its URL path.",
    "project_id": "the id of a project; default: all.",
    "prompt": "the tokens of the prompt, a ``ModelInput``.",
    "prompt_alt_tokens_k": "the number of alternative tokens at each prompt position.",
    "prompt_logprobs_last_n": "only the logprobs of the last tokens of the prompt; default: of all.",
    "queue_state": "'active', 'paused_rate_limit' or 'paused_capacity'.",
    "queue_state_observer": "is notified of the queue states of this call, instead of the client's observer.",
    "queue_state_reason": "why the server pauses it, if it says so.",
    "rank": "the rank of the adapter.",
    "record_stability_info": "not supported; True is rejected.",
    "regularizers": "penalties that are added to the loss.",
    "request": "what to search for.",
    "request_id": "the id of the operation.",
    "result_type": "the type of the result; default: a dictionary.",
    "retry_config": "how samples are retried; default: that of the client.",
    "sampler_id": "the id of a sampler.",
    "sampling_params": "maximum tokens, temperature, stop and other parameters.",
    "sampling_session_id": "an existing sampler; default: a new one.",
    "seed": "the random seed of the new adapter; default: random.",
    "session_id": "the id of a session.",
    "rollouts": "the rollouts, a list of ``types.Rollout``.",
    "start": "the first step.",
    "starting_on": "the beginning of the time, a datetime or an RFC 3339 string.",
    "step": "the step of the loop, 0 or more.",
    "stop": "the last step.",
    "status": "the outcome: 'success', 'errored' or 'interrupted'.",
    "target_prompt_logprobs": "tokens whose logprobs are returned at each prompt position.",
    "timeout": "seconds to wait.",
    "tinker_path": "the path of a checkpoint, 'tinker://<run>/weights/<name>'.",
    "topk_prompt_logprobs": "the number of top tokens at each prompt position.",
    "topk_sample_logprobs": "the number of top tokens at each sampled position.",
    "train_attn": "whether the attention layers are trained.",
    "train_mlp": "whether the feed-forward layers are trained.",
    "train_unembed": "whether the output layer is trained.",
    "training_run_id": "the id of a run.",
    "ttl_seconds": "the seconds after which it expires; default: never.",
    "upload_id": "the id of the upload.",
    "user_metadata": "your own texts, stored with it.",
    "weights_access_token": "a token that grants access to the checkpoint of another user.",
}
"""What each argument of client methods is."""

EXAMPLES = {
    "assign_session_project": "rest.assign_session_project(session_id, 'my-project').result()",
    "close": "service.close('success').result()",
    "compute_logprobs": "logprobs = client.compute_logprobs(types.ModelInput.from_ints(tokens)).result()",
    "copy_weights": "path = {client}.copy_weights('tinker://run-7/weights/final', ttl_seconds=86400).result()",
    "create": "client = SamplingClient.create(service.holder, base_model='Qwen/Qwen3-8B').result()",
    "create_custom_loss": "loss = service.create_custom_loss(squared, {'weights': 1}).result()",
    "create_lora_training_client": "training = service.create_lora_training_client('Qwen/Qwen3-8B', rank=16, seed=0)",
    "create_rest_client": "rest = service.create_rest_client()",
    "create_sampling_client": "sampler = {client}.create_sampling_client(model_path='tinker://run-7/sampler_weights/final')",
    "create_training_client_from_state": "training = service.create_training_client_from_state('tinker://run-7/weights/final')",
    "create_training_client_from_state_with_optimizer": "training = service.create_training_client_from_state_with_optimizer('tinker://run-7/weights/0010')",
    "delete": "rest.delete('/api/v1/assets/asset-1').result()",
    "delete_asset": "rest.delete_asset(asset.asset_id).result()",
    "delete_checkpoint": "rest.delete_checkpoint('run-7', 'weights/0001').result()",
    "delete_checkpoint_from_tinker_path": "rest.delete_checkpoint_from_tinker_path('tinker://run-7/weights/0001').result()",
    "export_session_trace": "url = rest.export_session_trace(session_id).result()",
    "external_weights_upload_cancel": "rest.external_weights_upload_cancel(upload.upload_id).result()",
    "external_weights_upload_finish": "result = rest.external_weights_upload_finish(upload.upload_id).result()",
    "external_weights_upload_start": "upload = rest.external_weights_upload_start(base_model=model, lora_config=types.LoraConfig(rank=32)).result()",
    "forward": "output = client.forward(batch, 'cross_entropy').result()",
    "forward_backward": "output = client.forward_backward(batch, 'cross_entropy').result()",
    "forward_backward_custom": "output = client.forward_backward_custom(batch, squared).result()",
    "from_sampler_handle": "client = SamplingClient.from_sampler_handle(handle)",
    "get": "health = rest.get('/api/v1/healthz').result()",
    "get_asset": "asset = rest.get_asset(asset_id).result()",
    "get_audit_log": "log = {client}.get_audit_log('all', date(2026, 1, 31)).result()",
    "get_base_model": "name = client.get_base_model()",
    "get_billing_usage": "usage = {client}.get_billing_usage('2026-01-01T00:00:00Z', '2026-02-01T00:00:00Z').result()",
    "get_checkpoint_archive_url": "archive = rest.get_checkpoint_archive_url('run-7', 'weights/0001').result()",
    "get_checkpoint_archive_url_from_tinker_path": "archive = rest.get_checkpoint_archive_url_from_tinker_path('tinker://run-7/weights/0001').result()",
    "get_console_url": "print({client}.get_console_url())",
    "get_current_checkpoint_storage_usage": "usage = {client}.get_current_checkpoint_storage_usage().result()",
    "get_external_weights_urls": "urls = rest.get_external_weights_urls('tinker://run-7/external_weights/final').result()",
    "get_health": "health = rest.get_health().result()",
    "get_info": "info = client.get_info()",
    "get_sampler": "sampler = rest.get_sampler(sampler_id).result()",
    "get_sampler_handle": "handle = client.get_sampler_handle()",
    "get_server_capabilities": "capabilities = service.get_server_capabilities()\nprint(capabilities.model_names())",
    "get_session": "session = rest.get_session(session_id).result()",
    "get_telemetry": "reporter = {client}.get_telemetry()",
    "get_tokenizer": "tokens = client.get_tokenizer().encode('The sea is')",
    "get_training_run": "run = rest.get_training_run('run-7').result()",
    "get_training_run_by_tinker_path": "run = rest.get_training_run_by_tinker_path('tinker://run-7/weights/0001').result()",
    "get_training_run_metrics": "metrics = rest.get_training_run_metrics(training.model_id).result()",
    "get_weights_info_by_tinker_path": "info = rest.get_weights_info_by_tinker_path('tinker://run-7/weights/0001').result()",
    "iter_assets": "for asset in rest.iter_assets():\n    print(asset.asset_id)",
    "iter_checkpoints": "for checkpoint in rest.iter_checkpoints('run-7'):\n    print(checkpoint.tinker_path)",
    "iter_search_checkpoints": "for checkpoint in rest.iter_search_checkpoints(types.CheckpointSearchRequest()):\n    print(checkpoint.tinker_path)",
    "iter_search_sessions": "for session in rest.iter_search_sessions(types.SessionSearchRequest()):\n    print(session)",
    "iter_sessions": "for session_id in rest.iter_sessions():\n    print(session_id)",
    "iter_training_runs": "for run in rest.iter_training_runs():\n    print(run.training_run_id)",
    "iter_user_checkpoints": "for checkpoint in rest.iter_user_checkpoints():\n    print(checkpoint.tinker_path)",
    "list_assets": "page = rest.list_assets(limit=20).result()",
    "list_checkpoints": "found = rest.list_checkpoints('run-7').result()",
    "list_rollouts": "page = rest.list_rollouts(training.model_id, step=10).result()",
    "list_sessions": "page = rest.list_sessions(limit=20).result()",
    "list_training_runs": "page = rest.list_training_runs(limit=20).result()",
    "list_user_checkpoints": "page = rest.list_user_checkpoints(limit=20).result()",
    "load_state": "client.load_state('tinker://run-7/weights/0010').result()",
    "load_state_with_optimizer": "client.load_state_with_optimizer('tinker://run-7/weights/0010').result()",
    "log_metrics": "client.log_metrics(10, {'reward': 0.5}).result()",
    "log_rollouts": "client.log_rollouts(10, [types.Rollout(group='1', tokens=tokens, reward=1.0)]).result()",
    "on_queue_state_change": "client.on_queue_state_change('paused_rate_limit', 'too many requests')",
    "optim_step": "client.optim_step(types.AdamParams(learning_rate=1e-4)).result()",
    "poll": "saved = service.poll(request_id, types.SaveWeightsResponse).result()",
    "post": "info = rest.post('/api/v1/weights_info', {'tinker_path': path}).result()",
    "publish_checkpoint_from_tinker_path": "rest.publish_checkpoint_from_tinker_path('tinker://run-7/weights/0001').result()",
    "put": "rest.put('/api/v1/things/1', {'name': 'one'}).result()",
    "renew_session": "renewed = service.renew_session()",
    "request": "response = rest.request('GET', '/api/v1/healthz').result()",
    "sample": "response = client.sample(prompt, 2, types.SamplingParams(max_tokens=16)).result()",
    "sample_stream": "stream = client.sample_stream(prompt, 1, types.SamplingParams(max_tokens=32))",
    "save_state": "saved = client.save_state('0010', ttl_seconds=86400).result()\nprint(saved.path)",
    "save_weights_and_get_sampling_client": "sampler = client.save_weights_and_get_sampling_client()",
    "save_weights_external": "saved = client.save_weights_external('final').result()",
    "save_weights_for_sampler": "saved = client.save_weights_for_sampler('final').result()\nprint(saved.path)",
    "search_checkpoints": "page = rest.search_checkpoints(types.CheckpointSearchRequest(limit=20)).result()",
    "search_sessions": "page = rest.search_sessions(types.SessionSearchRequest(limit=20)).result()",
    "set_checkpoint_ttl_from_tinker_path": "rest.set_checkpoint_ttl_from_tinker_path('tinker://run-7/weights/0001', 86400).result()",
    "unload": "client.unload().result()",
    "unpublish_checkpoint_from_tinker_path": "rest.unpublish_checkpoint_from_tinker_path('tinker://run-7/weights/0001').result()",
    "upload_asset": "asset = rest.upload_asset(Path('cat.png')).result()",
    "upload_assets": "assets = rest.upload_assets([Path('cat.png'), Path('dog.png')]).result()",
    "whoami": "owner = rest.whoami().result()",
}  # fmt: skip
"""A call of each method; ``{client}`` is the client of whichever class has it."""


def documented(client: str) -> Callable[[C], C]:
    """Adds to the docstrings of a class's public methods the arguments they do not mention, and an example.

    >>> @documented("rest")
    ... class Rest:
    ...     def get_session(self, session_id: str) -> str:
    ...         '''The runs of a session.'''
    >>> print(Rest.get_session.__doc__)
    The runs of a session.
    <BLANKLINE>
    Arguments:
        session_id: the id of a session.
    <BLANKLINE>
    Example::
    <BLANKLINE>
        session = rest.get_session(session_id).result()
    """

    def decorate(cls: C) -> C:
        for name, value in vars(cls).items():
            method = getattr(value, "__func__", value)
            if not name.startswith("_") and hasattr(method, "__code__") and method.__doc__:
                method.__doc__ = _complete(name, method, client)
        return cls

    return decorate


def _complete(name: str, method: Any, client: str) -> str:
    doc = cleandoc(method.__doc__)
    missing = [one for one in _parameters(method) if f"``{one}``" not in doc and one in ARGUMENTS]
    example = _example(name, client, awaits_twice="future for the" in doc)
    if missing:
        doc += "\n\nArguments:\n" + "\n".join(f"    {one}: {ARGUMENTS[one]}" for one in missing)
    if example is not None and "::\n" not in doc:
        doc += f"\n\nExample::\n\n{indent(example, '    ')}"
    return doc


def _parameters(method: Any) -> list[str]:
    if hasattr(method, "__signature__"):  # an async form
        return [one for one in method.__signature__.parameters if one not in {"self", "cls"}]
    code = getattr(method, "__wrapped__", method).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 8)]
    return [one for one in names if one not in {"self", "cls"}]


def _example(name: str, client: str, *, awaits_twice: bool) -> str | None:
    plain = name.removesuffix("_async")
    if plain not in EXAMPLES:
        return None
    example = EXAMPLES[plain].replace("{client}", client)
    if plain == name:
        return example
    first, newline, rest = example.partition("\n")
    first = re.sub(rf"\.{plain}\(", f".{name}(", first.removesuffix(".result()"))
    if first.startswith("for "):
        return f"async {first}{newline}{rest}"
    target, equals, call = first.rpartition(" = ") if not first.startswith(f"{client}.") else ("", "", first)
    awaited = f"await (await {call})" if awaits_twice else f"await {call}"
    return f"{target}{equals}{awaited}{newline}{rest}"
