"""Checkpoints brought to this machine: fetched with resume, checked, unpacked safely, seen whole or not at all.

::

    from tinkex.downloads import download_checkpoint

    found = download_checkpoint("tinker://run/weights/final", base_url="local")
    print(found.directory)
"""

from __future__ import annotations

from tinkex.downloads.checkpoints import DownloadedCheckpoint, download_checkpoint
from tinkex.downloads.extraction import extract
from tinkex.downloads.files import Source, fetch

__all__ = ["DownloadedCheckpoint", "Source", "download_checkpoint", "extract", "fetch"]
