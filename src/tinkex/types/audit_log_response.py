"""``AuditLogResponse``, under the path of the official SDK."""

from tinkex.types import AuditLogResponse

__all__ = ["AuditLogResponse"]
