"""A checkpoint of any server as a directory here.

Servers you run yourself give a checkpoint as one archive; the hosted service exports it to a file per address. Either
way the work is done in ``.<name>.partial`` beside the target, which a later call goes on from, and the target is put
in place by one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinkex.checkpoints.extraction import extract
from tinkex.checkpoints.files import Progress, Source, fetch
from tinkex.errors import APIStatusError, NotFoundError, SetupError, TinkexError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

__all__ = ["DownloadedCheckpoint", "Route", "download_checkpoint", "folder_of"]

EXPORT_TTL_S = 3600
MANIFEST = "manifest.json"
STATE = "state.json"
Route = Literal["auto", "archive", "export"]


@dataclass(frozen=True)
class DownloadedCheckpoint:
    """Where a checkpoint lies, and how large it is."""

    checkpoint_path: str
    directory: Path
    num_bytes: int


def folder_of(tinker_path: str) -> str:
    """The folder a checkpoint is put into.

    >>> folder_of("tinker://run-7/weights/0010")
    'run-7_weights_0010'
    """
    name = tinker_path.removeprefix("tinker://").replace("/", "_")
    return name.replace(":", "_") if os.name == "nt" else name


def download_checkpoint(
    tinker_path: str,
    output: Path | None = None,
    *,
    force: bool = False,
    route: Route = "auto",
    progress: Progress | None = None,
    config: Config | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
) -> DownloadedCheckpoint:
    """Fetches a checkpoint into a new folder of ``output`` (default: the working directory).

    ``force`` replaces a folder of that name, once the new one is complete. ``route`` says how it is fetched:
    ``archive`` as one file with all that was saved, ``export`` as the plain PEFT adapter, which for training
    checkpoints starts a session on their base model; ``auto`` exports on the hosted service and takes the archive
    elsewhere. A call that was interrupted goes on where it stopped.

    ::

        download_checkpoint("tinker://run/weights/final", Path("models"), base_url="local").directory
    """
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    target = (output or Path.cwd()) / folder_of(tinker_path)
    if (target.is_symlink() or target.exists()) and not force:
        raise SetupError(
            f"{target} exists already; replace it with --force (force=True), or choose another place"
        )
    config = config or Config.resolve(base_url=base_url, api_key=api_key)
    rest = RestClient(config=config)
    work = target.parent / f".{target.name}.partial"
    exports = route == "export" or (route == "auto" and config.is_hosted)
    if exports and parsed.checkpoint_type == "sampler":
        raise SetupError(
            f"{tinker_path} cannot be exported: that starts from a training checkpoint "
            "(tinker://<run>/weights/<name>); fetch it with --via archive where the server allows it"
        )
    _prepare(work, tinker_path)
    try:
        if parsed.checkpoint_type == "external":
            content = _by_addresses(rest, config, tinker_path, work, progress)
        elif exports:
            content = _by_export(rest, config, tinker_path, work, progress)
        else:
            content = _by_archive(rest, config, tinker_path, work, progress)
    except BaseException:
        _leave_if_empty(work)
        raise
    num_bytes = _check(content)
    _put_in_place(content, target, work)
    return DownloadedCheckpoint(tinker_path, target, num_bytes)


def _prepare(work: Path, tinker_path: str) -> None:
    """Keeps what an earlier call for the same checkpoint left, and nothing else."""
    if _state(work).get("checkpoint") != tinker_path:
        shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True, exist_ok=True)
        _remember(work, checkpoint=tinker_path)
    except OSError as error:
        raise SetupError(
            f"{work.parent} cannot be written ({error.strerror}); choose another directory"
        ) from error
    shutil.rmtree(work / "content", ignore_errors=True)


def _leave_if_empty(work: Path) -> None:
    """Removes what holds nothing that a later call could go on with."""
    if "export" not in _state(work) and not any(
        path.is_file() and path.name != STATE and path.stat().st_size for path in work.rglob("*")
    ):
        shutil.rmtree(work, ignore_errors=True)


def _by_archive(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    def address() -> str:
        return rest.get_checkpoint_archive_url_from_tinker_path(tinker_path).result().url

    archive = work / "archive.tar"
    fetch(Source(address(), renew=address), archive, config=config, progress=progress, replace=True)
    content = work / "content"
    extract(archive, content)
    archive.unlink()
    return content


def _by_addresses(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    def addresses() -> Mapping[str, str]:
        return rest.get_external_weights_urls(tinker_path).result().urls

    content = work / "files"
    urls = addresses()
    for name, url in urls.items():
        if Path(name).name != name or name in {"", ".", ".."} or "\\" in name:
            raise SetupError(f"{tinker_path} holds a file called {name!r}, which leads out of its folder")

        def renewed(name: str = name) -> str:
            return addresses()[name]

        if not (content / name).exists():
            fetch(Source(url, renew=renewed), content / name, config=config, progress=progress)
    return content


def _by_export(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    """Exports for an hour, fetches, and deletes the export; an interrupted call leaves it for the next one."""
    export = _state(work).get("export")
    if isinstance(export, str):
        with suppress(NotFoundError):
            content = _by_addresses(rest, config, export, work, progress)
            _delete(rest, export)
            return content
        shutil.rmtree(work / "files", ignore_errors=True)
    from tinkex.clients.service import ServiceClient

    with ServiceClient(config=config, display_name=f"download of {tinker_path}"[:200]) as service:
        training = service.create_training_client_from_state(tinker_path)
        saved = training.save_weights_external("download", ttl_seconds=EXPORT_TTL_S).result().path
        if saved is None:
            raise SetupError(f"the server exported {tinker_path} and did not say where; try again later")
        _remember(work, export=saved)
        content = _by_addresses(rest, config, saved, work, progress)
        _delete(rest, saved)
    return content


def _delete(rest: RestClient, export: str) -> None:
    # It expires by itself within the hour, so nothing is lost if this fails.
    with suppress(TinkexError, APIStatusError):
        rest.delete_checkpoint_from_tinker_path(export).result()


def _check(content: Path) -> int:
    """Compares the files with the manifest that came with them, and safetensors files with their own headers."""
    files = {path.relative_to(content).as_posix(): path for path in content.rglob("*") if path.is_file()}
    files = {name: path for name, path in files.items() if not name.endswith((".part", ".part.json"))}
    if not files:
        raise SetupError("the server sent a checkpoint without any file; it may be damaged there")
    manifest = files.get(MANIFEST)
    if manifest is not None:
        for name, (num_bytes, digest) in _sealed(manifest).items():
            path = files.get(name)
            if path is None or path.stat().st_size != num_bytes or _sha256(path) != digest:
                raise SetupError(f"{name} is missing or not as its manifest says; run the same command again")
    for name, path in files.items():
        if name.endswith(".safetensors"):
            _check_tensors(name, path)
    return sum(path.stat().st_size for path in files.values())


def _sealed(manifest: Path) -> dict[str, tuple[int, str]]:
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"the manifest that came with the checkpoint cannot be read ({error!r})") from error


def _check_tensors(name: str, path: Path) -> None:
    """A safetensors file says in its header where its last byte is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise SetupError(f"{name} is cut short; run the same command again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SetupError(f"{name} is no safetensors file ({error!r})") from error
    if 8 + length + max(ends, default=0) != size:
        raise SetupError(
            f"{name} has {size:,} bytes, and its header speaks of others; run the same command again"
        )


def _put_in_place(content: Path, target: Path, work: Path) -> None:
    """One rename; what stood there before is moved aside first and removed last."""
    aside = work / "replaced"
    shutil.rmtree(aside, ignore_errors=True)
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        target.rename(aside)
    try:
        content.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(work, ignore_errors=True)


def _state(work: Path) -> dict[str, Any]:
    try:
        read = json.loads((work / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _remember(work: Path, **news: str) -> None:
    partial = work / f"{STATE}.new"
    partial.write_text(json.dumps({**_state(work), **news}), encoding="utf-8")
    partial.replace(work / STATE)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
