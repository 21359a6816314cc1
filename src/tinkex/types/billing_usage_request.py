"""``GetBillingUsageRequest``, under the path of the official SDK."""

from tinkex.types import GetBillingUsageRequest

__all__ = ["GetBillingUsageRequest"]
