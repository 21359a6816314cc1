"""Settings of ``tinkex serve``: flag, else environment, else file, else default.

One table names every setting; the flags, the variables (``TINKEX_SERVE_MAX_LIVE_RUNS``) and the keys of the
configuration file are all made from it. Nothing heavy is imported here, because the help reads it.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinkex.errors import SetupError

__all__ = ["CONFIG_VARIABLE", "SETTINGS", "Setting", "read_settings"]

Kind = Literal["text", "whole", "bytes", "seconds", "switch", "path", "texts"]

PREFIX = "TINKEX_SERVE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

SIZES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SPANS = {"": 1.0, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86_400.0}
METAVARS: Mapping[Kind, str] = {
    "text": "TEXT",
    "whole": "N",
    "bytes": "BYTES",
    "seconds": "SECONDS",
    "path": "PATH",
    "texts": "TEXT",
}
ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Setting:
    """One setting. ``engine`` says whether it is a field of the engine's configuration, under the same name."""

    kind: Kind
    meaning: str
    default: object = None
    choices: tuple[str, ...] = ()
    engine: bool = True
    variable: str | None = None
    """A variable that is older than the prefix, and is read instead."""


SETTINGS: Mapping[str, Setting] = {
    # where
    "host": Setting("text", "Address to listen on.", "127.0.0.1"),
    "port": Setting("whole", "Port to listen on; 0 picks a free one.", 8787),
    "data_dir": Setting(
        "path",
        "Where checkpoints, results and the key are kept. Default: $TINKEX_DATA_DIR, or $TINKEX_HOME/engine, or "
        "~/.tinkex/engine.",
        variable="TINKEX_DATA_DIR",
    ),
    "models": Setting(
        "texts",
        "Model to serve: a directory, a .gguf file or a hub name, under its own name or under NAME. "
        "Repeat it for more models or names; one source under several names is loaded once. "
        "Default: $TINKEX_MODELS (comma-separated), or a small instruct model that is fetched at the first start "
        "(about 100 MB).",
        (),
        engine=False,
        variable="TINKEX_MODELS",
    ),
    # who
    "no_auth": Setting(
        "switch", "Accept every key; only on this machine (127.0.0.1).", default=False, engine=False
    ),
    "tls_cert": Setting("path", "Certificate chain (PEM); the server then speaks https.", engine=False),
    "tls_key": Setting("path", "Private key (PEM) of the certificate.", engine=False),
    "behind_proxy": Setting(
        "text",
        "Addresses (comma-separated) of reverse proxies that speak TLS in front of this server; what they say about "
        "the caller (X-Forwarded-For, X-Forwarded-Proto) is believed.",
        engine=False,
    ),
    "insecure": Setting(
        "switch",
        "Let others reach this server without TLS: keys and data can be read on the way.",
        default=False,
        engine=False,
    ),
    # shares
    "max_live_runs": Setting("whole", "Runs with weights in memory at once, over all users.", 64),
    "max_live_runs_per_user": Setting("whole", "The same for one user. Default: no limit."),
    "max_disk_bytes": Setting(
        "bytes", "Checkpoints and images of all users together. Default: as the disk allows."
    ),
    "max_disk_bytes_per_user": Setting("bytes", "Checkpoints and images of one user. Default: no limit."),
    "max_pending_operations": Setting("whole", "Operations of one user that may wait at once.", 20_000),
    "max_tokens_per_s_per_user": Setting(
        "whole", "Tokens one user may have trained on or sampled in a second. Default: no limit."
    ),
    "max_samples_per_request": Setting("whole", "Samples one request may ask for.", 1024),
    "max_body_bytes": Setting("bytes", "Largest body of a call, also once it is unpacked.", 256 * 2**20),
    "max_asset_bytes": Setting("bytes", "Largest image that can be uploaded.", 64 * 2**20),
    # computing
    "worker": Setting(
        "text",
        "Where models compute: in a process of their own, which is started again if it dies, or on a thread of the server.",
        "process" if os.name == "posix" else "thread",
        choices=("process", "thread"),
    ),
    "threads": Setting("whole", "Threads that compute. Default: $OMP_NUM_THREADS, or one per core."),
    "max_tokens_per_pass": Setting("whole", "Tokens of one training pass.", 2048),
    "max_decode_batch": Setting("whole", "Sequences sampled at once.", 64),
    "kv_cache_bytes": Setting(
        "bytes", "Keys and values of one base model's samples, kept prompts included.", 2048 * 2**20
    ),
    "snapshots_in_memory": Setting("whole", "Sampler weights kept in memory.", 16),
    "sampler_compute": Setting(
        "text",
        "What samples are computed with. Default: $TINKEX_SAMPLER_COMPUTE, or auto.",
        choices=("auto", "compiled", "torch"),
        variable="TINKEX_SAMPLER_COMPUTE",
    ),
    "deterministic": Setting(
        "switch",
        "Run every training operation alone, so that its bits do not depend on who else trains.",
        default=False,
    ),
    # time
    "savepoint_after_s": Setting("seconds", "Work of a run between two savepoints.", 20.0),
    "savepoint_after_operations": Setting("whole", "Operations of a run between two savepoints.", 1000),
    "gap_timeout_s": Setting("seconds", "How long operations wait for a missing number of their run.", 300.0),
    "request_stall_s": Setting(
        "seconds",
        "How long the head of a call may take, and how long its body may stand still; then it is refused with 408.",
        60.0,
    ),
    "long_poll_s": Setting("seconds", "How long a poll for a result is held.", 30.0),
    "fetched_retention_s": Setting("seconds", "How long a result stays after it was fetched.", 3600.0),
    "result_retention_s": Setting("seconds", "How long a result stays that nobody fetched.", 86_400.0),
    "expired_retention_s": Setting(
        "seconds", "How long an expired request is remembered as expired.", 7 * 86_400.0
    ),
    "asset_retention_s": Setting("seconds", "How long an uploaded image stays.", 30 * 86_400.0),
    "audit_retention_s": Setting("seconds", "How long the audit log remembers.", 365 * 86_400.0),
    "usage_retention_s": Setting(
        "seconds", "How long it is known who used how much in which hour.", 2 * 365 * 86_400.0
    ),
    "session_idle_s": Setting("seconds", "How long a silent session keeps its runs.", 86_400.0),
    "session_silent_s": Setting(
        "seconds", "How long it keeps them for sure where there is no room for other runs.", 900.0
    ),
    "session_grace_s": Setting("seconds", "How long a finished session keeps its runs.", 3600.0),
    "maintenance_interval_s": Setting("seconds", "How often what has had its time is cleared away.", 30.0),
    "shutdown_after_s": Setting(
        "seconds",
        "How long a stopping server waits for the operation under way; then it leaves it, and runs it at the next start.",
        30.0,
        engine=False,
    ),
    # logs
    "log_format": Setting(
        "text", "How logs are written on stderr.", "text", choices=("text", "json"), engine=False
    ),
    "log_level": Setting(
        "text",
        "How much is logged.",
        "warning",
        choices=("debug", "info", "warning", "error"),
        engine=False,
    ),
    "access_log": Setting(
        "switch",
        "Log every call: request id, user, endpoint, status, duration; never keys, addresses or data.",
        default=False,
        engine=False,
    ),
}


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, config_file: Path | None = None
) -> dict[str, Any]:
    """Every setting with the value that counts; :class:`SetupError` names what makes no sense, and where it stands.

    >>> chosen = read_settings({"port": 9000}, {"TINKEX_SERVE_PORT": "8000", "TINKEX_SERVE_KV_CACHE_BYTES": "1G"})
    >>> chosen["port"], chosen["kv_cache_bytes"], chosen["max_live_runs"]
    (9000, 1073741824, 64)
    """
    environ = os.environ if environ is None else environ
    chosen = {name: setting.default for name, setting in SETTINGS.items()}
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE]).expanduser()
    if config_file is not None:
        chosen |= _from_file(config_file)
    chosen |= _from_environment(environ)
    chosen |= {name: _flag(name, value) for name, value in flags.items() if value is not None and value != ()}
    return chosen


