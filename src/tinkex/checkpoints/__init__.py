"""Checkpoints on this machine: downloaded with resume, verified and extracted safely; uploaded, or pushed to the Hugging Face Hub.

::

    from tinkex.checkpoints import download_checkpoint

    found = download_checkpoint("tinker://run/weights/final", base_url="local")
    print(found.directory)
"""

from __future__ import annotations

from tinkex.checkpoints.download import DownloadedCheckpoint, download_checkpoint
from tinkex.checkpoints.extraction import extract
from tinkex.checkpoints.files import Source, fetch
from tinkex.checkpoints.push import PushedCheckpoint, push_checkpoint
from tinkex.checkpoints.references import resolve_checkpoint, resolve_run
from tinkex.checkpoints.upload import UploadedCheckpoint, upload_checkpoint

__all__ = [
    "DownloadedCheckpoint",
    "PushedCheckpoint",
    "Source",
    "UploadedCheckpoint",
    "download_checkpoint",
    "extract",
    "fetch",
    "push_checkpoint",
    "resolve_checkpoint",
    "resolve_run",
    "upload_checkpoint",
]
