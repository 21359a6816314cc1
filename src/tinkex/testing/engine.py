"""A real engine for tests: in this process, in its own directory, on a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinkex._runtime import background
from tinkex._transport.local import LocalTransport
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient

__all__ = ["LocalEngine", "local_engine"]

TINY = "tinkex/tiny"


class LocalEngine:
    """A running engine; it accepts any number of clients."""

    def __init__(self, base_model: str, home: Path, model_directory: Path) -> None:
        self.base_model = base_model
        """The model's name: pass it to ``create_lora_training_client``."""
        self.home = home
        """The directory of the engine's runs and checkpoints."""
        self.model_directory = model_directory
        self._transports: list[LocalTransport] = []
        # An engine stops with its last client; this one keeps it running between tests.
        self.rest().get_health().result()

    def service(self, **options: Any) -> ServiceClient:
        """Returns a service client of this engine; the options are those of ``ServiceClient``."""
        return ServiceClient(base_url="local", transport=self._transport(), **options)

    def rest(self) -> RestClient:
        """Returns a REST client of this engine."""
        return RestClient(base_url="local", transport=self._transport())

    def close(self) -> None:
        """Stops the engine, even if clients are still open."""
        for transport in self._transports:
            background().run(transport.close())

    def _transport(self) -> LocalTransport:
        transport = LocalTransport(self.home, {self.base_model: str(self.model_directory)})
        self._transports.append(transport)
        return transport


@contextmanager
def local_engine(
    model: str | Path | None = None, *, name: str = TINY, home: Path | None = None
) -> Iterator[LocalEngine]:
    """Runs the engine on a model directory, or on a tiny random model, until the block ends.

    Its state is in ``home``, by default a temporary directory that is deleted after the block. It needs
    ``tinkex[engine]``. The tiny model has real gradients, random weights and its own tokenizer::

        with local_engine() as engine, engine.service() as service:
            training = service.create_lora_training_client(engine.base_model, rank=4)
            tokens = training.get_tokenizer().encode("Hello")
    """
    with tempfile.TemporaryDirectory(prefix="tinkex-test-", ignore_cleanup_errors=True) as scratch:
        directory = Path(model) if model is not None else _tiny(Path(scratch) / "model")
        state = home if home is not None else Path(scratch) / "home"
        state.mkdir(parents=True, exist_ok=True)
        engine = LocalEngine(name, state, directory)
        try:
            yield engine
        finally:
            engine.close()


def _tiny(directory: Path) -> Path:
    from tinkex.testing.tiny_model import write_tiny_model

    return write_tiny_model(directory)