def parse(name: str, value: object, place: str) -> Any:
    """A value of a setting, as it is used; ``place`` says in errors where it comes from.

    >>> parse("max_disk_bytes", "50 GB", "--max-disk-bytes"), parse("session_idle_s", "2h", "the file")
    (53687091200, 7200.0)
    """
    setting = SETTINGS[name]
    reader = {
        "text": _text,
        "whole": _whole,
        "bytes": _size,
        "seconds": _span,
        "switch": _switch,
        "path": _path,
        "texts": _texts,
    }[setting.kind]
    try:
        found = reader(value)
    except ValueError as error:
        raise SetupError(f"{name} from {place} is {value!r}; {error}.") from None
    if setting.choices and found not in setting.choices:
        raise SetupError(f"{name} from {place} is {value!r}; choose one of: {', '.join(setting.choices)}.")
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise SetupError(
            f"the configuration file {path} cannot be read: {error.strerror or error}; name another with --config."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(
            f"the configuration file {path} is not TOML: {error}; correct it and start again."
        ) from error
    unknown = sorted(found.keys() - SETTINGS.keys())
    if unknown:
        raise SetupError(
            f"the configuration file {path} has no setting named {', '.join(unknown)}; it may hold: {', '.join(SETTINGS)}."
        )
    return {name: parse(name, value, str(path)) for name, value in found.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = {CONFIG_VARIABLE}
    for name, setting in SETTINGS.items():
        variable = setting.variable or f"{PREFIX}{name.upper()}"
        known.add(variable)
        if environ.get(variable):
            found[name] = parse(name, environ[variable], f"${variable}")
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise SetupError(
            f"no setting of the server is named {', '.join(unknown)}; see tinkex serve --help, and unset what is misspelt."
        )
    return found


def _flag(name: str, value: object) -> Any:
    return parse(name, value, "--model" if name == "models" else f"--{name.replace('_', '-')}")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("give a text")
    return value


def _whole(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("give a whole number")


def _size(value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:I?B)?", value.upper())
        if match is not None:
            return int(float(match[1]) * SIZES[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("give a number of bytes, or one with a unit, such as 512M or 20G (a K is 1024)")


def _span(value: object) -> float:
    from tinkex.engine.config import MAX_DURATION_S

    found: float = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([SMHD]?)", value.upper())
        if match is not None:
            found = float(match[1]) * SPANS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = value
    if 0 <= found <= MAX_DURATION_S:
        return float(found)
    raise ValueError(
        "give a number of seconds, or one with a unit, such as 90s, 30m, 12h or 7d, up to a hundred years"
    )


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ON | OFF:
        return value.lower() in ON
    raise ValueError("give true or false")


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    return Path(_text(value)).expanduser()


def _texts(value: object) -> tuple[str, ...]:
    """Several texts: a list, one comma-separated text, or a table of names and sources."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Mapping):
        value = [f"{name}={source}" for name, source in value.items() if isinstance(source, str)]
    if isinstance(value, list | tuple) and value and all(isinstance(part, str) and part for part in value):
        return tuple(value)
    raise ValueError("give a list of models, or a table of names and sources")
