"""Finds a model's chat template and renders it in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from tinkex.errors import InvalidInput, SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jinja2 import Environment, Template

__all__ = ["chat_template_of", "render_chat", "template_variables"]


def chat_template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template of a model directory: its own file, or that of ``tokenizer_config.json``; None if there is none.

    Raises ``SetupError`` if it is not text.

    Example:
        >>> chat_template_of(directory, read_json_object(directory / "tokenizer_config.json"))[:20]
        '{% for message in me'
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SetupError(f"{file} is not UTF-8 text ({error}); download the model again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is None or isinstance(template, str):
        return template
    raise SetupError(
        f"the chat_template in {directory / 'tokenizer_config.json'} is not text or a list of named templates; download "
        "the model again"
    )


def render_chat(template: str, **variables: Any) -> str:
    """Renders ``template`` with ``variables`` (``messages``, ``add_generation_prompt``…).

    Templates come with downloaded models, so they run in Jinja's immutable sandbox. Raises ``InvalidInput`` with the
    template's message if it rejects the messages or cannot be rendered.

    Example:
        >>> render_chat("{{ messages[0]['content'] }}!", messages=[{"role": "user", "content": "Hi"}])
        'Hi!'
    """
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # a template is a program, and can raise anything
        reason = str(error) or type(error).__name__
        raise InvalidInput(f"the model's chat template cannot render these messages: {reason}") from error


@lru_cache(maxsize=16)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a template reads and does not define; raises ``InvalidInput`` if it cannot be parsed.

    >>> sorted(template_variables("{% if tools %}{{ tools|tojson }}{% endif %}{{ messages }}"))
    ['messages', 'tools']
    """
    from jinja2 import meta

    environment = _environment()
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except Exception as error:  # Jinja bounds neither nesting nor the length of numbers
        raise InvalidInput(f"the model's chat template cannot be parsed: {error}") from error
    return frozenset(names) - frozenset(environment.globals)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> Environment:
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
    return environment
