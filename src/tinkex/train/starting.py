"""The model and the recipe of a run, opened and checked before the run exists on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import ConfigError
from tinkex.train.data import TrainingData
from tinkex.train.recipes import Progress, Recipe
from tinkex.train.rendering import Renderer
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

if TYPE_CHECKING:
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient

__all__ = ["OpenModel", "make_recipe", "open_model"]


@dataclass(frozen=True)
class OpenModel:
    """The model that a run starts from."""

    name: str
    sampler: SamplingClient
    renderer: Renderer


def open_model(
    service: ServiceClient, settings: Settings, progress: Progress, *, name: str | None = None
) -> OpenModel:
    """Opens the model that a run starts from, for sampling; ``name`` is the base model if that is known."""
    progress("opening the model", 0, 1)
    if name is None:
        name = _base_model(service, settings)
    if settings.start_from is not None:
        sampler = service.create_sampling_client(model_path=settings.start_from)
    else:
        sampler = service.create_sampling_client(base_model=name)
    return OpenModel(name, sampler, Renderer(sampler.get_tokenizer(), settings.chat))


def make_recipe(settings: Settings, data: TrainingData[Any], renderer: Renderer) -> Recipe:
    """Renders the data; raises ``ConfigError`` for examples that are too long."""
    from tinkex.train.dpo import Dpo
    from tinkex.train.grpo import Grpo
    from tinkex.train.sft import Sft

    if isinstance(settings, SftSettings):
        return Sft(settings, data, renderer)
    if isinstance(settings, DpoSettings):
        return Dpo(settings, data, renderer)
    assert isinstance(settings, GrpoSettings), "read_data rejects others"
    return Grpo(settings, data, renderer)


def _base_model(service: ServiceClient, settings: Settings) -> str:
    if settings.start_from is not None:
        info = service.create_rest_client().get_weights_info_by_tinker_path(settings.start_from).result()
        return info.base_model
    if settings.model is None:
        raise ConfigError("no model is set; choose one with --model (model=…)")
    return settings.model
