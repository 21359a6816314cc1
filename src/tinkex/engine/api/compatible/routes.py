"""The table of compatible routes: every call of another protocol, and the paths it is served at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.engine.api.anthropic import messages
from tinkex.engine.api.anthropic import requests as anthropic_requests
from tinkex.engine.api.call import Handler
from tinkex.engine.api.dialects import Route
from tinkex.engine.api.openai import chat, completions, models
from tinkex.engine.api.openai import requests as openai_requests

_OPENAI = ("/oai/api/v1", "/v1")
_ANTHROPIC = ("/anthropic/api/v1", "/v1")


def _route(
    name: str,
    path: str,
    request: type[Any] | None = None,
    bases: Sequence[str] = _OPENAI,
    unsupported: Mapping[str, str] = openai_requests.UNSUPPORTED,
) -> Route:
    """A route under each base; one with a request is a POST."""
    return Route(
        name,
        "POST" if request is not None else "GET",
        "",
        "sample" if request is not None else "rest",
        request,
        paths=tuple(base + path for base in bases),
        unsupported=unsupported,
        extension=True,
    )


ROUTES: Sequence[Route] = (
    _route("openai_models", "/models"),
    _route("openai_model", "/models/{model:path}"),
    _route("openai_completions", "/completions", openai_requests.CompletionRequest),
    _route("openai_chat", "/chat/completions", openai_requests.ChatRequest),
    _route("anthropic_messages", "/messages", anthropic_requests.MessageRequest, _ANTHROPIC, anthropic_requests.UNSUPPORTED),
    _route("anthropic_count_tokens", "/messages/count_tokens", anthropic_requests.PromptRequest, _ANTHROPIC, anthropic_requests.UNSUPPORTED),
)  # fmt: skip

ROUTE_HANDLERS: Mapping[str, Handler] = {
    "openai_models": models.list_models,
    "openai_model": models.get_model,
    "openai_completions": completions.completions,
    "openai_chat": chat.chat_completions,
    "anthropic_messages": messages.messages,
    "anthropic_count_tokens": messages.count_tokens,
}
