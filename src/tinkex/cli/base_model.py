"""Which base model is meant when none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient

__all__ = ["SMALL_MODEL", "chosen_base_model"]

SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def chosen_base_model(service: ServiceClient, named: str | None) -> str:
    """The named model; else the only one a server offers, or the small one for laptops; else an error that lists them."""
    if named is not None:
        return named
    offered = [model.model_name for model in service.get_server_capabilities().supported_models]
    names = [name for name in offered if name]
    if len(names) == 1:
        return names[0]
    if SMALL_MODEL in names:
        return SMALL_MODEL
    listed = ", ".join(names[:20]) or "none"
    raise SetupError(f"this server has several models; choose one with --model: {listed}")
