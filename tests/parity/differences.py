"""Every difference between our public API and the official one, by reason.

A difference that is not listed here fails the test, and so does a listed difference that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_BODY = "body: None instead of required"
_SETTINGS = "also config=None, transport=None, events=None, caller=None, **settings"

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "Arguments of an error are optional; the default is None.": {
        "tinker.APIConnectionError": "request: None instead of required",
        "tinker.APIError": f"request: None instead of required; {_NO_BODY}",
        "tinker.APIResponseValidationError": _NO_BODY,
        "tinker.APIStatusError": _NO_BODY,
        "tinker.APITimeoutError": "also message='Request timed out.'; request: None instead of required",
        "tinker.AuthenticationError": _NO_BODY,
        "tinker.BadRequestError": _NO_BODY,
        "tinker.BillingError": _NO_BODY,
        "tinker.ConflictError": _NO_BODY,
        "tinker.InternalServerError": _NO_BODY,
        "tinker.NotFoundError": _NO_BODY,
        "tinker.PermissionDeniedError": _NO_BODY,
        "tinker.RateLimitError": _NO_BODY,
        "tinker.UnprocessableEntityError": _NO_BODY,
    },
    "Additional arguments for settings, transport and event sinks.": {
        "tinker.AdminClient": _SETTINGS,
        "tinker.RestClient": _SETTINGS,
    },
    "Additional arguments for settings, transport, event sinks and lazy creation; an unknown keyword is an error, not a warning.": {
        "tinker.ServiceClient": "without **kwargs; also config=None, transport=None, events=None, lazy=False, **settings",
    },
    "Additional arguments for regularizers and for the observer of one call's queue states.": {
        "tinker.TrainingClient.forward_backward_custom": "also regularizers=(), queue_state_observer=None",
        "tinker.TrainingClient.forward_backward_custom_async": (
            "also regularizers=(), queue_state_observer=None"
        ),
    },
    "Additional argument for the observer of one call's queue states.": {
        f"tinker.{method}{form}": "also queue_state_observer=None"
        for method in (
            "SamplingClient.compute_logprobs",
            "SamplingClient.sample",
            "TrainingClient.forward",
            "TrainingClient.forward_backward",
            "TrainingClient.load_state",
            "TrainingClient.load_state_with_optimizer",
            "TrainingClient.optim_step",
            "TrainingClient.save_state",
            "TrainingClient.save_weights_external",
            "TrainingClient.save_weights_for_sampler",
        )
        for form in ("", "_async")
    },
    "An argument or a field of newer versions of the official SDK.": {
        "tinker.TrainingClient.save_weights_and_get_sampling_client": "also kind='snapshot'",
        "tinker.TrainingClient.save_weights_and_get_sampling_client_async": "also kind='snapshot'",
        "tinker.types.Checkpoint": "also base_model=None",
        "tinker.types.SaveWeightsForSamplerRequest": "also kind=None",
        "tinker.types.StorageBillingEvent": "also free=False",
    },
    "Additional fields, which some servers send.": {
        "tinker.types.SaveWeightsExternalResponse": "also size_bytes=None",
        "tinker.types.SupportedModel": "also model_id=None, arch=None",
    },
    "Sampling options of ours; a client does not send them to a server that does not offer them.": {
        "tinker.types.ClientConfigResponse": "also sampling_extensions=None, training_extensions=None",
        "tinker.types.SamplingParams": (
            "also min_p=None, presence_penalty=None, frequency_penalty=None, repetition_penalty=None, "
            "logit_bias=None, structured_output=None"
        ),
    },
    "Created by other clients, never by users.": {
        "tinker.SamplingClient": "made with other arguments",
        "tinker.TrainingClient": "made with other arguments",
    },
    "Optional, because our server also accepts requests of older clients without them.": {
        "tinker.types.ClientConfigRequest": "sdk_version: None instead of required",
        "tinker.types.CreateSamplingSessionRequest": "sampling_session_seq_id: 0 instead of required",
        "tinker.types.CreateSessionRequest": (
            "tags: [] instead of required; user_metadata: None instead of required; "
            "sdk_version: '' instead of required"
        ),
        "tinker.types.LoadWeightsRequest": "optimizer: False instead of required",
        "tinker.types.TelemetrySendRequest": (
            "platform: '' instead of required; sdk_version: '' instead of required; "
            "session_id: '' instead of required; process_uuid: None instead of required"
        ),
    },
    "Optional, because some servers omit them in responses.": {
        "tinker.types.RequestFailedResponse": (
            "category: <RequestErrorCategory.Unknown: 'unknown'> instead of required"
        ),
        "tinker.types.TelemetryResponse": "status: 'accepted' instead of required",
    },
    "Has the serialized fields; programs do not construct it. `optim_params` is an attribute.": {
        "tinker.types.OptimStepRequest": "without optim_params; also adam_params=None, optimizer_params=None",
    },
    "Has the fields of the protobuf message; programs do not construct it.": {
        "tinker.types.ForwardBackwardRequest": (
            "without forward_backward_input; also data, loss_fn, loss_fn_config=None, forward_only=False; "
            "seq_id: required instead of None"
        ),
    },
    "Lists are created from arrays at first use; private caches are not arguments.": {
        "tinker.types.SampleResponse": "without _prompt_logprobs_list=None, _topk_prompt_logprobs_list=None",
        "tinker.types.SampledSequence": (
            "without _tokens_list=None, _logprobs_list=None, _topk_logprobs_list=None; "
            "tokens_np: required instead of None"
        ),
    },
    "None instead of an empty dictionary.": {
        "tinker.types.Datum": "loss_fn_inputs: None instead of …",
    },
    "Pydantic hooks, which our types do not have.": {
        "tinker.types.DmelChunk.serialize_dmel": "missing",
        "tinker.types.DmelChunk.validate_dmel": "missing",
        "tinker.types.ImageChunk.serialize_data": "missing",
        "tinker.types.ImageChunk.validate_data": "missing",
    },
}
"""Reason → name → what differs, as the comparison words it."""

BEHAVIOUR: tuple[tuple[str, str, str], ...] = (
    (
        "Unknown keywords",
        "response types and `SamplingParams` drop unknown keywords",
        "every type rejects them: a misspelt `temprature` raises instead of sampling with the default",
    ),
    (
        "Invalid values",
        "`SamplingParams(top_p=7)`, `AdamParams(beta1=2)` or `LoraConfig(rank=0)` are rejected by the server",
        "rejected with a `ValueError` at construction",
    ),
    (
        "Conversions",
        '`True`, `b"5"` or `-1` is a token id; text that is not base64 is an empty image',
        'rejected; `"5"`, `5.0`, numpy and torch scalars, dictionaries for values and text for times are converted',
    ),
    (
        "Unknown losses",
        "sent, and rejected by the server",
        "rejected with a `ValueError` that lists the known ones; nothing is sent",
    ),
    (
        "`TensorData` with invalid numbers",
        "fractions in an int64 tensor are truncated, a dimension of -1 is inferred",
        "rejected with a `ValueError` that says what to pass",
    ),
    (
        "`TensorData` of nested data without a shape",
        "`shape` is None, `to_numpy()` is nested",
        "`shape` is that of the data",
    ),
    (
        "Other pydantic methods",
        "`model_json_schema`, `exclude_unset`, `.dict()` …",
        "`model_copy`, `model_fields`, `model_construct`, `model_dump`, `model_validate` and their `_json` variants exist",
    ),
    (
        "`Timeout`",
        "`httpx.Timeout`",
        "our own class with the same arguments and attributes; httpx is not needed",
    ),
    (
        "`checkpoint delete` without an answer, as in a script",
        "exits with 0 and deletes nothing",
        "exits with 1 and names `--yes`; so does `keys revoke`",
    ),
    (
        "Retry of a `create_custom_loss` that did not reach the server",
        "not possible in the same session",
        "possible with the same function",
    ),
    (
        "Warnings about deprecated names",
        "`FutureWarning`, always (since 0.38)",
        "`DeprecationWarning`, with the setting `deprecation_warnings`",
    ),
    (
        "Sampler handles",
        "0.38 rejects handles of before 0.38, which have no base model",
        "reads the handles of both; writes those of 0.36",
    ),
    (
        "`APIResponse`, `AsyncAPIResponse`, `resources`, `proto`",
        "importable, not exported",
        "do not exist: internals of the official transport",
    ),
)
"""Differences in behaviour: what, official, ours."""


CHANGED_IN_038: Mapping[str, Mapping[str, str]] = {
    "The same as in 0.38.": {
        "tinker.TrainingClient.save_weights_and_get_sampling_client": "",
        "tinker.TrainingClient.save_weights_and_get_sampling_client_async": "",
        "tinker.types.StorageBillingEvent": "",
    },
    "None means the default, and is not sent: servers of before 0.38 may reject the field.": {
        "tinker.types.SaveWeightsForSamplerRequest": "kind: None instead of 'snapshot'",
    },
    "A field that 0.38 no longer has, which some servers send; and sampling options of ours.": {
        "tinker.types.ClientConfigResponse": (
            "also create_model_via_load_weights=False, sampling_extensions=None, training_extensions=None"
        ),
    },
}
"""What is not as in :data:`DIFFERENCES` when compared with 0.38.0."""


def reasons(version: str = "0.36.0") -> dict[str, tuple[str, str]]:
    """Returns difference and reason by name."""
    found = _by_name(DIFFERENCES)
    if version == "0.38.0":
        found |= _by_name(CHANGED_IN_038)
    return {name: (what, reason) for name, (what, reason) in found.items() if what}


def _by_name(differences: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: (what, reason) for reason, names in differences.items() for name, what in names.items()}
