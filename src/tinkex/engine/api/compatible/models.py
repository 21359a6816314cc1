"""The ``model`` of a request: a base model, a checkpoint, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.engine import Engine
from tinkex.engine.lookup import new_sampler
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.served_models import ServedModel
from tinkex.errors import InvalidInput

T = TypeVar("T")

CHECKPOINT = "tinker://"
SEPARATOR = ";"


@dataclass(frozen=True)
class ModelChoice:
    """What a request samples from; ``name`` is how the client names it."""

    name: str
    served: ServedModel
    tokenizer: EngineTokenizer
    base_model: str | None
    model_path: str | None
    engine: Engine
    owner: str

    async def run_on_thread(self, job: Callable[[], T]) -> T:
        """Run what takes long for the user of the request while the event loop serves others."""
        return await self.engine.run_on_thread(self.owner, job)

    @property
    def max_context(self) -> int:
        """How many tokens a prompt and its continuation may have."""
        return self.served.info.arch.max_context


def split_model_name(name: str) -> tuple[str | None, str | None]:
    """The base model and the checkpoint in a name.

    >>> split_model_name("Qwen/Qwen3-8B;tinker://run/sampler_weights/1")
    ('Qwen/Qwen3-8B', 'tinker://run/sampler_weights/1')
    >>> split_model_name("tinker://run/weights/1"), split_model_name("Qwen/Qwen3-8B")
    ((None, 'tinker://run/weights/1'), ('Qwen/Qwen3-8B', None))
    """
    if name.startswith(CHECKPOINT):
        return None, name
    base_model, separator, path = name.partition(SEPARATOR)
    return base_model, path if separator else None


async def find_model(engine: Engine, owner: str, name: str) -> ModelChoice:
    """The model of a name, loaded; raises ``UnknownObject`` if there is none that this user can see."""
    base_model, model_path = split_model_name(name)
    try:
        sampler = new_sampler(
            engine.store, engine.models, engine.integrity, owner, "", "", base_model, model_path
        )
    except InvalidInput as error:
        raise InvalidField("model", f"model: {error}") from error
    served = engine.models.find(sampler.base_model)
    if not served.known:
        await engine.load(served)
    if not served.has_tokenizer:
        await engine.run_on_thread(owner, lambda: served.tokenizer)
    return ModelChoice(name, served, served.tokenizer, base_model, model_path, engine, owner)
