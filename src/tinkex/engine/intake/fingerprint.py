"""Fingerprints of requests: equal for two submissions under one number that are the same.

They are computed from the decoded request, because the same request can have different encodings (map order, compression,
JSON or protobuf).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from tinkex.types import (
    Datum,
    ForwardBackwardRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    TensorData,
)
from tinkex.types.plain import encode_hook
from tinkex.types.sampling import SAMPLING_EXTENSIONS

_encoder = msgspec.json.Encoder(enc_hook=encode_hook, order="deterministic")


def fingerprint(request: Any) -> bytes:
    """A hash that is equal for equal requests.

    >>> from tinkex.types import OptimStepRequest, AdamParams
    >>> one, two = (OptimStepRequest(model_id="m", adam_params=AdamParams(learning_rate=lr)) for lr in (1e-3, 1e-4))
    >>> fingerprint(one) == fingerprint(two)
    False
    """
    if isinstance(request, ForwardBackwardRequest):
        return _forward_backward(request)
    if isinstance(request, SampleRequest):
        return _sample(request)
    if isinstance(request, SaveWeightsForSamplerRequest):
        # A client that retries an unnamed save sends a new sampling_session_seq_id under the same seq_id.
        request = msgspec.structs.replace(request, sampling_session_seq_id=None)
    return hashlib.blake2b(_encoder.encode(request), digest_size=16).digest()


def _sample(request: SampleRequest) -> bytes:
    params, bias = request.sampling_params, b""
    if params.logit_bias is not None:  # the encoder orders keys that are strings only
        bias = _encoder.encode(sorted(params.logit_bias.items()))
        params = msgspec.structs.replace(params, logit_bias=None)
        request = msgspec.structs.replace(request, sampling_params=params)
    # Options that are not used leave no trace, so that a request from before they existed is recognised.
    encoded = _encoder.encode(request).replace(_UNSET, b"", 1)
    return hashlib.blake2b(encoded + bias, digest_size=16).digest()


_UNSET = "".join(f',"{name}":null' for name in SAMPLING_EXTENSIONS).encode()


def _forward_backward(request: ForwardBackwardRequest) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(
        _encoder.encode(
            [request.model_id, request.seq_id, request.loss_fn, request.loss_fn_config, request.forward_only]
        )
    )
    for datum in request.data:
        _datum(digest, datum)
    return digest.digest()


def _datum(digest: hashlib.blake2b, datum: Datum) -> None:
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is not None:
            digest.update(b"t%d:" % len(tokens))
            digest.update(np.asarray(tokens, dtype=np.int64).tobytes())
        else:
            digest.update(_encoder.encode(chunk))
    for name in sorted(datum.loss_fn_inputs):
        digest.update(b"n" + name.encode())
        _tensor(digest, datum.loss_fn_inputs[name])
    digest.update(_encoder.encode([datum.model_input_spans, datum.loss_fn_input_spans]))


def _tensor(digest: hashlib.blake2b, tensor: TensorData) -> None:
    digest.update(
        _encoder.encode([tensor.dtype, tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices])
    )
    digest.update(tensor.array.tobytes())
