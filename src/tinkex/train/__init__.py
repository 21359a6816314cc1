"""Training recipes: supervised, by preferences, and by rewards, on any server.

::

    import tinkex
    from tinkex import train

    with tinkex.ServiceClient(base_url="local") as service:
        report = train.run(service, train.SftSettings(data=Path("chats.jsonl"), output=Path("run-1")))
        print(report.text)

A run keeps everything in its ``output`` directory: settings, one line per step, checkpoints, and the report. It can be
stopped at any time and goes on with :func:`resume`.
"""

from __future__ import annotations

from tinkex.train.loop import Watcher, resume, run
from tinkex.train.report import Report
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

__all__ = ["DpoSettings", "GrpoSettings", "Report", "Settings", "SftSettings", "Watcher", "resume", "run"]
