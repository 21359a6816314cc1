"""A checkpoint as a repository on the Hugging Face Hub, with a model card that says where it comes from."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.checkpoints.download import download_checkpoint
from tinkex.errors import SetupError, TinkexError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.checkpoints.files import Progress
    from tinkex.config import Config
    from tinkex.types import WeightsInfoResponse

__all__ = ["PushedCheckpoint", "model_card", "push_checkpoint", "repository_name"]

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
INTERNAL = ("manifest.json", "optimizer.safetensors", "checkpoint_complete")
"""Files that mean something to the server alone."""


@dataclass(frozen=True)
class PushedCheckpoint:
    """Where a checkpoint went on the hub."""

    checkpoint_path: str
    repo_id: str
    revision: str
    public: bool
    url: str


def push_checkpoint(
    tinker_path: str,
    repo_id: str | None = None,
    *,
    public: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    add_model_card: bool = True,
    hf_token: str | None = None,
    progress: Progress | None = None,
    config: Config | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
) -> PushedCheckpoint:
    """Uploads the PEFT adapter of the checkpoint ``tinker_path`` to the hub, as one commit, and says where it is.

    Without ``repo_id`` the repository is named after base model and run, and the branch after the checkpoint. The
    repository and the branch are made if they are missing, private unless ``public``. A repository that holds
    another checkpoint's card is not overwritten. ``HF_TOKEN`` or a login of the hub's own tool is used unless
    ``hf_token`` is given; ``HF_ENDPOINT`` names another hub.

    ``revision`` is the branch, and ``commit_message`` its message; ``create_pr`` opens a pull request to it instead.
    ``allow_patterns`` and ``ignore_patterns`` choose the files. ``add_model_card=False`` adds no README.
    ``progress`` is called with the name of a file, its bytes so far and its size, if known. ``config`` replaces
    ``base_url`` and ``api_key``, which are resolved as those of a client.

    ::

        push_checkpoint("tinker://run/weights/final", "ada/my-adapter", base_url="local").url
    """
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    config = config or Config.resolve(base_url=base_url, api_key=api_key)
    api, errors = _hub(hf_token)
    user = _user(api, errors)
    weights = RestClient(config=config).get_weights_info_by_tinker_path(tinker_path).result()
    name = parsed.checkpoint_id.rpartition("/")[2]
    if repo_id is None:
        repo_id = f"{user}/{repository_name(weights.base_model, parsed.training_run_id)}"
        revision = revision or _sanitized(name)
    elif "/" not in repo_id:
        repo_id = f"{user}/{repo_id}"
    branch = revision or "main"
    with tempfile.TemporaryDirectory(prefix="tinkex-push-") as folder:
        found = download_checkpoint(tinker_path, Path(folder), progress=progress, config=config)
        _check_adapter(found.directory, tinker_path)
        _name_base(found.directory, weights.base_model)
        if add_model_card and not (found.directory / "README.md").exists():
            card = model_card(tinker_path, repo_id, weights)
            (found.directory / "README.md").write_text(card, encoding="utf-8")
        ignored = [*(ignore_patterns or ()), *(() if allow_patterns else INTERNAL)]
        with _uploading(repo_id):
            api.create_repo(repo_id, private=not public, exist_ok=True)
            is_new = not _check_other_card(api, errors, repo_id, branch, tinker_path)
            if is_new and not create_pr:
                api.create_branch(repo_id, branch=branch, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=str(found.directory),
                revision=branch,
                commit_message=commit_message or f"Upload adapter from {tinker_path}",
                create_pr=create_pr,
                allow_patterns=list(allow_patterns) if allow_patterns else None,
                ignore_patterns=ignored or None,
                delete_patterns="*"
                if is_new and not create_pr
                else None,  # a new branch has the files of main
            )
    url = str(getattr(commit, "pr_url", None) or getattr(commit, "commit_url", "") or repo_id)
    return PushedCheckpoint(tinker_path, repo_id, branch, public, url)


def repository_name(base_model: str, run_id: str) -> str:
    """The name a repository gets when none is given.

    >>> repository_name("Qwen/Qwen3-8B", "0a1b:train:0")
    'tinker-Qwen3-8B-0a1b-train-0'
    """
    return _sanitized(f"tinker-{base_model.rpartition('/')[2]}-{run_id}")[:96]


def model_card(tinker_path: str, repo_id: str, weights: WeightsInfoResponse) -> str:
    """The README of an adapter: what it was trained on, by which checkpoint, and how to load it."""
    base = weights.base_model
    trained = [
        words
        for words, flag in (
            ("attention", weights.train_attn),
            ("MLP", weights.train_mlp),
            ("unembedding", weights.train_unembed),
        )
        if flag
    ]
    return f"""---
