"""The ``tinkex checkpoint`` commands that transfer weights: save, download, upload, push-hf, merge."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, experimental_calls, pass_invocation
from tinkex.cli.paths import CheckpointName, CheckpointPath
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.clients.training import TrainingClient

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(cls=Leaf)
@click.option("--base-model", help="Start from this base model with a new adapter.")
@click.option("--model-path", type=CheckpointPath("weights"), help="Start from this training checkpoint.")
@click.option(
    "--name",
    type=CheckpointName(),
    help="Name of the new checkpoint. Default: checkpoint-<model or checkpoint>.",
)
@click.option(
    "--kind",
    type=click.Choice(["training", "sampler", "external"]),
    default="sampler",
    show_default=True,
    help="training: resume training; sampler: sample; external: export.",
)
@click.option(
    "--ttl",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Expire after this many seconds. Default: never.",
)
@click.option(
    "--rank", type=click.IntRange(min=1), default=32, show_default=True, help="LoRA rank of a new adapter."
)
@click.option("--seed", type=int, help="Random seed of a new adapter.")
@click.option("--train-mlp/--no-train-mlp", default=True, show_default=True, help="Adapt the MLP layers.")
@click.option(
    "--train-attn/--no-train-attn", default=True, show_default=True, help="Adapt the attention layers."
)
@click.option(
    "--train-unembed/--no-train-unembed", default=True, show_default=True, help="Adapt the unembedding layer."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the result to this file, as JSON.",
)
@pass_invocation
def save(
    invocation: Invocation,
    base_model: str | None,
    model_path: str | None,
    name: str | None,
    kind: str,
    ttl: int | None,
    rank: int,
    seed: int | None,
    train_mlp: bool,
    train_attn: bool,
    train_unembed: bool,
    output: Path | None,
) -> None:
    """Save a new adapter, or convert a checkpoint to another kind.

    \b
    Examples:
      tinkex checkpoint save --model-path tinker://0a1b2c:train:0/weights/final --name final --kind sampler
      tinkex checkpoint save --base-model HuggingFaceTB/SmolLM2-135M-Instruct --name fresh --kind training --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if (base_model is None) == (model_path is None):
        raise click.UsageError("give exactly one of --base-model and --model-path")
    if name is None:
        source = (base_model or model_path or "").rstrip("/").rpartition("/")[2]
        name = f"checkpoint-{re.sub(r'[^A-Za-z0-9._-]+', '-', source)}"
    with invocation.service(f"checkpoint {name}"[:200]) as service:
        if model_path is not None:
            training = service.create_training_client_from_state_with_optimizer(model_path)
        else:
            assert base_model is not None
            training = service.create_lora_training_client(
                base_model, rank, seed, train_mlp, train_attn, train_unembed
            )
        path = _save(invocation, training, kind, name, ttl)
    value = {
        "path": path,
        "kind": kind,
        "base_model": base_model,
        "model_path": model_path,
        "model_id": training.model_id,
        "ttl_seconds": ttl,
        "saved_at": datetime.now(UTC),
    }
    if output is not None:
        from tinkex.cli.render import as_json

        invocation.write(as_json(value), output)
    invocation.result(f"Saved {path}", value)


def _save(invocation: Invocation, training: TrainingClient, kind: str, name: str, ttl: int | None) -> str:
    path: str | None
    what = f"the checkpoint {name}"
    if kind == "training":
        path = invocation.wait(training.save_state(name, ttl), what).path
    elif kind == "sampler":
        path = invocation.wait(training.save_weights_for_sampler(name, ttl), what).path
    else:
        path = invocation.wait(training.save_weights_external(name, ttl), what).path
    if path is None:
        raise SetupError("the server saved the checkpoint but returned no path; see: tinkex checkpoint list")
    return path


