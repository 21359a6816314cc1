"""``ClientSessionFinishErrored``, ``ClientSessionFinishInterrupted``, ``ClientSessionFinishReason``, ``ClientSessionFinishSuccess``, ``ClientSessionFinished``, ``SessionActive``, ``SessionCancelled``, ``SessionFailed``, ``SessionFailedReason``, ``SessionFailedRequestReason``, ``SessionFailedSamplingSessionReason``, ``SessionFailedTrainingRunReason``, ``SessionStatus``, under the path of the official SDK."""

from tinkex.types import (
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    SessionActive,
    SessionCancelled,
    SessionFailed,
    SessionFailedReason,
    SessionFailedRequestReason,
    SessionFailedSamplingSessionReason,
    SessionFailedTrainingRunReason,
    SessionStatus,
)

__all__ = [
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "SessionActive",
    "SessionCancelled",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionStatus",
]
