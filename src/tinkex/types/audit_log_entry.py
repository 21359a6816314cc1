"""``AuditLogEntry``, under the path of the official SDK."""

from tinkex.types import AuditLogEntry

__all__ = ["AuditLogEntry"]
