"""``SessionSummary``, under the path of the official SDK."""

from tinkex.types import SessionSummary

__all__ = ["SessionSummary"]