base_model: {base}
library_name: peft
tags:
- tinker
- peft
- lora
- base_model:adapter:{base}
tinker_path: {tinker_path}
---

# {repo_id.rpartition("/")[2]}

A LoRA adapter of [{base}](https://huggingface.co/{base}), trained with the Tinker API and exported from
`{tinker_path}`.

| | |
| --- | --- |
| Rank | {weights.lora_rank or "unknown"} |
| Trained layers | {", ".join(trained) or "unknown"} |

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo_id}")
tokenizer = AutoTokenizer.from_pretrained("{base}")
```
"""


def _hub(token: str | None) -> tuple[Any, Any]:
    try:
        from huggingface_hub import HfApi, errors
    except ModuleNotFoundError as error:
        raise SetupError(
            "pushing to the hub needs huggingface_hub; run: pip install 'tinkex[hub]'"
        ) from error
    return HfApi(token=token), errors


def _user(api: Any, errors: Any) -> str:
    try:
        return str(api.whoami()["name"])
    except errors.LocalTokenNotFoundError as error:
        raise SetupError(
            "not logged in to the Hugging Face Hub; set HF_TOKEN, or run: hf auth login"
        ) from error
    except Exception as error:  # the hub's library lets the errors of its HTTP library through
        raise SetupError(
            f"the Hugging Face Hub does not accept the login ({_first_line(error)}); set HF_TOKEN, or run: hf auth login"
        ) from error


@contextmanager
def _uploading(repo_id: str) -> Iterator[None]:
    try:
        yield
    except TinkexError:
        raise
    except Exception as error:  # the hub's library lets the errors of its HTTP library through
        raise SetupError(
            f"{repo_id} could not be uploaded: {_first_line(error)}. Check the name, and that the token may write."
        ) from error


def _check_adapter(directory: Path, tinker_path: str) -> None:
    missing = [name for name in ADAPTER if not (directory / name).is_file()]
    if missing:
        hint = (
            " It is encrypted (.age), and only its owner can read it." if any(directory.glob("*.age")) else ""
        )
        raise SetupError(f"{tinker_path} is not a PEFT adapter: it lacks {', '.join(missing)}.{hint}")


def _name_base(directory: Path, base_model: str) -> None:
    """PEFT finds the base model by this entry."""
    file = directory / ADAPTER[0]
    settings = json.loads(file.read_text(encoding="utf-8"))
    if (
        not isinstance(settings.get("base_model_name_or_path"), str)
        or not settings["base_model_name_or_path"]
    ):
        settings["base_model_name_or_path"] = base_model
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_other_card(api: Any, errors: Any, repo_id: str, revision: str, tinker_path: str) -> bool:
    """Refuses to write over another checkpoint; returns whether the revision exists."""
    try:
        file = api.hf_hub_download(repo_id, "README.md", revision=revision)
    except errors.RevisionNotFoundError:
        return False
    except errors.EntryNotFoundError:
        return True
    there = re.search(r"^tinker_path: *(\S+)$", Path(file).read_text(encoding="utf-8"), re.MULTILINE)
    if there is not None and there[1] != tinker_path:
        raise SetupError(
            f"{repo_id} at {revision} holds another checkpoint, {there[1]}; give another --repo or --revision"
        )
    return True


def _sanitized(text: str) -> str:
    return re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9_.-]", "-", text)).strip("-._")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
