"""Tokenizer files of the served models, for clients without access to a hub."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import Response

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.served_models import ServedModel
from tinkex.errors import UnknownObject

FILES: Mapping[str, str] = {
    "tokenizer.json": "application/json",
    "tokenizer_config.json": "application/json",
    "special_tokens_map.json": "application/json",
    "added_tokens.json": "application/json",
    "vocab.json": "application/json",
    "merges.txt": "text/plain; charset=utf-8",
    "chat_template.jinja": "text/plain; charset=utf-8",
    "generation_config.json": "application/json",
    "config.json": "application/json",
}
"""The only files this endpoint serves, so that no name can escape the directory."""


async def tokenizer_file(call: Call) -> Reply:
    """Returns one file of a model's tokenizer; the default model is the first served one."""
    file = call.parameters["file"]
    if file not in FILES:
        raise UnknownObject(f"there is no tokenizer file {file!r}; use one of: {', '.join(FILES)}.")
    models = call.engine.models
    model = models.find(call.query.get("model") or models.names[0])
    content = await asyncio.to_thread(_read, model, file)
    return Response(content, media_type=FILES[file])


def _read(model: ServedModel, file: str) -> bytes:
    try:
        return (model.find_directory() / file).read_bytes()
    except FileNotFoundError:
        raise UnknownObject(f"this model has no {file}.") from None


HANDLERS: Mapping[str, Handler] = {"tokenizer_file": tokenizer_file}
