"""Short names of checkpoints and runs: ``@last``, ``@best``, the directory of a run, or the beginning of an id."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.config import DEFAULT_BASE_URL
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config

__all__ = ["is_reference", "is_run_directory", "resolve_checkpoint", "resolve_run"]

SCHEME = "tinker://"
KINDS = ("weights", "sampler_weights", "external_weights")
NUM_SHOWN = 5


def is_reference(text: str) -> bool:
    """Returns whether a text is a short name, not a whole checkpoint path.

    >>> is_reference("@last"), is_reference("tinker://run/weights/final")
    (True, False)
    """
    return not (text.startswith(SCHEME) and text.count("/") == 4)


def resolve_checkpoint(reference: str, rest: RestClient, kinds: Sequence[str] = KINDS) -> str:
    """Returns the ``tinker://`` path of the checkpoint ``reference``, looked up with ``rest``.

    ``@last`` is the newest checkpoint of this user, ``@best`` the one with the best evaluation of the newest run in
    ``./tinkex-runs``; ``DIRECTORY@last`` and ``DIRECTORY@best`` are those of that run, and ``DIRECTORY`` is its result. Other texts are
    the beginning of a path, with or without ``tinker://``; of a run's id alone, the newest checkpoint of that run. Where
    several kinds are possible, the first of ``kinds`` is preferred. Whole paths are returned unchanged.

    ::

        path = resolve_checkpoint("@last", service.create_rest_client())
        sampler = service.create_sampling_client(model_path=path)
    """
    if not is_reference(reference):
        return reference
    place, _, label = reference.rpartition("@")
    if label in {"last", "best"} and (place or label == "best"):
        return _of_directory(Path(place) if place else _newest_directory(), kinds, label)
    if is_run_directory(Path(reference)):
        return _of_directory(Path(reference), kinds)
    if reference.startswith("@") and reference != "@last":
        raise SetupError(f"{reference!r} is not a short name; there are @last and @best")
    found = [one for one in rest.iter_user_checkpoints() if _kind(one.tinker_path) in kinds]
    if reference != "@last":
        prefix = reference.removeprefix(SCHEME)
        found = [one for one in found if one.tinker_path.removeprefix(SCHEME).startswith(prefix)]
        runs = {one.tinker_path.removeprefix(SCHEME).split("/")[0] for one in found}
        if len(runs) > 1:
            raise _ambiguous(reference, runs)
    if not found:
        wanted = (
            "no checkpoint" if reference == "@last" else f"no checkpoint whose path starts with {reference!r}"
        )
        command = f"tinkex checkpoint list{_server_options(rest.config)}"
        raise SetupError(f"there is {wanted} ({' or '.join(kinds)}); list yours with: {command}")
    newest = max(found, key=lambda one: one.time).tinker_path
    run, _, name = newest.removeprefix(SCHEME).split("/")
    saved = {one.tinker_path for one in found}
    # A run saves its result in several kinds under one name.
    return next(path for kind in kinds if (path := f"{SCHEME}{run}/{kind}/{name}") in saved)


def resolve_run(reference: str, rest: RestClient) -> str:
    """Returns the id of the training run ``reference``: ``@last`` is the newest one; others as in :func:`resolve_checkpoint`.

    A text that no run's id starts with is returned unchanged; ``rest`` lists the runs.

    ::

        run = rest.get_training_run(resolve_run("@last", rest)).result()
    """
    if is_run_directory(Path(reference)):
        return _of_directory(Path(reference), KINDS).removeprefix(SCHEME).split("/")[0]
    if ":" in reference:  # a whole id
        return reference
    if reference == "@last":
        newest = rest.list_training_runs(1).result().training_runs
        if not newest:
            raise SetupError(
                f"there is no training run yet; start one with: tinkex train sft DATA{_server_options(rest.config)}"
            )
        return newest[0].training_run_id
    found = [
        one.training_run_id for one in rest.iter_training_runs() if one.training_run_id.startswith(reference)
    ]
    if len(found) > 1 and reference not in found:
        raise _ambiguous(reference, found)
    return found[0] if len(found) == 1 else reference


def _server_options(config: Config) -> str:
    """Returns the options with which a command reaches the same server."""
    if config.is_local:
        return " --local"
    return "" if config.base_url == DEFAULT_BASE_URL else f" --base-url {config.base_url}"


def _ambiguous(reference: str, runs: Iterable[str]) -> SetupError:
    listed = sorted(runs)
    more = f" and {len(listed) - NUM_SHOWN} more" if len(listed) > NUM_SHOWN else ""
    return SetupError(
        f"{reference!r} is the beginning of several runs: {', '.join(listed[:NUM_SHOWN])}{more}; give more of it"
    )


def _kind(path: str) -> str:
    return path.removeprefix(SCHEME).split("/")[1]


# ---- the directories that `tinkex train` writes ----


def is_run_directory(directory: Path) -> bool:
    """Returns whether ``tinkex train`` has written this directory."""
    return any((directory / name).is_file() for name in ("run.toml", "settings.json"))


def _newest_directory() -> Path:
    runs = [one for one in Path("tinkex-runs").glob("*") if is_run_directory(one)]
    if not runs:
        raise SetupError(
            "@best is of the newest run in ./tinkex-runs, and there is none; write DIRECTORY@best"
        )
    return max(runs, key=lambda one: one.stat().st_mtime)


def _of_directory(directory: Path, kinds: Sequence[str], label: str = "") -> str:
    """Returns the last or the best checkpoint of a run, or without a label its result, which may be either."""
    if not is_run_directory(directory):
        raise SetupError(f"{directory} is not the directory of a run")
    report, saved = _read(directory / "report.json"), _read_lines(directory / "checkpoints.jsonl")
    if label == "best":
        kept = _read(directory / "best.json") or _best_saved(directory, saved)
        paths = [kept.get("path"), kept.get("sampler_path")]
    elif report and (not label or report.get("best_step") is None):
        paths = [report.get("checkpoint"), report.get("sampler_checkpoint")]
    else:
        paths = [line["path"] for line in saved[-1:]]
    for kind in kinds:
        for path in paths:
            if isinstance(path, str) and _kind(path) == kind:
                return path
    which = "with an evaluation" if label == "best" else "yet"
    raise SetupError(f"{directory} has no checkpoint {which} of the kind {' or '.join(kinds)}")


def _best_saved(directory: Path, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the saved checkpoint with the best evaluation, for runs without ``--keep-best``."""
    paths = {line["step"]: line["path"] for line in saved}
    scores: dict[int, float] = {}
    for line in _read_lines(directory / "metrics.jsonl"):
        if line.get("step") in paths and ("eval_reward" in line or "eval_loss" in line):
            scores[line["step"]] = line["eval_reward"] if "eval_reward" in line else -line["eval_loss"]
    return {"path": paths[max(scores, key=lambda step: scores[step])]} if scores else {}


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return []
    # A process that was killed may have left a partial line.
    return [json.loads(line) for line in text.split("\n") if line.startswith("{") and line.endswith("}")]
