"""Uploads of external weights: files in the format of ``save_weights_external`` become a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tinkex.types.base import Options, Value
from tinkex.types.training import LoraConfig

__all__ = [
    "ExternalWeightsUploadCancelRequest",
    "ExternalWeightsUploadFinishRequest",
    "ExternalWeightsUploadFinishResponse",
    "ExternalWeightsUploadFinishResult",
    "ExternalWeightsUploadStartRequest",
    "ExternalWeightsUploadStartResponse",
    "ExternalWeightsUploadStartResult",
]


class ExternalWeightsUploadStartRequest(Options, frozen=True, kw_only=True):
    """Starts an upload; the server keeps these settings with it."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


class ExternalWeightsUploadStartResponse(Value, frozen=True, kw_only=True):
    """The id of the upload, a signed URL to PUT each file to, and their expiry."""

    upload_id: str
    urls: dict[str, str]
    expires: datetime


class ExternalWeightsUploadFinishRequest(Options, frozen=True, kw_only=True):
    """Ends an upload whose files have all been sent."""

    upload_id: str


class ExternalWeightsUploadFinishResponse(Value, frozen=True, kw_only=True):
    """The path of the checkpoint that an upload became."""

    tinker_path: str


class ExternalWeightsUploadCancelRequest(Options, frozen=True, kw_only=True):
    """Deletes an unfinished upload and its files. Not part of the official protocol."""

    upload_id: str


@dataclass(frozen=True)
class ExternalWeightsUploadStartResult:
    """An upload: its id, a signed URL to PUT each file to, and their expiry."""

    upload_id: str
    urls: Mapping[str, str]
    expires: datetime


@dataclass(frozen=True)
class ExternalWeightsUploadFinishResult:
    """The path of the checkpoint that an upload became."""

    tinker_path: str