@click.command(cls=Leaf)
@click.argument("path", type=CheckpointPath())
@click.option(
    "-o", "--output", type=FOLDER, help="Parent directory of the download. Default: the current directory."
)
@click.option("--force", is_flag=True, help="Replace an existing directory after the download is complete.")
@click.option(
    "--via",
    type=click.Choice(["auto", "archive", "export"]),
    default="auto",
    show_default=True,
    help="archive: every saved file; export: a PEFT adapter. "
    "auto exports on the hosted service and downloads the archive elsewhere.",
)
@pass_invocation
def download(invocation: Invocation, path: str, output: Path | None, force: bool, via: Any) -> None:
    """Download a checkpoint as a PEFT directory. Run the command again to resume an interrupted download.

    \b
    Examples:
      tinkex checkpoint download tinker://0a1b2c:train:0/weights/final
      tinkex checkpoint download tinker://0a1b2c:train:0/weights/final -o ./models --force --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.checkpoints import download_checkpoint
    from tinkex.cli.progress import transfer_bar
    from tinkex.cli.render import size

    invocation.interrupt_hint = "Run the same command again to resume the download."
    with transfer_bar(invocation, "checkpoint") as show:
        found = download_checkpoint(
            path, output, force=force, route=via, progress=show, config=invocation.verified_config()
        )
    value = {
        "checkpoint_path": path,
        "destination": str(found.directory),
        "file_size_bytes": found.num_bytes,
    }
    rows = [
        ("Checkpoint Path", path),
        ("Total Size", size(found.num_bytes)),
        ("Downloaded to", str(found.directory)),
    ]
    invocation.properties(value, rows)


@click.command("push-hf", cls=Leaf)
@click.argument("path", type=CheckpointPath())
@click.option(
    "-r", "--repo", metavar="USER/NAME", help="Repository. Default: a name derived from base model and run."
)
@click.option("--public", is_flag=True, help="Make a new repository public. Default: private.")
@click.option(
    "--revision", help="Branch to upload to. Default: main, or the checkpoint's name without --repo."
)
@click.option("--commit-message", help="Commit message. Default: 'Upload adapter from <path>'.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing.")
@click.option(
    "--allow-pattern", "allowed", multiple=True, help="Upload only files that match this glob; repeatable."
)
@click.option(
    "--ignore-pattern", "ignored", multiple=True, help="Skip files that match this glob; repeatable."
)
@click.option("--no-model-card", is_flag=True, help="Do not write a README.")
@click.option(
    "--hf-token",
    metavar="TOKEN",
    help="Hub token. Default: $HF_TOKEN, or the token stored by 'hf auth login'.",
)
@pass_invocation
def push_hf(
    invocation: Invocation,
    path: str,
    repo: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allowed: tuple[str, ...],
    ignored: tuple[str, ...],
    no_model_card: bool,
    hf_token: str | None,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub. It becomes a PEFT adapter with a model card.

    \b
    Examples:
      tinkex checkpoint push-hf tinker://0a1b2c:train:0/weights/final --repo ada/my-adapter
      tinkex checkpoint push-hf tinker://0a1b2c:train:0/weights/final --public --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.checkpoints.push import push_checkpoint
    from tinkex.cli.progress import hub_bars, transfer_bar

    invocation.interrupt_hint = "The repository is unchanged; run the same command again."
    with hub_bars(invocation), transfer_bar(invocation, "checkpoint") as show:
        pushed = push_checkpoint(
            path,
            repo,
            public=public,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            allow_patterns=allowed or None,
            ignore_patterns=ignored or None,
            add_model_card=not no_model_card,
            hf_token=hf_token,
            progress=show,
            config=invocation.verified_config(),
        )
    value = {
        "checkpoint_path": path,
        "repo_id": pushed.repo_id,
        "revision": pushed.revision,
        "public": pushed.public,
        "url": pushed.url,
    }
    rows = [
        ("Checkpoint Path", path),
        ("Repo ID", pushed.repo_id),
        ("Revision", pushed.revision),
        ("Public", "Yes" if public else "No"),
        ("URL", pushed.url),
    ]
    invocation.properties(value, rows)


@click.command(cls=Leaf)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--base-model",
    help="Name of the adapter's base model on the server. Default: the one in adapter_config.json.",
)
@click.option("--project", metavar="ID", help="Project of the checkpoint. Default: none.")
@pass_invocation
def upload(invocation: Invocation, directory: Path, base_model: str | None, project: str | None) -> None:
    """Upload a PEFT adapter. It becomes a checkpoint to train on from, or to sample from.

    Run the command again to resume an interrupted upload.

    \b
    Examples:
      tinkex checkpoint upload ./my-adapter --base-model Qwen/Qwen3-0.6B
      tinkex checkpoint upload ./my-adapter --local --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.checkpoints import upload_checkpoint
    from tinkex.cli.progress import transfer_bar
    from tinkex.cli.render import size

    invocation.interrupt_hint = "run the same command again to resume the upload"
    with experimental_calls(), transfer_bar(invocation, "checkpoint") as show:
        found = upload_checkpoint(
            directory,
            base_model=base_model,
            project_id=project,
            progress=show,
            config=invocation.verified_config(),
        )
    value = {
        "checkpoint_path": found.checkpoint_path,
        "source": str(directory),
        "file_size_bytes": found.num_bytes,
    }
    rows = [
        ("Checkpoint Path", found.checkpoint_path),
        ("Total Size", size(found.num_bytes)),
        ("Uploaded from", str(directory)),
    ]
    invocation.properties(value, rows)


@click.command(cls=Leaf)
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--base-model", help="Base model to merge into: a name or a directory. Default: the checkpoint's own."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the weights of a model directory.",
)
@click.option(
    "--gguf",
    "gguf_type",
    type=click.Choice(["f16", "q8_0"]),
    help="Write a GGUF file for llama.cpp and ollama instead, with weights of this type.",
)
@pass_invocation
@click.pass_context
def merge(
    context: click.Context,
    invocation: Invocation,
    source: str,
    output: Path,
    base_model: str | None,
    dtype: Any,
    gguf_type: Any,
) -> None:
    """Merge a checkpoint into its base model. The result is a Hugging Face model directory or a GGUF file.

    SOURCE is a checkpoint path, a short name such as @last, or the directory of a PEFT adapter. The base model is downloaded if it is not on this
    machine. OUTPUT must not exist.

    \b
    Examples:
      tinkex checkpoint merge tinker://0a1b2c:train:0/weights/final ./merged --local
      tinkex checkpoint merge ./my-adapter ./merged --dtype float32
      tinkex checkpoint merge ./my-adapter mine.gguf --gguf q8_0
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.engine_files import gguf_result, merge_adapter
    from tinkex.cli.render import size

    if gguf_type and context.get_parameter_source("dtype") is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--dtype is for model directories; --gguf states the type of a GGUF file itself"
        )
    merged = merge_adapter(invocation, source, output, base_model, dtype, gguf_type)
    if gguf_type:
        gguf_result(invocation, source, merged, gguf_type)
        return
    num_bytes = sum(file.stat().st_size for file in merged.iterdir())
    invocation.result(
        f"Merged into {merged} ({size(num_bytes)}, {dtype}). Serve it with: tinkex serve --model {merged}",
        {"source": source, "destination": str(merged), "dtype": dtype, "size_bytes": num_bytes},
    )
