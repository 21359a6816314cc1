"""Downloads a checkpoint of any server into a directory.

Servers you run yourself offer a checkpoint as one archive; the hosted service exports it to one URL per file. In both
cases the download happens in ``.<name>.partial`` beside the target, which a later call resumes, and one rename puts
the complete directory in place.
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
from tinkex.checkpoints.files import Progress, Source, fetch, local_file
from tinkex.checkpoints.peft_names import name_head_for_peft
from tinkex.checkpoints.references import resolve_checkpoint
from tinkex.errors import APIStatusError, NotFoundError, SetupError, TinkexError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

__all__ = ["DownloadedCheckpoint", "Route", "download_checkpoint", "folder_of", "verify"]

EXPORT_TTL_S = 3600
MANIFEST = "manifest.json"
STATE = "state.json"
Route = Literal["auto", "archive", "export"]


@dataclass(frozen=True)
class DownloadedCheckpoint:
    """The directory of a downloaded checkpoint, and its size."""

    checkpoint_path: str
    directory: Path
    num_bytes: int


def folder_of(tinker_path: str) -> str:
    """The name of the directory that a checkpoint is downloaded into.

    >>> folder_of("tinker://run-7:train:0/weights/0010")
    'run-7_train_0_weights_0010'
    """
    return tinker_path.removeprefix("tinker://").replace("/", "_").replace(":", "_")


def download_checkpoint(
    tinker_path: str,
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    route: Route = "auto",
    progress: Progress | None = None,
    config: Config | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
) -> DownloadedCheckpoint:
    """Downloads a checkpoint into a new directory in ``output`` (default: the working directory).

    ``tinker_path`` may also be a short name, such as ``@last``: see :func:`resolve_checkpoint`. ``force`` replaces a directory of that name once the new one is complete. ``route`` selects the method:
    ``archive`` downloads one file with everything that was saved; ``export`` downloads the plain PEFT adapter, which for
    training checkpoints opens a session on their base model; ``auto`` exports on the hosted service and uses the archive
    elsewhere. A call that was interrupted is resumed by the next one.

    ``progress`` is called with the name of a file, its bytes so far and its size, if known. ``config`` replaces
    ``base_url`` and ``api_key``, which are resolved as those of a client.

    ::

        download_checkpoint("tinker://run/weights/final", Path("models"), base_url="local").directory
    """
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

    config = config or Config.resolve(base_url=base_url, api_key=api_key)
    rest = RestClient(config=config)
    tinker_path = resolve_checkpoint(tinker_path, rest)
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    target = (Path(output) if output else Path.cwd()) / folder_of(tinker_path)
    if (target.is_symlink() or target.exists()) and not force:
        raise SetupError(
            f"{target} already exists; replace it with --force (force=True), or choose another directory"
        )
    work = target.parent / f".{target.name}.partial"
    _adopt_older(work, tinker_path)
    exports = route == "export" or (route == "auto" and config.is_hosted)
    if exports and parsed.checkpoint_type == "sampler":
        raise SetupError(
            f"{tinker_path} cannot be exported: only training checkpoints can "
            "(tinker://<run>/weights/<name>); use --via archive where the server allows it"
        )
    _prepare(work, tinker_path)
    try:
        if parsed.checkpoint_type == "external":
            content = _download_files(rest, config, tinker_path, work, progress)
        elif exports:
            content = _download_export(rest, config, tinker_path, work, progress)
        else:
            content = _download_archive(rest, config, tinker_path, work, progress)
    except BaseException:
        _remove_if_empty(work)
        raise
    verify(content)
    name_head_for_peft(content)
    num_bytes = sum(path.stat().st_size for path in content.rglob("*") if path.is_file())
    _put_in_place(content, target, work)
    return DownloadedCheckpoint(tinker_path, target, num_bytes)


def _adopt_older(work: Path, tinker_path: str) -> None:
    """Takes over an interrupted download of an earlier release, whose directory has colons in its name."""
    name = tinker_path.removeprefix("tinker://").replace("/", "_")
    older = work.with_name(f".{name}.partial")
    if ":" in name and os.name != "nt" and older.is_dir() and not work.exists():
        older.rename(work)


def _prepare(work: Path, tinker_path: str) -> None:
    """Creates the working directory; keeps its content only if that belongs to the same checkpoint."""
    if _read_state(work).get("checkpoint") != tinker_path:
        shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True, exist_ok=True)
        _update_state(work, checkpoint=tinker_path)
    except OSError as error:
        raise SetupError(
            f"{work.parent} cannot be written ({error.strerror}); choose another directory"
        ) from error
    shutil.rmtree(work / "content", ignore_errors=True)


def _remove_if_empty(work: Path) -> None:
    """Removes a working directory that holds nothing to resume from."""
    if "export" not in _read_state(work) and not any(
        path.is_file() and path.name != STATE and path.stat().st_size for path in work.rglob("*")
    ):
        shutil.rmtree(work, ignore_errors=True)


def _download_archive(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    def archive_url() -> str:
        return rest.get_checkpoint_archive_url_from_tinker_path(tinker_path).result().url

    archive, content, url = work / "archive.tar", work / "content", archive_url()
    on_disk = local_file(url, config)
    if on_disk is not None:  # the engine in this process has written it: no copy is needed
        extract(on_disk, content)
        if progress is not None:
            size = on_disk.stat().st_size
            progress(archive.name, size, size)
        return content
    fetch(Source(url, renew=archive_url), archive, config=config, progress=progress, replace=True)
    extract(archive, content)
    archive.unlink()
    return content


def _download_files(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    def file_urls() -> Mapping[str, str]:
        return rest.get_external_weights_urls(tinker_path).result().urls

    content = work / "files"
    urls = file_urls()
    for name, url in urls.items():
        if Path(name).name != name or name in {"", ".", ".."} or "\\" in name:
            raise SetupError(f"{tinker_path} has a file named {name!r}, which is outside of its directory")

        def renewed(name: str = name) -> str:
            return file_urls()[name]

        if not (content / name).exists():
            fetch(Source(url, renew=renewed), content / name, config=config, progress=progress)
    return content


def _download_export(
    rest: RestClient, config: Config, tinker_path: str, work: Path, progress: Progress | None
) -> Path:
    """Exports for an hour, downloads, and deletes the export; an interrupted call keeps it for the next one."""
    export = _read_state(work).get("export")
    if isinstance(export, str):
        with suppress(NotFoundError):
            content = _download_files(rest, config, export, work, progress)
            _delete(rest, export)
            return content
        shutil.rmtree(work / "files", ignore_errors=True)
    from tinkex.clients.service import ServiceClient

    with ServiceClient(config=config, display_name=f"download of {tinker_path}"[:200]) as service:
        training = service.create_training_client_from_state(tinker_path)
        saved = training.save_weights_external("download", ttl_seconds=EXPORT_TTL_S).result().path
        if saved is None:
            raise SetupError(f"the server exported {tinker_path} without returning its path; try again later")
        _update_state(work, export=saved)
        content = _download_files(rest, config, saved, work, progress)
        _delete(rest, saved)
    return content


def _delete(rest: RestClient, export: str) -> None:
    # The export expires within the hour anyway, so a failure is harmless.
    with suppress(TinkexError, APIStatusError):
        rest.delete_checkpoint_from_tinker_path(export).result()


def verify(content: Path) -> int:
    """Compares the files with their manifest, and safetensors files with their headers; returns the total size."""
    files = {path.relative_to(content).as_posix(): path for path in content.rglob("*") if path.is_file()}
    files = {name: path for name, path in files.items() if not name.endswith((".part", ".part.json"))}
    if not files:
        raise SetupError("the server sent a checkpoint without files; it may be corrupt there")
    manifest = files.get(MANIFEST)
    if manifest is not None:
        for name, (num_bytes, digest) in _manifest_entries(manifest).items():
            path = files.get(name)
            if path is None or path.stat().st_size != num_bytes or _sha256(path) != digest:
                raise SetupError(
                    f"{name} is missing or does not match its manifest; run the same command again"
                )
    for name, path in files.items():
        if name.endswith(".safetensors"):
            _check_tensors(name, path)
    return sum(path.stat().st_size for path in files.values())


def _manifest_entries(manifest: Path) -> dict[str, tuple[int, str]]:
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"the manifest of the checkpoint cannot be read ({error!r})") from error


def _check_tensors(name: str, path: Path) -> None:
    """Compares the size of a safetensors file with the offsets in its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise SetupError(f"{name} is truncated; run the same command again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SetupError(f"{name} is not a safetensors file ({error!r})") from error
    expected = 8 + length + max(ends, default=0)
    if expected != size:
        raise SetupError(
            f"{name} has {size:,} bytes, and {expected:,} according to its header; run the same command again"
        )


def _put_in_place(content: Path, target: Path, work: Path) -> None:
    """Renames the complete directory to the target; an old target is moved aside first and removed last."""
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


def _read_state(work: Path) -> dict[str, Any]:
    try:
        state = json.loads((work / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _update_state(work: Path, **changes: str) -> None:
    partial = work / f"{STATE}.new"
    partial.write_text(json.dumps({**_read_state(work), **changes}), encoding="utf-8")
    partial.replace(work / STATE)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
