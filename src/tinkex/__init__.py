"""Tinkex: the Tinker API in Python, everywhere.

Names are loaded at first use, so that importing the package is fast.
"""

from __future__ import annotations

import sys

from tinkex._version import __version__ as __version__

TYPE_CHECKING = False  # type checkers read it as True; importing it from typing would take most of the time
if TYPE_CHECKING:
    from tinkex import auth as auth
    from tinkex import errors as errors
    from tinkex import losses as losses
    from tinkex import observability as observability
    from tinkex import platform as platform
    from tinkex import recovery as recovery
    from tinkex import types as types
    from tinkex._transport.breaker import CircuitBreaker as CircuitBreaker
    from tinkex._transport.breaker import circuit_breakers as circuit_breakers
    from tinkex.clients._pending import PendingSamplingClient as BackcompatSamplingClientFuture
    from tinkex.clients._pending import PendingTrainingClient as BackcompatTrainingClientFuture
    from tinkex.clients.admin import AdminClient as AdminClient
    from tinkex.clients.rest import RestClient as RestClient
    from tinkex.clients.retrying import with_retry as with_retry
    from tinkex.clients.retrying import with_retry_async as with_retry_async
    from tinkex.clients.sampling import RetryConfig as RetryConfig
    from tinkex.clients.sampling import SamplingClient as SamplingClient
    from tinkex.clients.service import ServiceClient as ServiceClient
    from tinkex.clients.training import TrainingClient as TrainingClient
    from tinkex.config import Config as Config
    from tinkex.config.request_options import RequestOptions as RequestOptions
    from tinkex.config.request_options import Timeout as Timeout
    from tinkex.errors import APIConnectionError as APIConnectionError
    from tinkex.errors import APIError as APIError
    from tinkex.errors import APIResponseValidationError as APIResponseValidationError
    from tinkex.errors import APIStatusError as APIStatusError
    from tinkex.errors import APITimeoutError as APITimeoutError
    from tinkex.errors import AuthenticationError as AuthenticationError
    from tinkex.errors import BadRequestError as BadRequestError
    from tinkex.errors import BillingError as BillingError
    from tinkex.errors import CircuitOpenError as CircuitOpenError
    from tinkex.errors import ClosedError as ClosedError
    from tinkex.errors import ConfigError as ConfigError
    from tinkex.errors import ConflictError as ConflictError
    from tinkex.errors import ExperimentalWarning as ExperimentalWarning
    from tinkex.errors import InsufficientStorageError as InsufficientStorageError
    from tinkex.errors import InternalServerError as InternalServerError
    from tinkex.errors import LoopStoppedError as LoopStoppedError
    from tinkex.errors import NotFoundError as NotFoundError
    from tinkex.errors import PayloadTooLargeError as PayloadTooLargeError
    from tinkex.errors import PermissionDeniedError as PermissionDeniedError
    from tinkex.errors import RateLimitError as RateLimitError
    from tinkex.errors import RecoveryError as RecoveryError
    from tinkex.errors import RequestErrorCategory as RequestErrorCategory
    from tinkex.errors import RequestFailedError as RequestFailedError
    from tinkex.errors import ResultExpiredError as ResultExpiredError
    from tinkex.errors import SetupError as SetupError
    from tinkex.errors import StreamInterruptedError as StreamInterruptedError
    from tinkex.errors import TinkerError as TinkerError
    from tinkex.errors import TinkexError as TinkexError
    from tinkex.errors import UnprocessableEntityError as UnprocessableEntityError
    from tinkex.errors import UploadError as UploadError
    from tinkex.futures import APIFuture as APIFuture
    from tinkex.futures import AwaitableConcurrentFuture as AwaitableConcurrentFuture
    from tinkex.futures import gather as gather
    from tinkex.losses.traced import LossHandle as LossHandle
    from tinkex.losses.traced import PerDatumLossFn as PerDatumLossFn
    from tinkex.recovery.resilient import resilient_training as resilient_training
    from tinkex.types import AdamOptimizerConfig as AdamOptimizerConfig
    from tinkex.types import AdamParams as AdamParams
    from tinkex.types import Checkpoint as Checkpoint
    from tinkex.types import CheckpointType as CheckpointType
    from tinkex.types import Datum as Datum
    from tinkex.types import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinkex.types import DimuonParams as DimuonParams
    from tinkex.types import DmelChunk as DmelChunk
    from tinkex.types import EncodedTextChunk as EncodedTextChunk
    from tinkex.types import ForwardBackwardOutput as ForwardBackwardOutput
    from tinkex.types import ImageAssetPointerChunk as ImageAssetPointerChunk
    from tinkex.types import ImageChunk as ImageChunk
    from tinkex.types import LoraConfig as LoraConfig
    from tinkex.types import ModelID as ModelID
    from tinkex.types import ModelInput as ModelInput
    from tinkex.types import ModelInputChunk as ModelInputChunk
    from tinkex.types import OptimParams as OptimParams
    from tinkex.types import OptimStepRequest as OptimStepRequest
    from tinkex.types import OptimStepResponse as OptimStepResponse
    from tinkex.types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinkex.types import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types import SampledSequence as SampledSequence
    from tinkex.types import SampleRequest as SampleRequest
    from tinkex.types import SampleResponse as SampleResponse
    from tinkex.types import SamplingParams as SamplingParams
    from tinkex.types import StopReason as StopReason
    from tinkex.types import TensorData as TensorData
    from tinkex.types import TensorDtype as TensorDtype
    from tinkex.types import TrainingRun as TrainingRun

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "CircuitBreaker",
    "CircuitOpenError",
    "ClosedError",
    "Config",
    "ConfigError",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "InsufficientStorageError",
    "InternalServerError",
    "LoopStoppedError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PayloadTooLargeError",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RecoveryError",
    "RequestErrorCategory",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "ResultExpiredError",
    "RetryConfig",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "SetupError",
    "StopReason",
    "StreamInterruptedError",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TinkexError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "UploadError",
    "__title__",
    "__version__",
    "auth",
    "circuit_breakers",
    "errors",
    "gather",
    "losses",
    "observability",
    "platform",
    "recovery",
    "resilient_training",
    "types",
    "with_retry",
    "with_retry_async",
]

