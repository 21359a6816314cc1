"""The default base model of commands that name none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient

__all__ = ["DEFAULT_MODEL", "choose_base_model"]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def choose_base_model(service: ServiceClient, requested: str | None) -> str:
    """Returns ``requested``, else the server's only model, else the small default; raises if the choice is ambiguous."""
    if requested is not None:
        return requested
    supported = [model.model_name for model in service.get_server_capabilities().supported_models]
    names = [name for name in supported if name]
    if len(names) == 1:
        return names[0]
    if DEFAULT_MODEL in names:
        return DEFAULT_MODEL
    listed = ", ".join(names[:20]) or "none"
    raise SetupError(f"this server has {len(names) or 'no'} models; choose one with --model: {listed}")
