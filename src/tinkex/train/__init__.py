"""Training recipes: supervised fine-tuning, DPO and GRPO, on any server.

::

    import tinkex
    from tinkex import train

    with tinkex.ServiceClient(base_url="local") as service:
        report = train.run(service, train.SftSettings(data=Path("chats.jsonl"), output=Path("run-1")))
        print(report.text)

A run writes everything to its ``output`` directory: settings, one line per step, checkpoints, and the report. It can be
interrupted at any time and continued with :func:`resume`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.train.data import TrainingData, read_data
from tinkex.train.loop import TrainingCallback, resume, run
from tinkex.train.notebook_display import NotebookDisplay
from tinkex.train.report import TrainingReport
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

__all__ = [
    "DpoSettings",
    "GrpoSettings",
    "NotebookDisplay",
    "Settings",
    "SftSettings",
    "TrainingCallback",
    "TrainingData",
    "TrainingReport",
    "read_data",
    "resume",
    "run",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
