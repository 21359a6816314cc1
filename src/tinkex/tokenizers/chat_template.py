"""Renders a model's chat template, in a sandbox: templates come with downloaded files."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["render"]


def render(template: str, **variables: Any) -> str:
    """The text a template makes of ``messages``, ``tools``, ``add_generation_prompt`` and its own variables.

    A template that refuses the messages raises ``ValueError`` with its own words.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    ...        messages=[{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(**variables)
    except TemplateError as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's own words for training masks; here its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the result is a prompt, not a web page
        extensions=[Generation, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None, *, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
