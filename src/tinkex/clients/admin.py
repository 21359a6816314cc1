"""The admin client: the audit log, billed usage and storage of an organisation."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import date, datetime

from tinkex import types
from tinkex._runtime import await_future, background
from tinkex.clients._rest_calls import AuditEvents, billing_window
from tinkex.clients._sessionless import Sessionless

__all__ = ["AdminClient"]


class AdminClient(Sessionless):
    """Reads what only administrators of an organisation may read.

    ::

        admin = tinkex.AdminClient()
        usage = admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
        print(sum(event.estimated_cost_usd or 0 for event in usage.data))

    Methods return futures; each has an ``_async`` twin that returns the value. A server of your own bills
    nobody: it counts what is used, at a price of zero.
    """

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> Future[types.AuditLogResponse]:
        """What was done on a day (UTC; default: today), to everything or to one kind of thing."""
        return background().submit(self._calls.audit_log(event_type, day))

    async def get_audit_log_async(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> types.AuditLogResponse:
        """As :meth:`get_audit_log`."""
        return await await_future(self.get_audit_log(event_type, day), propagate_cancel=True)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[types.BillingUsageResponse]:
        """Usage in whole hours from ``starting_on`` up to ``ending_before``: dates, or RFC 3339 texts."""
        return background().submit(self._calls.billing_usage(billing_window(starting_on, ending_before)))

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> types.BillingUsageResponse:
        """As :meth:`get_billing_usage`."""
        return await await_future(self.get_billing_usage(starting_on, ending_before), propagate_cancel=True)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[types.CurrentCheckpointStorageUsageResponse]:
        """Who keeps how many checkpoints, how large, at which cost; in one project or in all."""
        return background().submit(self._calls.storage_usage(project_id))

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> types.CurrentCheckpointStorageUsageResponse:
        """As :meth:`get_current_checkpoint_storage_usage`."""
        return await await_future(
            self.get_current_checkpoint_storage_usage(project_id), propagate_cancel=True
        )

    def get_telemetry(self) -> None:
        """None: this client reports nothing about itself."""
