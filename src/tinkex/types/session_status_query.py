"""``ActiveSessionStatusQuery``, ``CancelledSessionStatusQuery``, ``ClientFinishedSessionStatusQuery``, ``ClientSessionFinishReasonType``, ``FailedSessionStatusQuery``, ``SessionStatusQuery``, under the path of the official SDK."""

from tinkex.types import (
    ActiveSessionStatusQuery,
    CancelledSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinishReasonType,
    FailedSessionStatusQuery,
    SessionStatusQuery,
)

__all__ = [
    "ActiveSessionStatusQuery",
    "CancelledSessionStatusQuery",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishReasonType",
    "FailedSessionStatusQuery",
    "SessionStatusQuery",
]
