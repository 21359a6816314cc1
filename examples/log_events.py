"""Log all events of a client, and attach a logger to the whole process while it runs.

You will see the session open and close and every request with its status and duration, as lines of Python's
logging, and two messages of the program itself; then the requests of one sample in a logger that is attached to all
clients of the process, and none after it is detached. Events never contain prompts, answers or keys.
"""

from __future__ import annotations

import logging
import os
import sys

import tinkex
from tinkex import types
from tinkex.observability import process
from tinkex.observability.events import LogSink, RequestFinished, RequestStarted


class WithoutStarts:
    """Forwards all events except RequestStarted."""

    def __init__(self, logger: logging.Logger) -> None:
        self._log = LogSink(logger)

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if not isinstance(event, RequestStarted):
            self._log.emit(event)


def main() -> None:
    logging.basicConfig(format="%(levelname)-7s %(name)-8s %(message)s", stream=sys.stdout)
    client_log, own_log = logging.getLogger("client"), logging.getLogger("program")
    client_log.setLevel(logging.DEBUG)  # the default level shows only what a user should know
    own_log.setLevel(logging.INFO)
    logging.getLogger("process").setLevel(logging.INFO)

    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url, events=WithoutStarts(client_log)) as service:
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
        sampler = service.create_sampling_client(base_model=model)
        prompt, params = types.ModelInput.from_text("Hello", sampler), types.SamplingParams(max_tokens=4)
        own_log.info("sampling from %s", model)
        response = sampler.sample(prompt, 1, params).result()
        own_log.info("got %d tokens", len(response.sequences[0].tokens))

        logger = process.attach_logger(logging.getLogger("process"), events=[RequestFinished])
        sampler.sample(prompt, 1, params).result()
        print("detached:", process.detach(logger))
        sampler.sample(prompt, 1, params).result()


if __name__ == "__main__":
    main()
