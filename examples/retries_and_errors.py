"""Meet a server that fails, and see what the client retries and what it tells you.

You will see a call that succeeds at the third try, with the waits in between; a refusal that is not tried
again, caught by its type; and a mistake of ours that never leaves the process. The server is a function in
this file, so this example needs neither a model nor a network.
"""

from __future__ import annotations

import itertools

import tinkex
from tinkex.observability.events import RequestFinished, RetryScheduled
from tinkex.testing import MockTransport, reply


class Console:
    """Prints the events of a client that have to do with trouble."""

    def emit(self, event) -> None:
        """Takes one event of the client."""
        if isinstance(event, RequestFinished):
            print(f"  {event.endpoint}, try {event.attempt + 1}: {event.status or event.error}")
        elif isinstance(event, RetryScheduled):
            print(f"  again in {event.after_s:.2f} s")


def main() -> None:
    calls = itertools.count(1)

    def flaky(_request):
        number = next(calls)
        if number == 1:
            raise tinkex.APIConnectionError(None, "the line went dead")
        if number == 2:
            return reply({"detail": "restarting"}, status=503, headers={"retry-after-ms": "150"})
        return reply({"supported_models": [{"model_name": "toy"}]})

    print("A failure that passes:")
    service = tinkex.ServiceClient(transport=MockTransport(flaky), events=Console())
    print("  models:", [model.model_name for model in service.get_server_capabilities().supported_models])

    print("A refusal:")

    def refusing(_request):
        return reply({"detail": "this key has no access to that run"}, status=403)

    service = tinkex.ServiceClient(transport=MockTransport(refusing), events=Console())
    try:
        service.create_rest_client().get_training_run("somebody-elses").result()
    except tinkex.PermissionDeniedError as error:
        print(f"  {type(error).__name__} ({error.status_code}): {error}")

    print("A mistake that is found before anything is sent:")
    try:
        service.create_sampling_client(model_path="weights/final")
    except ValueError as error:
        print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
