"""Tools for testing programs that use a client: a mock server, and a real engine on a tiny model.

Nothing is patched; the client takes its transport as an argument.

>>> import tinkex
>>> from tinkex.testing import MockTransport, reply
>>> def server(request):
...     return reply({"supported_models": [{"model_name": "toy"}]})
>>> service = tinkex.ServiceClient(transport=MockTransport(server))
>>> service.get_server_capabilities().supported_models[0].model_name
'toy'

:func:`local_engine` runs the real engine in this process, on a tiny random model that it creates in a second::

    with local_engine() as engine, engine.service() as service:
        training = service.create_lora_training_client(engine.base_model, rank=4)

For pytest, put ``pytest_plugins = ["tinkex.testing.fixtures"]`` into your ``conftest.py`` and use the fixtures
``tinkex_engine`` and ``tinkex_service``.
"""

from __future__ import annotations

from tinkex.testing.engine import LocalEngine, local_engine
from tinkex.testing.mock import Handler, MockTransport, Reply, Request, reply, sample_reply

__all__ = [
    "Handler",
    "LocalEngine",
    "MockTransport",
    "Reply",
    "Request",
    "local_engine",
    "reply",
    "sample_reply",
]
