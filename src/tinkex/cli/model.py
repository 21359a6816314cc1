"""``tinkex model``: the base models a server offers, and those on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import Noun
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.types import SupportedModel


@click.group(cls=Noun)
def model() -> None:
    """See base models, and fetch them."""


@model.command("list")
@click.argument("substring", default="")
@pass_invocation
def list_(invocation: Invocation, substring: str) -> None:
    """List the base models of the server. SUBSTRING leaves those whose name contains it.

    \b
    Examples:
      tinkex model list --local
      tinkex model list qwen
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing, yes_no

    offered = _offered(invocation)
    found = [one for one in offered if substring.lower() in (one.model_name or "").lower()]
    if substring and not found:
        names = ", ".join(one.model_name or "?" for one in offered)
        raise SetupError(f"no model of this server has {substring!r} in its name; it offers {names}")
    invocation.table(
        {"models": [one.model_dump(mode="json") for one in found]},
        ["Model", "Max Context", "Trainable", "Sampleable"],
        [
            [
                or_missing(one.model_name),
                or_missing(one.max_context_length),
                yes_no(one.trainable),
                yes_no(one.sampleable),
            ]
            for one in found
        ],
    )


@model.command()
@click.argument("source")
@pass_invocation
def pull(invocation: Invocation, source: str) -> None:
    """Fetch a model to this machine. Training and serving then start at once.

    SOURCE is a hub name such as Qwen/Qwen3-0.6B, with @revision if wanted, a .gguf file, or the default model.

    \b
    Examples:
      tinkex model pull HuggingFaceTB/SmolLM2-135M-Instruct
      tinkex model pull ./model.gguf
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    import sys

    from tinkex.cli.render import size
    from tinkex.observability.terminal import LoadingLine

    resolve = _catalog().resolve
    from tinkex.engine.config import tinkex_home

    invocation.if_interrupted = "run the same command again: it goes on where it stopped"
    line = LoadingLine(sys.stderr)
    silent = invocation.quiet or invocation.as_json
    try:
        directory: Path = resolve(source, tinkex_home() / "models", None if silent else line.show)
    finally:
        line.clear()
    num_bytes = _size(directory)
    invocation.result(
        f"{source} is at {directory} ({size(num_bytes)})",
        {"model": source, "directory": str(directory), "size_bytes": num_bytes},
    )


@model.command()
@click.argument("name")
@pass_invocation
def info(invocation: Invocation, name: str) -> None:
    """Show one model. It says what the server says of it, and what lies on this machine.

    NAME is a name of the server, a hub name that is cached here, or a model directory.

    \b
    Example:
      tinkex model info HuggingFaceTB/SmolLM2-135M-Instruct --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing, size, yes_no

    directory = _on_this_machine(name)
    offered = [one for one in _offered(invocation) if one.model_name == name]
    if directory is None and not offered:
        raise SetupError(
            f"neither the server nor this machine has a model {name!r}; list the server's with: tinkex model list, "
            f"fetch it with: tinkex model pull {name}"
        )
    value: dict[str, Any] = {"model": name}
    rows = [("Model", name)]
    if offered:
        value |= offered[0].model_dump(mode="json")
        rows += [
            ("Max Context", or_missing(offered[0].max_context_length)),
            ("Trainable", yes_no(offered[0].trainable)),
            ("Sampleable", yes_no(offered[0].sampleable)),
        ]
    if directory is not None:
        facts = _facts(directory)
        value["local"] = {"directory": str(directory), "size_bytes": _size(directory), **facts}
        rows += [("Directory", str(directory)), ("Size", size(_size(directory)))]
        rows += [(title.replace("_", " ").title(), str(fact)) for title, fact in facts.items()]
    invocation.properties(value, rows)


def _offered(invocation: Invocation) -> list[SupportedModel]:
    with invocation.service() as service:
        return service.get_server_capabilities().supported_models


def _catalog() -> Any:
    try:
        from tinkex.engine.model import catalog
    except ModuleNotFoundError as error:
        raise SetupError(
            f"models on this machine are the engine's, and {error.name} is not installed; "
            "run: pip install 'tinkex[engine]'"
        ) from error
    return catalog


def _on_this_machine(name: str) -> Path | None:
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    try:
        from tinkex.engine.config import tinkex_home
        from tinkex.engine.model.cache import ModelCache
        from tinkex.engine.model.hub import cached_snapshot
    except ModuleNotFoundError:
        return None
    name_only, _, revision = name.partition("@")
    cached = ModelCache(tinkex_home() / "models").find(name.replace("/", "--"))
    return cached or cached_snapshot(name_only, revision or None)


def _facts(directory: Path) -> dict[str, Any]:
    """What config.json says, by the names people use."""
    import json

    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"{file} cannot be read as JSON ({error}); the model is damaged") from error
    if not isinstance(config, dict):
        raise SetupError(f"{file} holds no settings of a model; the model is damaged")
    names = {
        "architecture": "model_type",
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    return {ours: config[theirs] for ours, theirs in names.items() if theirs in config}


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
