"""``tinkex model``: base models of a server and on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.types import SupportedModel


@click.group(cls=CommandGroup)
def model() -> None:
    """List, download, describe and export base models."""


@model.command("list")
@click.argument("substring", default="")
@click.option(
    "--known", is_flag=True, help="List models known to work and those on this machine; needs no server."
)
@pass_invocation
def list_(invocation: Invocation, substring: str, known: bool) -> None:
    """List the base models of the server. SUBSTRING filters them by name.

    \b
    Examples:
      tinkex model list --local
      tinkex model list --known qwen
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing, yes_no

    if known:
        _list_known(invocation, substring)
        return
    supported = _supported_models(invocation)
    found = [one for one in supported if substring.lower() in (one.model_name or "").lower()]
    if substring and not found:
        names = ", ".join(one.model_name or "?" for one in supported)
        raise SetupError(f"no model name of this server contains {substring!r}; the server has {names}")
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


def _list_known(invocation: Invocation, substring: str) -> None:
    """Prints the models that are known to work or on this machine."""
    from dataclasses import asdict

    from tinkex.cli.render import or_missing, size

    catalog = _catalog("tinkex model list --known")
    from tinkex.engine.config import models_from_env, tinkex_home
    from tinkex.engine.model.known_models import list_known_models

    configured = dict(map(catalog.parse_model_flag, models_from_env()))
    listed = list_known_models(tinkex_home() / "models", configured)
    found = [one for one in listed if substring.lower() in one.model.lower()]
    if not found:
        raise SetupError(
            f"no known model has {substring!r} in its name; any other model of these families may work too: "
            f"{', '.join(sorted({one.family for one in listed}))}. Try: tinkex model pull NAME"
        )
    invocation.table(
        {"models": [asdict(one) for one in found]},
        ["Model", "Here", "Parameters", "Download", "Memory", "Licence", "Known By"],
        [
            [
                one.model,
                "yes" if one.directory else "no",
                f"{one.num_parameters / 1e6:,.0f} M",
                size(one.download_bytes),
                size(one.memory_bytes),
                or_missing(one.licence),
                "tests" if one.tested else "architecture",
            ]
            for one in found
        ],
        "Memory is that of the weights; a run adds to it. Download one with: tinkex model pull MODEL",
    )


@model.command(uses_server=False)
@click.argument("source")
@pass_invocation
def pull(invocation: Invocation, source: str) -> None:
    """Download a model to this machine. Training and serving then start without a download.

    SOURCE is a hub name such as Qwen/Qwen3-0.6B, optionally with @revision, a .gguf file, or the default model.

    \b
    Examples:
      tinkex model pull HuggingFaceTB/SmolLM2-135M-Instruct
      tinkex model pull ./model.gguf
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    import sys

    from tinkex.cli.render import size
    from tinkex.observability.terminal import LoadingLine

    resolve = _catalog("tinkex model pull").resolve
    from tinkex.engine.config import tinkex_home

    invocation.interrupt_hint = "Run the same command again to resume the download."
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


@model.command(uses_server=False)
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--gguf",
    "gguf_type",
    type=click.Choice(["f16", "q8_0"]),
    default="f16",
    show_default=True,
    help="Type of the weights; q8_0 takes half the space.",
)
@pass_invocation
def export(invocation: Invocation, source: str, output: Path, gguf_type: Any) -> None:
    """Write a base model as a GGUF file for llama.cpp and ollama.

    SOURCE is a model directory, a hub name or the default model, which is downloaded if it is not on this machine.
    OUTPUT must not exist. To export a checkpoint, use: tinkex checkpoint merge --gguf.

    \b
    Examples:
      tinkex model export HuggingFaceTB/SmolLM2-135M-Instruct smollm2.gguf
      tinkex model export ./merged merged.gguf --gguf q8_0
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.engine_files import export_base, gguf_result

    gguf_result(invocation, source, export_base(invocation, source, output, gguf_type), gguf_type)


@model.command()
@click.argument("name")
@pass_invocation
def info(invocation: Invocation, name: str) -> None:
    """Show one model. Prints the server's description and the files on this machine.

    NAME is a model of the server, a cached hub name, or a model directory.

    \b
    Examples:
      tinkex model info HuggingFaceTB/SmolLM2-135M-Instruct --local
      tinkex model info Qwen/Qwen3-8B --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.render import or_missing, size, yes_no

    directory = _local_directory(name)
    supported = [one for one in _supported_models(invocation) if one.model_name == name]
    if directory is None and not supported:
        raise SetupError(
            f"neither the server nor this machine has a model {name!r}; list the server's models with: "
            f"tinkex model list, download it with: tinkex model pull {name}"
        )
    value: dict[str, Any] = {"model": name}
    rows = [("Model", name)]
    if supported:
        value |= supported[0].model_dump(mode="json")
        rows += [
            ("Max Context", or_missing(supported[0].max_context_length)),
            ("Trainable", yes_no(supported[0].trainable)),
            ("Sampleable", yes_no(supported[0].sampleable)),
        ]
    if directory is not None:
        properties = _read_config(directory)
        value["local"] = {"directory": str(directory), "size_bytes": _size(directory), **properties}
        rows += [("Directory", str(directory)), ("Size", size(_size(directory)))]
        rows += [(name.replace("_", " ").title(), str(item)) for name, item in properties.items()]
    invocation.properties(value, rows)


def _supported_models(invocation: Invocation) -> list[SupportedModel]:
    with invocation.service() as service:
        return service.get_server_capabilities().supported_models


def _catalog(command: str) -> Any:
    try:
        from tinkex.engine.model import catalog
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{command} needs the engine, and {error.name} is not installed; run: pip install 'tinkex[engine]'"
        ) from error
    return catalog


def _local_directory(name: str) -> Path | None:
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    try:
        from tinkex.engine.config import tinkex_home
        from tinkex.engine.model.cache import ModelCache
        from tinkex.engine.model.hub import cached_snapshot
    except ModuleNotFoundError:
        return None
    hub_name, _, revision = name.partition("@")
    cached = ModelCache(tinkex_home() / "models").find(name.replace("/", "--"))
    return cached or cached_snapshot(hub_name, revision or None)


def _read_config(directory: Path) -> dict[str, Any]:
    """Returns the main properties in config.json, under readable names."""
    import json

    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(
            f"{file} is not valid JSON ({error}); the model is corrupt, download it again"
        ) from error
    if not isinstance(config, dict):
        raise SetupError(f"{file} is not a JSON object; the model is corrupt, download it again")
    names = {
        "architecture": "model_type",
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    return {name: config[key] for name, key in names.items() if key in config}


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
