"""``Checkpoint``, ``CheckpointType``, under the path of the official SDK."""

from tinkex.types import Checkpoint, CheckpointType

__all__ = ["Checkpoint", "CheckpointType"]
