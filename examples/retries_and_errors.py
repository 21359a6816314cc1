"""Use a failing server, and see what the client retries and which errors it raises.

You will see a request that succeeds at the third attempt, with the delays in between; a rejection that is not
retried, caught by its type; and an invalid argument that is rejected before any request. The server is a mock,
so this example needs neither a model nor a network.
"""

from __future__ import annotations

import itertools

import tinkex
from tinkex.observability.events import RequestFinished, RetryScheduled
from tinkex.testing import MockTransport, reply


class Console:
    """Prints requests and retries."""

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, RequestFinished):
            print(f"  {event.endpoint}, attempt {event.attempt + 1}: {event.status or event.error}")
        elif isinstance(event, RetryScheduled):
            print(f"  retry in {event.after_s:.2f} s")


def main() -> None:
    calls = itertools.count(1)

    def flaky(_request):
        number = next(calls)
        if number == 1:
            raise tinkex.APIConnectionError(None, "connection lost")
        if number == 2:
            return reply({"detail": "restarting"}, status=503, headers={"retry-after-ms": "150"})
        return reply({"supported_models": [{"model_name": "toy"}]})

    print("A transient failure:")
    service = tinkex.ServiceClient(transport=MockTransport(flaky), events=Console())
    print("  models:", [model.model_name for model in service.get_server_capabilities().supported_models])

    print("A rejection:")

    def reject(_request):
        return reply({"detail": "this key has no access to that run"}, status=403)

    service = tinkex.ServiceClient(transport=MockTransport(reject), events=Console())
    try:
        service.create_rest_client().get_training_run("other-users-run").result()
    except tinkex.PermissionDeniedError as error:
        print(f"  {type(error).__name__} ({error.status_code}): {error}")

    print("An invalid argument, rejected before any request:")
    try:
        service.create_sampling_client(model_path="weights/final")
    except ValueError as error:
        print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
