"""The clients and futures, under the path official-SDK programs import them from."""

from tinkex.clients._pending import PendingSamplingClient as BackcompatSamplingClientFuture
from tinkex.clients._pending import PendingTrainingClient as BackcompatTrainingClientFuture
from tinkex.clients.admin import AdminClient
from tinkex.clients.rest import RestClient
from tinkex.clients.sampling import SamplingClient
from tinkex.clients.service import ServiceClient
from tinkex.clients.training import TrainingClient
from tinkex.futures import APIFuture, AwaitableConcurrentFuture
from tinkex.losses.traced import LossHandle, PerDatumLossFn

__all__ = [
    "APIFuture",
    "AdminClient",
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]
