"""Uploads an adapter of this machine to any server, where it becomes a checkpoint.

The upload's id and URLs are kept in ``.<name>.upload.json`` beside the directory until it is finished, so that a later call
resumes it: files that the server has are not sent again, and one that broke off is continued where the server supports it.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex._runtime import background
from tinkex._transport.file_body import FileBody
from tinkex._transport.retry import ErrorStatus, NoReply, Outcome, Retry, RetryPolicy, decide
from tinkex._transport.signed_urls import SignedUrls, shown_url
from tinkex.checkpoints.files import EXPIRED, Progress
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    BadRequestError,
    HttpRequest,
    NotFoundError,
    SetupError,
)
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

__all__ = ["AdapterFiles", "UploadedCheckpoint", "upload_checkpoint"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The largest header of a safetensors file."""
RESUME_INCOMPLETE = 308
_PARTS = {
    "train_attn": re.compile(r"\.self_attn\."),
    "train_mlp": re.compile(r"\.mlp\."),
    "train_unembed": re.compile(r"\b(?:lm_head|unembed_tokens)\.lora_"),
}


@dataclass(frozen=True)
class UploadedCheckpoint:
    """The path of an uploaded checkpoint, and the size of its files."""

    checkpoint_path: str
    directory: Path
    num_bytes: int


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on this machine: the base model that it names, and the LoRA settings that its files have."""

    directory: Path
    base_model: str | None
    lora: LoraConfig

    @classmethod
    def read(cls, directory: Path) -> AdapterFiles:
        """Reads a PEFT directory, without its weights; raises ``SetupError`` if it is not one."""
        config = _read_config(directory / CONFIG_FILE)
        names = _tensor_names(directory / WEIGHTS_FILE)
        ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
        if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
            raise SetupError(f"{directory / CONFIG_FILE} has no rank (r); only LoRA adapters can be uploaded")
        parts = {part: any(map(pattern.search, names)) for part, pattern in _PARTS.items()}
        if not any(parts.values()):
            raise SetupError(
                f"{directory / WEIGHTS_FILE} has no LoRA weights of attention, MLP or unembedding layers"
            )
        lora = LoraConfig(rank=max(ranks), **parts)
        return cls(directory, config.get("base_model_name_or_path") or None, lora)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each file."""
        return {name: (self.directory / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE)}


def upload_checkpoint(
    directory: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    project_id: str | None = None,
    progress: Progress | None = None,
    config: Config | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    policy: RetryPolicy | None = None,
) -> UploadedCheckpoint:
    """Uploads the PEFT adapter in ``directory``; the result names a checkpoint to train on from, or to sample from.

    ``base_model`` is the server's name for the adapter's base model; the default is the one that the adapter's config names.
    ``project_id`` is the project of the checkpoint. A call that was interrupted is resumed by the next one with the same
    arguments. ``policy`` replaces the retries of ``config``; its clock restarts whenever bytes arrive.

    ``progress`` is called with the name of a file, its bytes so far and its size, if known. ``config`` replaces
    ``base_url`` and ``api_key``, which are resolved as those of a client.

    ::

        path = upload_checkpoint(Path("my-adapter"), base_url="local").checkpoint_path
        training = service.create_training_client_from_state(path)
    """
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

    directory = Path(directory)
    adapter = AdapterFiles.read(directory)
    base_model = base_model or adapter.base_model
    if base_model is None:
        raise SetupError(
            f"{directory / CONFIG_FILE} does not name its base model; give it with --base-model (base_model=…)"
        )
    config = config or Config.resolve(base_url=base_url, api_key=api_key)
    rest = RestClient(config=config)
    upload = _Upload(rest, adapter, base_model, project_id, progress, policy)
    return UploadedCheckpoint(upload.run(), directory, sum(adapter.sizes.values()))


