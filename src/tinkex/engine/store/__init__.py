"""The engine's persistent state: SQLite tables and weight directories.

:class:`Store` opens a data directory; each table has its own module.
"""

from tinkex.engine.store.assets import AssetRow
from tinkex.engine.store.audit import AuditRow
from tinkex.engine.store.checkpoints import CheckpointKind, CheckpointPosition, CheckpointQuery, CheckpointRow
from tinkex.engine.store.crashes import Crashes, CrashKind, CrashRow
from tinkex.engine.store.directories import MANIFEST_FILE, check_name
from tinkex.engine.store.finished import FinishedRow, Timing
from tinkex.engine.store.futures import FutureRow, FutureStatus, Outcome, ResultFormat
from tinkex.engine.store.journal import JournalRow, TurnEntry
from tinkex.engine.store.loop_metrics import GradientCleared, LoopEvent, LoopMetrics, PassEnded, StepEnded
from tinkex.engine.store.losses import LossRow
from tinkex.engine.store.metric_series import (
    LoopProgress,
    MetricKey,
    MetricReader,
    MetricSource,
    Point,
    Series,
)
from tinkex.engine.store.reading import Reader
from tinkex.engine.store.rollouts import (
    RewardHistogram,
    RolloutContent,
    RolloutReader,
    RolloutRow,
    Rollouts,
    RolloutStep,
)
from tinkex.engine.store.run_changes import Follower, RunChanges
from tinkex.engine.store.runs import RunRow, RunStatus
from tinkex.engine.store.samplers import SamplerRow, SnapshotRow
from tinkex.engine.store.savepoints import SavepointRow, file_digest
from tinkex.engine.store.sessions import SessionRow
from tinkex.engine.store.store import Store, open_reader, open_users
from tinkex.engine.store.uploads import UploadFileRow, UploadRow
from tinkex.engine.store.usage import HOUR_S, UsageKey, UsageKind
from tinkex.engine.store.users import LOCAL_USER, KeyRow

__all__ = [
    "HOUR_S",
    "LOCAL_USER",
    "MANIFEST_FILE",
    "AssetRow",
    "AuditRow",
    "CheckpointKind",
    "CheckpointPosition",
    "CheckpointQuery",
    "CheckpointRow",
    "CrashKind",
    "CrashRow",
    "Crashes",
    "FinishedRow",
    "Follower",
    "FutureRow",
    "FutureStatus",
    "GradientCleared",
    "JournalRow",
    "KeyRow",
    "LoopEvent",
    "LoopMetrics",
    "LoopProgress",
    "LossRow",
    "MetricKey",
    "MetricReader",
    "MetricSource",
    "Outcome",
    "PassEnded",
    "Point",
    "Reader",
    "ResultFormat",
    "RewardHistogram",
    "RolloutContent",
    "RolloutReader",
    "RolloutRow",
    "RolloutStep",
    "Rollouts",
    "RunChanges",
    "RunRow",
    "RunStatus",
    "SamplerRow",
    "SavepointRow",
    "Series",
    "SessionRow",
    "SnapshotRow",
    "StepEnded",
    "Store",
    "Timing",
    "TurnEntry",
    "UploadFileRow",
    "UploadRow",
    "UsageKey",
    "UsageKind",
    "check_name",
    "file_digest",
    "open_reader",
    "open_users",
]
