"""Every place where our public surface differs from the official one, by reason.

A name that differs and is not listed here fails the test, and so does a difference that has changed or gone.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_BODY = "body: None instead of required"
_SETTINGS = "also config=None, transport=None, events=None, caller=None"

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "An error can be built with less: what is not given is None.": {
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
    "Settings, transport and observers can be handed over.": {
        "tinker.AdminClient": _SETTINGS,
        "tinker.RestClient": _SETTINGS,
    },
    "Settings, transport and observers can be handed over; an unknown keyword is an error, not a warning.": {
        "tinker.ServiceClient": "without **kwargs; also config=None, transport=None, events=None",
    },
    "Regularizers can be added to the loss.": {
        "tinker.TrainingClient.forward_backward_custom": "also regularizers=()",
        "tinker.TrainingClient.forward_backward_custom_async": "also regularizers=()",
    },
    "Made by other clients, never by users.": {
        "tinker.SamplingClient": "made with other arguments",
        "tinker.TrainingClient": "made with other arguments",
    },
    "The class is the tag: it can be read and travels, but it is not an argument.": {
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
    "Our server reads requests of older clients too, which leave these out.": {
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
    "Clients read answers of servers that leave these out.": {
        "tinker.types.RequestFailedResponse": (
            "category: <RequestErrorCategory.Unknown: 'unknown'> instead of required"
        ),
        "tinker.types.TelemetryResponse": "status: 'accepted' instead of required",
    },
    "One value serves as what the server says and what the caller reads.": {
        "tinker.types.SaveWeightsExternalResponse": "also size_bytes=None; path: None instead of required",
        "tinker.types.SaveWeightsForSamplerResponse": (
            "also sampling_session_id=None; path: None instead of required"
        ),
    },
    "Holds the fields that travel; no program builds it. `optim_params` can be read.": {
        "tinker.types.OptimStepRequest": "without optim_params; also adam_params=None, optimizer_params=None",
    },
    "Holds the fields of the protobuf message; no program builds it.": {
        "tinker.types.ForwardBackwardRequest": (
            "without forward_backward_input; also data, loss_fn, loss_fn_config=None, forward_only=False; "
            "seq_id: required instead of None"
        ),
    },
    "The lists are made from the arrays at first use; private caches are not arguments.": {
        "tinker.types.SampleResponse": "without _prompt_logprobs_list=None, _topk_prompt_logprobs_list=None",
        "tinker.types.SampledSequence": (
            "without _tokens_list=None, _logprobs_list=None, _topk_logprobs_list=None; "
            "tokens_np: required instead of None"
        ),
    },
    "None stands for an empty dictionary.": {
        "tinker.types.Datum": "loss_fn_inputs: None instead of …",
    },
    "Hooks of pydantic, which our types do not use.": {
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
        "response types and `SamplingParams` drop keywords they do not know",
        "every type refuses them: a misspelt `temprature` must not be sampled with the default",
    ),
    (
        "Impossible values",
        "`SamplingParams(top_p=7)`, `AdamParams(beta1=2)` or `LoraConfig(rank=0)` are found out by the server",
        "refused with a `ValueError` where they are written",
    ),
    (
        "Numbers in other forms",
        '`True`, `b"5"` or `-1` is a token id; text that is not base64 is an empty image',
        'refused; `"5"`, `5.0`, numpy and torch numbers, dictionaries for values and text for times are read',
    ),
    (
        "`TensorData` of numbers that do not fit",
        "fractions in an int64 tensor are cut off, a dimension of -1 is worked out",
        "refused with a `ValueError` that says what to pass",
    ),
    (
        "`TensorData` of nested data without a shape",
        "`shape` is None, `to_numpy()` is nested",
        "`shape` is that of the data",
    ),
    (
        "Other pydantic methods",
        "`model_json_schema`, `exclude_unset`, `.dict()` …",
        "`model_copy`, `model_fields`, `model_construct`, `model_dump`, `model_validate` and their `_json` are there",
    ),
    (
        "`Timeout`",
        "`httpx.Timeout`",
        "a class of our own with the same arguments and attributes; httpx is not needed",
    ),
    (
        "`create_custom_loss` that failed on its way to the server",
        "cannot be repeated in the session: the loss counts as made",
        "can be called again with the same function",
    ),
    (
        "`APIResponse`, `AsyncAPIResponse`, `resources`, `proto`",
        "reachable in the package, not exported",
        "internals of the official transport; not there",
    ),
)
"""Differences that no signature shows: what, there, here."""


def reasons() -> dict[str, tuple[str, str]]:
    """Name → what differs and why."""
    return {name: (what, reason) for reason, names in DIFFERENCES.items() for name, what in names.items()}