class _Upload:
    """One upload, new or resumed."""

    def __init__(
        self,
        rest: RestClient,
        adapter: AdapterFiles,
        base_model: str,
        project_id: str | None,
        progress: Progress | None,
        policy: RetryPolicy | None,
    ) -> None:
        self._rest, self._adapter = rest, adapter
        self._base_model, self._project_id = base_model, project_id
        self._progress = progress
        self._policy = policy or RetryPolicy(max_retries=rest.config.max_retries)
        directory = adapter.directory.absolute()
        self._state_file = directory.parent / f".{directory.name}.upload.json"

    def run(self) -> str:
        """Sends what is missing and finishes the upload; returns the path of the checkpoint."""
        known = self._read_state()
        if known is not None:
            try:
                return self._send_and_finish(known, resumed=True)
            except (APIStatusError, _Changed) as error:
                if isinstance(error, APIStatusError) and error.status_code not in EXPIRED:
                    raise
                self._forget()  # it was cancelled, or has expired: send everything again
        return self._send_and_finish(self._start(), resumed=False)

    def _start(self) -> Mapping[str, Any]:
        started = self._rest.external_weights_upload_start(
            base_model=self._base_model,
            lora_config=self._adapter.lora,
            destination_project_id=self._project_id,
        ).result()
        unknown = sorted(started.urls.keys() - self._adapter.sizes.keys())
        if unknown:
            raise SetupError(f"the server requests files that an adapter does not have: {', '.join(unknown)}")
        state = {
            **self._identity(),
            "upload_id": started.upload_id,
            "urls": dict(started.urls),
            "expires": started.expires.isoformat(),
        }
        with suppress(OSError):  # without the file the upload cannot be resumed, and works all the same
            descriptor = os.open(self._state_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(state, file)
        return state

    def _send_and_finish(self, state: Mapping[str, Any], *, resumed: bool) -> str:
        sender = _Sender(self._rest.config, self._policy, self._progress)
        try:
            for name, url in state["urls"].items():
                sender.send(url, self._adapter.directory / name, resumed=resumed)
        finally:
            sender.close()
        if state["files"] != self._identity()["files"]:
            raise SetupError(f"{self._adapter.directory} was changed during the upload; upload it again")
        try:
            path = self._rest.external_weights_upload_finish(state["upload_id"]).result().tinker_path
        except (BadRequestError, NotFoundError):
            self._forget()  # the server has deleted it
            raise
        self._forget()
        return path

    def _identity(self) -> dict[str, Any]:
        """What an upload belongs to: another server, adapter or setting needs another upload."""
        found = {name: (self._adapter.directory / name).stat() for name in self._adapter.sizes}
        return {
            "server": self._rest.config.base_url,
            "base_model": self._base_model,
            "project_id": self._project_id,
            "lora": self._adapter.lora.model_dump(mode="json"),
            "files": {name: [file.st_size, file.st_mtime_ns] for name, file in found.items()},
        }

    def _read_state(self) -> Mapping[str, Any] | None:
        """The unfinished upload of this adapter to this server, unless it has expired."""
        try:
            state: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
            is_live = datetime.fromisoformat(state["expires"]) > datetime.now(UTC)
            same = all(state.get(name) == value for name, value in self._identity().items())
            return state if is_live and same and isinstance(state["urls"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _forget(self) -> None:
        self._state_file.unlink(missing_ok=True)


class _Changed(Exception):
    """The server has more of a file than there is: it belongs to another one."""


class _Sender:
    """Sends files to signed URLs; one that broke off is resumed at the offset that the server reports."""

    def __init__(self, config: Config, policy: RetryPolicy, progress: Progress | None) -> None:
        self._urls = SignedUrls(config)
        self._policy = policy
        self._progress = progress

    def send(self, url: str, file: Path, *, resumed: bool) -> None:
        """Sends a file, or with ``resumed`` what the server does not have of it."""
        size = file.stat().st_size
        attempt, began, best = 0, time.monotonic(), 0
        offset: int | None = None if resumed else 0
        while True:
            outcome: Outcome
            failure: Exception
            try:
                if offset is None:
                    offset = self._received(url, size, attempt)
                return self._put(url, file, offset, size, attempt)
            except APIStatusError as error:
                outcome, failure = ErrorStatus(error.status_code, error.response.headers), error
                offset = None
                if error.status_code == RESUME_INCOMPLETE:  # it has another part than was sent
                    outcome, offset = NoReply(), _received_bytes(error.response.headers)
            except APIConnectionError as error:
                outcome, offset = NoReply(), None
                failure = APIConnectionError(
                    HttpRequest("PUT", shown_url(url)),
                    f"the upload of {file.name} was interrupted: {error}. Run the same command again to resume it.",
                )
                failure.__cause__ = error
            if (offset or 0) > best:
                attempt, began, best = 0, time.monotonic(), offset or 0
            step = decide(outcome, attempt, time.monotonic() - began, self._policy, random.random)
            if not isinstance(step, Retry):
                raise failure
            attempt += 1
            time.sleep(step.after)

    def close(self) -> None:
        """Closes the connections."""
        background().run(self._urls.close())

    def _put(self, url: str, file: Path, offset: int, size: int, attempt: int) -> None:
        def on_read(place: int) -> None:
            self._report(file.name, place, size)

        headers = {"content-range": f"bytes {offset}-{size - 1}/{size}"} if offset else {}
        self._report(file.name, offset, size)
        if size and offset == size:
            return
        body = FileBody(file, offset, on_read)
        background().run(self._urls.put(url, body, headers=headers, attempt=attempt))

    def _received(self, url: str, size: int, attempt: int) -> int:
        """How much of a file the server has; 0 where it does not say."""
        headers = {"content-range": f"bytes */{size}"}
        try:
            reply = background().run(self._urls.put(url, None, headers=headers, attempt=attempt))
        except APIStatusError as error:
            if error.status_code != RESUME_INCOMPLETE:
                raise
            reply = error.response.headers
        received = _received_bytes(reply)
        if received > size:
            raise _Changed
        return received

    def _report(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(name, done, total)


def _received_bytes(headers: Mapping[str, str]) -> int:
    """The bytes that a server has, by the ``Range`` header of its reply.

    >>> _received_bytes({"range": "bytes=0-99"}), _received_bytes({})
    (100, 0)
    """
    found = re.fullmatch(r"bytes=0-(\d{1,18})", headers.get("range", ""))
    return int(found[1]) + 1 if found is not None else 0


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"{file.parent} is not a PEFT adapter: it has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be read ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("rank_pattern") or {}, dict):
        raise SetupError(f"{file} is not the config of a LoRA adapter")
    return config


def _tensor_names(file: Path) -> list[str]:
    """The names in the header of a safetensors file."""
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            if length > MAX_HEADER_BYTES:
                raise SetupError(f"{file} is not a safetensors file")
            header = json.loads(content.read(length))
        return [name for name in header if name != "__metadata__"]
    except FileNotFoundError:
        raise SetupError(
            f"{file.parent} has no {file.name}; only safetensors adapters can be uploaded, so save it as one "
            "(model.save_pretrained(directory, safe_serialization=True))"
        ) from None
    except (OSError, ValueError, TypeError, struct.error) as error:
        raise SetupError(f"{file} cannot be read as safetensors ({error})") from error