__title__ = "tinkex"

_NAMES = {
    "tinkex._transport.breaker": "CircuitBreaker circuit_breakers",
    "tinkex.clients.admin": "AdminClient",
    "tinkex.clients.rest": "RestClient",
    "tinkex.clients.retrying": "with_retry with_retry_async",
    "tinkex.clients.sampling": "RetryConfig SamplingClient",
    "tinkex.clients.service": "ServiceClient",
    "tinkex.clients.training": "TrainingClient",
    "tinkex.config": "Config",
    "tinkex.recovery.resilient": "resilient_training",
    "tinkex.config.request_options": "RequestOptions Timeout",
    "tinkex.losses.traced": "LossHandle PerDatumLossFn",
    "tinkex.futures": "APIFuture AwaitableConcurrentFuture gather",
    "tinkex.lib.public_interfaces": "BackcompatSamplingClientFuture BackcompatTrainingClientFuture",
    "tinkex.errors": (
        "APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError "
        "AuthenticationError BadRequestError BillingError CircuitOpenError ClosedError ConfigError ConflictError "
        "ExperimentalWarning InternalServerError LoopStoppedError NotFoundError PermissionDeniedError RateLimitError RecoveryError "
        "RequestErrorCategory RequestFailedError ResultExpiredError SetupError StreamInterruptedError TinkerError TinkexError "
        "UnprocessableEntityError UploadError InsufficientStorageError PayloadTooLargeError"
    ),
    "tinkex.types": (
        "AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum DimuonOptimizerConfig DimuonParams DmelChunk EncodedTextChunk "
        "ForwardBackwardOutput ImageAssetPointerChunk ImageChunk LoraConfig ModelID ModelInput ModelInputChunk "
        "OptimParams OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan "
        "SampledProvenanceSpan SampledSequence SampleRequest SampleResponse SamplingParams StopReason "
        "TensorData TensorDtype TrainingRun"
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = frozenset(
    [
        "auth",
        "checkpoints",
        "config",
        "errors",
        "futures",
        "lib",
        "losses",
        "observability",
        "platform",
        "recovery",
        "testing",
        "tokenizers",
        "types",
    ]
)


def __getattr__(name: str) -> object:
    """Loads a public name at its first use."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"tinkex.{name}")
    if name in _HOMES:
        value: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    from tinkex._moved import MOVED, load_moved

    if f"tinkex.{name}" in MOVED:
        module = globals()[name] = load_moved(f"tinkex.{name}", stacklevel=2)
        return module
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns every public name, loaded or not."""
    return sorted({*globals(), *_HOMES, *_MODULES})


if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class _MovedModules:
    """The last finder in ``sys.meta_path``: it finds modules of this package by their old paths."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004
        """Finds a module by its old path; returns None for every other name."""
        if not name.startswith("tinkex."):
            return None
        from tinkex._moved import find_moved

        return find_moved(name)


sys.meta_path.append(_MovedModules)
