"""``Checkpoint``, ``CheckpointType``, ``ParsedCheckpointTinkerPath``, under the path of the official SDK."""

from tinkex.types import Checkpoint, CheckpointType, ParsedCheckpointTinkerPath

__all__ = ["Checkpoint", "CheckpointType", "ParsedCheckpointTinkerPath"]
