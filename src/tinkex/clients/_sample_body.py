"""Encodes the request of a sample; a module of its own because bursts of samples spend their time here."""

from __future__ import annotations

from tinkex import types
from tinkex._wire import json
from tinkex.types.sampling import SAMPLING_EXTENSIONS

__all__ = ["sample_body"]


def sample_body(request: types.SampleRequest, seq_id: int) -> bytes:
    """The request under this number, as JSON without the fields that are ``None``.

    >>> prompt, params = types.ModelInput.from_ints([7]), types.SamplingParams(max_tokens=1)
    >>> request = types.SampleRequest(prompt=prompt, sampling_params=params, prompt_logprobs=False)
    >>> numbered = request.model_copy(update={"seq_id": 3})
    >>> json.decode(sample_body(request, 3), types.SampleRequest) == numbered
    True
    """
    if any(type(chunk) is not types.EncodedTextChunk for chunk in request.prompt.chunks):
        return json.encode(request.model_copy(update={"seq_id": seq_id}))
    # Text contains no None and is long; everything else is small enough to be traversed.
    fields = {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
    params = request.sampling_params
    fields["sampling_params"] = {
        name: value for name in _PARAMS if (value := getattr(params, name)) is not None
    }
    for name in params.extensions():
        fields["sampling_params"][name] = getattr(params, name)
    fields["seq_id"] = seq_id
    return json.encode(fields, omit_none=False)


_FIELDS = types.SampleRequest.__struct_fields__
_PARAMS = tuple(name for name in types.SamplingParams.__struct_fields__ if name not in SAMPLING_EXTENSIONS)
