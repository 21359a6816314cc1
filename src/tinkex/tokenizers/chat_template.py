"""Finds a model's chat template and renders it in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from tinkex.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jinja2 import Template

__all__ = ["chat_template_of", "render_chat"]


def chat_template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template of a model directory: its own file, or that of ``tokenizer_config.json``; None if there is none.

    Example:
        >>> chat_template_of(directory, read_json_object(directory / "tokenizer_config.json"))[:20]
        '{% for message in me'
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def render_chat(template: str, **variables: Any) -> str:
    """Renders ``template`` with ``variables`` (``messages``, ``add_generation_prompt``…).

    Templates come with downloaded models, so they run in Jinja's immutable sandbox. Raises ``InvalidInput`` with the
    template's message if it rejects the messages or cannot be rendered.

    Example:
        >>> render_chat("{{ messages[0]['content'] }}!", messages=[{"role": "user", "content": "Hi"}])
        'Hi!'
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(**variables)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise InvalidInput(f"the model's chat template cannot render these messages: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text; only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 -- Jinja reads it from the class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(pattern: str) -> str:
        return datetime.now().astimezone().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[Generation, loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(template)
