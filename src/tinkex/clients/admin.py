"""The admin client: the audit log, billed usage and storage of an organisation."""

from __future__ import annotations

from datetime import date, datetime

from tinkex import types
from tinkex.clients._docstrings import documented
from tinkex.clients._rest_calls import AuditEvents, billing_window
from tinkex.clients._sessionless import SessionlessClient
from tinkex.clients._twins import async_form
from tinkex.futures import AwaitableConcurrentFuture

__all__ = ["AdminClient"]


@documented("admin")
class AdminClient(SessionlessClient):
    """Reads what only administrators of an organisation are allowed to read.

    ::

        admin = tinkex.AdminClient()
        usage = admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
        print(sum(event.estimated_cost_usd or 0 for event in usage.data))

    Methods return futures, which have ``result()`` and can be awaited. A server of your own counts
    usage at a price of zero.
    """

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> AwaitableConcurrentFuture[types.AuditLogResponse]:
        """The events of one day (UTC; default: today), all of them or of one kind."""
        return self._calls.start(self._calls.audit_log(event_type, day))

    get_audit_log_async = async_form(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> AwaitableConcurrentFuture[types.BillingUsageResponse]:
        """Usage in whole hours from ``starting_on`` up to ``ending_before``: datetimes, or RFC 3339 strings."""
        return self._calls.start(self._calls.billing_usage(billing_window(starting_on, ending_before)))

    get_billing_usage_async = async_form(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> AwaitableConcurrentFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Number, size and cost of the checkpoints of each user; of one project or of all."""
        return self._calls.start(self._calls.storage_usage(project_id))

    get_current_checkpoint_storage_usage_async = async_form(get_current_checkpoint_storage_usage)

    def get_telemetry(self) -> None:
        """None: this client sends no telemetry."""
