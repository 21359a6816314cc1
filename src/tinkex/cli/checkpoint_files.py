"""The ``tinkex checkpoint`` commands that transfer weights: save, download, push-hf, import, merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointName, CheckpointPath
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.clients.training import TrainingClient

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(cls=Leaf)
@click.option("--base-model", help="Start from this base model with a new adapter.")
@click.option("--model-path", type=CheckpointPath("weights"), help="Start from this training checkpoint.")
@click.option("--name", type=CheckpointName(), required=True, help="Name of the new checkpoint.")
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
    help="Delete it after this many seconds. Default: never.",
)
@click.option(
    "--rank", type=click.IntRange(min=1), default=32, show_default=True, help="LoRA rank of a new adapter."
)
@click.option("--seed", type=int, help="Seed of a new adapter.")
@click.option("--train-mlp/--no-train-mlp", default=True, show_default=True, help="Adapt the MLP layers.")
@click.option(
    "--train-attn/--no-train-attn", default=True, show_default=True, help="Adapt the attention layers."
)
@click.option(
    "--train-unembed/--no-train-unembed", default=True, show_default=True, help="Adapt the unembedding layer."
)
@pass_invocation
def save(
    invocation: Invocation,
    base_model: str | None,
    model_path: str | None,
    name: str,
    kind: str,
    ttl: int | None,
    rank: int,
    seed: int | None,
    train_mlp: bool,
    train_attn: bool,
    train_unembed: bool,
) -> None:
    """Save a new adapter, or convert a checkpoint to another kind.

    \b
    Examples:
      tinkex checkpoint save --model-path tinker://0a1b2c:train:0/weights/final --name final --kind sampler
      tinkex checkpoint save --base-model HuggingFaceTB/SmolLM2-135M-Instruct --name fresh --kind training --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if (base_model is None) == (model_path is None):
        raise click.UsageError("give exactly one of --base-model and --model-path")
    with invocation.service(f"checkpoint {name}"[:200]) as service:
        if model_path is not None:
            training = service.create_training_client_from_state_with_optimizer(model_path)
        else:
            assert base_model is not None
            training = service.create_lora_training_client(
                base_model, rank, seed, train_mlp, train_attn, train_unembed
            )
        path = _save(training, kind, name, ttl)
        invocation.result(
            f"Saved {path}", {"path": path, "kind": kind, "model_id": training.model_id, "ttl_seconds": ttl}
        )


def _save(training: TrainingClient, kind: str, name: str, ttl: int | None) -> str:
    path: str | None
    if kind == "training":
        path = training.save_state(name, ttl).result().path
    elif kind == "sampler":
        path = training.save_weights_for_sampler(name, ttl).result().path
    else:
        path = training.save_weights_external(name, ttl).result().path
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

    invocation.interrupt_hint = "run the same command again to resume the download"
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

    invocation.interrupt_hint = "the repository is unchanged; run the same command again"
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


@click.command("import", cls=Leaf)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--base-model", help="Base model of the adapter. Default: the one in adapter_config.json.")
@click.option(
    "--name", type=CheckpointName(), default="imported", show_default=True, help="Name of the checkpoint."
)
@click.option("--owner", help="User of the server who owns the checkpoint. Default: the local user.")
@click.option(
    "--data-dir", type=FOLDER, help="Data directory of the engine. Default: that of 'tinkex serve'."
)
@pass_invocation
def import_(
    invocation: Invocation,
    directory: Path,
    base_model: str | None,
    name: str,
    owner: str | None,
    data_dir: Path | None,
) -> None:
    """Import a PEFT adapter as a checkpoint on this machine. You can resume training and sample from it.

    Stop a server that uses the engine's data directory first: the command writes into it.

    \b
    Examples:
      tinkex checkpoint import ./my-adapter --local
      tinkex checkpoint import ./my-adapter --base-model Qwen/Qwen3-0.6B --name v1 --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if not invocation.config().is_local:
        raise SetupError(
            "the protocol has no call to upload an adapter to a server. On the server's machine stop the server, run: "
            "tinkex checkpoint import DIRECTORY --local (with its --data-dir, and --owner for one of its users), and "
            "start it again."
        )
    from tinkex.cli.engine_files import import_into_engine

    path = import_into_engine(directory, base_model, name, owner, data_dir)
    invocation.result(f"Imported as {path}", {"path": path, "source": str(directory)})


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
    help="Data type of the merged weights.",
)
@pass_invocation
def merge(invocation: Invocation, source: str, output: Path, base_model: str | None, dtype: Any) -> None:
    """Merge a checkpoint into its base model. The result is a Hugging Face model directory.

    SOURCE is a checkpoint path or the directory of a PEFT adapter. The base model is downloaded if it is not on this
    machine. OUTPUT must not exist.

    \b
    Examples:
      tinkex checkpoint merge tinker://0a1b2c:train:0/weights/final ./merged --local
      tinkex checkpoint merge ./my-adapter ./merged --dtype float32
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    from tinkex.cli.engine_files import merge_adapter
    from tinkex.cli.render import size

    directory = merge_adapter(invocation, source, output, base_model, dtype)
    num_bytes = sum(file.stat().st_size for file in directory.iterdir())
    invocation.result(
        f"Merged into {directory} ({size(num_bytes)}, {dtype}). Serve it with: tinkex serve --model {directory}",
        {"source": source, "destination": str(directory), "dtype": dtype, "size_bytes": num_bytes},
    )
