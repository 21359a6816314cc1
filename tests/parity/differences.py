"""Every difference between our public API and the official one, by reason.

A difference that is not listed here fails the test, and so does a listed difference that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_BODY = "body: None instead of required"
_SETTINGS = "also config=None, transport=None, events=None, caller=None"

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
    "Additional arguments for settings, transport and event sinks; an unknown keyword is an error, not a warning.": {
        "tinker.ServiceClient": "without **kwargs; also config=None, transport=None, events=None",
    },
    "Additional argument for regularizers.": {
        "tinker.TrainingClient.forward_backward_custom": "also regularizers=()",
        "tinker.TrainingClient.forward_backward_custom_async": "also regularizers=()",
    },
    "Created by other clients, never by users.": {
        "tinker.SamplingClient": "made with other arguments",
        "tinker.TrainingClient": "made with other arguments",
    },
    "The class determines the tag: it is an attribute and is serialized, but it is not an argument.": {
        f"tinker.types.{name}": f"without {tag}"
        for name, tag in {
            "AccessibleSearchOwner": "type='accessible'",
            "ActiveSessionStatusQuery": "type='active'",
            "CancelledSessionStatusQuery": "type='cancelled'",
            "CheckpointBillingEvent": "type='checkpoint'",
            "ClientFinishedSessionStatusQuery": "type='client_finished'",
            "ClientSessionFinishErrored": "type='errored'",
            "ClientSessionFinishInterrupted": "type='interrupted'",
            "ClientSessionFinishSuccess": "type='success'",
            "ClientSessionFinished": "type='client_finished'",
            "FailedSessionStatusQuery": "type='failed'",
            "FutureFailed": "state='failed'",
            "FutureFinished": "state='finished'",
            "OwnSearchOwner": "type='own'",
            "SamplingPrefillBillingEvent": "type='sampling_prefill'",
            "SamplingSampleBillingEvent": "type='sampling_sample'",
            "SessionActive": "type='active'",
            "SessionCancelled": "type='cancelled'",
            "SessionFailed": "type='failed'",
            "SessionFailedRequestReason": "type='request'",
            "SessionFailedSamplingSessionReason": "type='sampling_session'",
            "SessionFailedTrainingRunReason": "type='training_run'",
            "StorageBillingEvent": "type='storage'",
            "TrainingBillingEvent": "type='training'",
            "UserSearchOwner": "type='user'",
        }.items()
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
    "One type for the server's response and for the caller's result.": {
        "tinker.types.SaveWeightsExternalResponse": "also size_bytes=None; path: None instead of required",
        "tinker.types.SaveWeightsForSamplerResponse": (
            "also sampling_session_id=None; path: None instead of required"
        ),
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
        "Retry of a `create_custom_loss` that did not reach the server",
        "not possible in the same session",
        "possible with the same function",
    ),
    (
        "`APIResponse`, `AsyncAPIResponse`, `resources`, `proto`",
        "importable, not exported",
        "do not exist: internals of the official transport",
    ),
)
"""Differences in behaviour: what, official, ours."""


def reasons() -> dict[str, tuple[str, str]]:
    """Returns difference and reason by name."""
    return {name: (what, reason) for reason, names in DIFFERENCES.items() for name, what in names.items()}
