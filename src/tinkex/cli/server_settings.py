"""Settings of ``tinkex serve``, in order of precedence: option, environment, file, default.

One table lists every setting; options, environment variables (``TINKEX_SERVE_MAX_LIVE_RUNS``) and keys of the
configuration file derive from it. The module imports nothing heavy, because ``--help`` loads it.
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

__all__ = ["CONFIG_VARIABLE", "SETTINGS", "ServerSetting", "flag_of", "read_settings"]

Kind = Literal["text", "integer", "bytes", "seconds", "boolean", "path", "list"]

PREFIX = "TINKEX_SERVE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

SIZE_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TIME_UNITS = {"": 1.0, "S": 1.0, "M": 60.0, "H": 3600.0, "D": 86_400.0}
METAVARS: Mapping[Kind, str] = {
    "text": "TEXT",
    "integer": "N",
    "bytes": "BYTES",
    "seconds": "SECONDS",
    "path": "PATH",
    "list": "TEXT",
}
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class ServerSetting:
    """One setting; ``engine`` is true for a field of :class:`EngineConfig` of the same name."""

    kind: Kind
    meaning: str
    default: object = None
    choices: tuple[str, ...] = ()
    engine: bool = True
    variable: str | None = None
    """Environment variable to read instead of the one with the prefix."""


SETTINGS: Mapping[str, ServerSetting] = {
    # address and data
    "host": ServerSetting("text", "Address to listen on.", "127.0.0.1"),
    "port": ServerSetting("integer", "Port to listen on; 0 picks a free one.", 8787),
    "data_dir": ServerSetting(
        "path",
        "Directory of checkpoints, results and the API key. Default: $TINKEX_DATA_DIR, or $TINKEX_HOME/engine, or "
        "~/.tinkex/engine.",
        variable="TINKEX_DATA_DIR",
    ),
    "models": ServerSetting(
        "list",
        "Model to serve: a directory, a .gguf file or a hub name, optionally with another NAME. "
        "Repeatable; a source with several names is loaded once. "
        "Default: $TINKEX_MODELS (comma-separated), or a small instruct model, downloaded at the first start "
        "(up to 270 MB).",
        (),
        engine=False,
        variable="TINKEX_MODELS",
    ),
    # access
    "no_auth": ServerSetting(
        "boolean", "Accept every API key; allowed only on loopback addresses.", default=False, engine=False
    ),
    "tls_cert": ServerSetting("path", "Certificate chain (PEM); enables HTTPS.", engine=False),
    "tls_key": ServerSetting("path", "Private key (PEM) of the certificate.", engine=False),
    "behind_proxy": ServerSetting(
        "text",
        "Addresses or networks (comma-separated) of trusted reverse proxies that terminate TLS; the server uses their "
        "X-Forwarded-For and X-Forwarded-Proto headers, and those of no one else.",
        engine=False,
    ),
    "allow_origins": ServerSetting(
        "list",
        "Origin of web pages that may call this server, such as https://chat.example.org; repeatable. Default: none.",
        (),
    ),
    "dashboard": ServerSetting(
        "boolean",
        "Serve the pages of the dashboard at /, for browsers that sign in with an API key.",
        default=True,
        engine=False,
    ),
    "insecure": ServerSetting(
        "boolean",
        "Allow access from other machines without TLS; keys and data are sent unencrypted.",
        default=False,
        engine=False,
    ),
    # connections
    "max_connections": ServerSetting(
        "integer",
        "Maximum number of open connections. Default: 16384, or what the limit of open files leaves.",
        engine=False,
    ),
    "max_connections_per_address": ServerSetting(
        "integer",
        "Maximum number of open connections per client address (IPv6: per /64 network), except trusted proxies. "
        "Default: half of max_connections.",
        engine=False,
    ),
    # quotas
    "max_live_bytes": ServerSetting(
        "bytes",
        "Memory of runs (weights, gradients, moments); idle ones are evicted to disk and restored when they are used. "
        "Default: a quarter of the machine's memory.",
    ),
    "max_live_runs": ServerSetting(
        "integer",
        "Maximum number of runs in memory, all users together; idle ones are evicted. Default: no limit.",
    ),
    "max_live_runs_per_user": ServerSetting(
        "integer",
        "Maximum number of runs per user that have not ended, in memory or not. Default: no limit.",
    ),
    "max_disk_bytes": ServerSetting(
        "bytes",
        "Disk quota for files and database rows of users, all together. Default: the free disk space.",
    ),
    "max_disk_bytes_per_user": ServerSetting(
        "bytes", "Disk quota for files and database rows per user. Default: no limit."
    ),
    "max_pending_operations": ServerSetting(
        "integer", "Maximum number of waiting operations per user.", 20_000
    ),
    "max_pending_bytes_per_user": ServerSetting(
        "bytes", "Maximum size of the requests of waiting operations per user.", 256 * 2**20
    ),
    "max_pending_bytes": ServerSetting(
        "bytes", "Maximum size of the requests of waiting operations, all users together.", 1024 * 2**20
    ),
    "max_pending_bytes_in_memory": ServerSetting(
        "bytes", "Memory for the requests of waiting operations; further ones are only on disk.", 64 * 2**20
    ),
    "max_tokens_per_s_per_user": ServerSetting(
        "integer", "Maximum tokens trained on or sampled per second and user. Default: no limit."
    ),
    "max_samples_per_request": ServerSetting("integer", "Maximum number of samples per request.", 1024),
    "max_body_bytes": ServerSetting(
        "bytes",
        "Maximum size of a request body, also after decompression; uploads have their own limits.",
        32 * 2**20,
    ),
    "max_asset_bytes": ServerSetting("bytes", "Maximum size of an uploaded image.", 64 * 2**20),
    "max_upload_bytes": ServerSetting("bytes", "Maximum size of an uploaded file of weights.", 16 * 2**30),
    "max_rollout_bytes_per_run": ServerSetting(
        "bytes", "Maximum size of the rollouts of a run; the oldest steps are deleted.", 64 * 2**20
    ),
    "max_rollout_bytes_per_user": ServerSetting(
        "bytes", "Maximum size of the rollouts of a user; the oldest are deleted.", 512 * 2**20
    ),
    # compute
    "worker": ServerSetting(
        "text",
        "Where models run: in a worker process, which is restarted after a crash, or on a thread of the server.",
        "process" if os.name == "posix" else "thread",
        choices=("process", "thread"),
    ),
    "ray": ServerSetting(
        "text",
        "Run the workers on the nodes of a Ray cluster: HOST:PORT, auto for the one of this machine, or local, also without a "
        "value, to start one here. Needs tinkex[ray].",
        engine=False,
    ),
    "trainer_resources": ServerSetting(
        "text",
        "What each trainer reserves on its node of a Ray cluster, such as CPU=4,memory=8G. Default: a CPU per thread.",
        "",
    ),
    "sampler_resources": ServerSetting("text", "What each sampler reserves, in the same form.", ""),
    "trainers": ServerSetting(
        "integer", "Number of workers that train; without samplers they sample too.", 1
    ),
    "samplers": ServerSetting("integer", "Number of workers that only sample. 0: the trainers do it.", 0),
    "min_samplers": ServerSetting(
        "integer", "Minimum number of workers that only sample, if it follows the load. Default: 1."
    ),
    "max_samplers": ServerSetting(
        "integer",
        "Maximum of that number: samplers are added while samples wait for a place in a batch. Default: the number is fixed.",
    ),
    "sampler_idle_s": ServerSetting(
        "seconds", "How long fewer samplers must have been enough before one is removed.", 60.0
    ),
    "threads": ServerSetting(
        "integer",
        "Number of compute threads of each worker. Default: $OMP_NUM_THREADS, or one per core, divided by the workers.",
    ),
    "max_tokens_per_pass": ServerSetting("integer", "Maximum tokens per training pass.", 2048),
    "data_parallel_tokens": ServerSetting(
        "integer",
        "Number of distinct tokens above which a training pass is cut into shards, which idle trainers help to compute. Default: max_tokens_per_pass with several trainers, else no cut. 0: no cut.",
    ),
    "max_decode_batch": ServerSetting(
        "integer",
        "Maximum number of sequences decoded in one batch, besides up to 8 of users who have none in it.",
        64,
    ),
    "kv_cache_bytes": ServerSetting(
        "bytes", "Size of the KV cache per base model, prefix cache included.", 2048 * 2**20
    ),
    "snapshots_in_memory": ServerSetting(
        "integer", "Maximum number of sampler snapshots kept in memory.", 16
    ),
    "sampler_compute": ServerSetting(
        "text",
        "Implementation of the sampler. Default: $TINKEX_SAMPLER_COMPUTE, or auto.",
        choices=("auto", "compiled", "torch"),
        variable="TINKEX_SAMPLER_COMPUTE",
    ),
    "prefix_sharing": ServerSetting(
        "boolean",
        "Compute tokens that datums of a training pass have in common at their beginning once.",
        default=True,
    ),
    "deterministic": ServerSetting(
        "boolean",
        "Run every training operation in its own pass, so that its results are independent of other runs, bit for bit.",
        default=False,
    ),
    # timeouts and retention
    "savepoint_after_s": ServerSetting("seconds", "Compute time of a run between two savepoints.", 20.0),
    "savepoint_after_operations": ServerSetting(
        "integer", "Maximum number of operations of a run between two savepoints.", 1000
    ),
    "gap_timeout_s": ServerSetting("seconds", "Timeout for a missing sequence number of a run.", 300.0),
    "request_stall_s": ServerSetting(
        "seconds",
        "Timeout for the head of a request, and for its body without progress; then it is rejected with 408. A client that does not read its response for as long is disconnected.",
        60.0,
    ),
    "long_poll_s": ServerSetting("seconds", "Maximum duration of a long poll for a result.", 30.0),
    "fetched_retention_s": ServerSetting("seconds", "Retention of a result that was fetched.", 3600.0),
    "result_retention_s": ServerSetting("seconds", "Retention of a result that was not fetched.", 86_400.0),
    "expired_retention_s": ServerSetting(
        "seconds", "Retention of the record that a request expired.", 7 * 86_400.0
    ),
    "asset_retention_s": ServerSetting("seconds", "Retention of an uploaded image.", 30 * 86_400.0),
    "upload_retention_s": ServerSetting("seconds", "Maximum duration of an upload of weights.", 86_400.0),
    "audit_retention_s": ServerSetting("seconds", "Retention of audit log entries.", 365 * 86_400.0),
    "usage_retention_s": ServerSetting(
        "seconds", "Retention of the usage per user and hour.", 2 * 365 * 86_400.0
    ),
    "session_idle_s": ServerSetting(
        "seconds", "How long a session without heartbeats keeps its runs.", 86_400.0
    ),
    "session_silent_s": ServerSetting("seconds", "How long such a session keeps them in memory.", 900.0),
    "session_grace_s": ServerSetting(
        "seconds", "How long a finished session keeps its runs, on disk.", 3600.0
    ),
    "session_retention_s": ServerSetting(
        "seconds",
        "Retention of a session after its last use, with its runs without checkpoints, samplers and uploaded losses.",
        30 * 86_400.0,
    ),
    "snapshot_idle_s": ServerSetting(
        "seconds", "Retention of an unnamed sampler snapshot after its last use, if newer ones exist.", 1800.0
    ),
    "newest_snapshots_kept": ServerSetting(
        "integer", "Number of unnamed sampler snapshots of a run that are kept although they are not used.", 8
    ),
    "maintenance_interval_s": ServerSetting("seconds", "Interval between deletions of expired data.", 30.0),
    "shutdown_after_s": ServerSetting(
        "seconds",
        "How long a shutdown waits for the running operation; after that it runs at the next start.",
        30.0,
        engine=False,
    ),
    # logs
    "log_format": ServerSetting(
        "text", "Format of the log on stderr.", "text", choices=("text", "json"), engine=False
    ),
    "log_level": ServerSetting(
        "text",
        "Minimum level of logged messages.",
        "warning",
        choices=("debug", "info", "warning", "error"),
        engine=False,
    ),
    "access_log": ServerSetting(
        "boolean",
        "Log every request: request id, user, endpoint, status, duration; never keys, IP addresses or data.",
        default=False,
        engine=False,
    ),
}


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, config_file: Path | None = None
) -> dict[str, Any]:
    """Returns the value of every setting; raises :class:`SetupError` with the name and source of an invalid one.

    >>> settings = read_settings({"port": 9000}, {"TINKEX_SERVE_PORT": "8000", "TINKEX_SERVE_KV_CACHE_BYTES": "1G"})
    >>> settings["port"], settings["kv_cache_bytes"], settings["max_decode_batch"]
    (9000, 1073741824, 64)
    """
    environ = os.environ if environ is None else environ
    values = {name: setting.default for name, setting in SETTINGS.items()}
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE]).expanduser()
    if config_file is not None:
        values |= _from_file(config_file)
    values |= _from_environment(environ)
    values |= {
        name: parse(name, value, flag_of(name))
        for name, value in flags.items()
        if value is not None and value != ()
    }
    return values


def parse(name: str, value: object, source: str) -> Any:
    """Converts and validates the value of a setting; errors name its ``source``.

    >>> parse("max_disk_bytes", "50 GB", "--max-disk-bytes"), parse("session_idle_s", "2h", "the file")
    (53687091200, 7200.0)
    """
    setting = SETTINGS[name]
    parser = {
        "text": _text,
        "integer": _integer,
        "bytes": _size,
        "seconds": _duration,
        "boolean": _boolean,
        "path": _path,
        "list": _list,
    }[setting.kind]
    try:
        parsed = parser(value)
    except ValueError as error:
        raise SetupError(f"{name} from {source} is {value!r}; {error}.") from None
    if setting.choices and parsed not in setting.choices:
        raise SetupError(f"{name} from {source} is {value!r}; choose one of: {', '.join(setting.choices)}.")
    return parsed


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise SetupError(
            f"cannot read the configuration file {path}: {error.strerror or error}; choose another with --config."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(
            f"the configuration file {path} is not valid TOML: {error}; fix it and start again."
        ) from error
    unknown = sorted(found.keys() - SETTINGS.keys())
    if unknown:
        raise SetupError(
            f"unknown setting {', '.join(unknown)} in the configuration file {path}; choose from: {', '.join(SETTINGS)}."
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
            f"unknown environment variable {', '.join(unknown)}; unset it, or see: tinkex serve --help."
        )
    return found


def flag_of(name: str) -> str:
    """Returns the option of a setting; that of a list is its singular, and repeatable.

    >>> flag_of("max_live_runs"), flag_of("allow_origins")
    ('--max-live-runs', '--allow-origin')
    """
    singular = name.removesuffix("s") if SETTINGS[name].kind == "list" else name
    return f"--{singular.replace('_', '-')}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("give a non-empty string")
    return value


def _integer(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("give an integer")


def _size(value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:I?B)?", value.upper())
        if match is not None:
            return int(float(match[1]) * SIZE_UNITS[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("give a number of bytes, optionally with a unit, such as 512M or 20G (1K is 1024)")


def _duration(value: object) -> float:
    from tinkex.engine.config import MAX_DURATION_S

    seconds: float = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([SMHD]?)", value.upper())
        if match is not None:
            seconds = float(match[1]) * TIME_UNITS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    if 0 <= seconds <= MAX_DURATION_S:
        return float(seconds)
    raise ValueError(
        "give a number of seconds, optionally with a unit, such as 90s, 30m, 12h or 7d, up to 100 years"
    )


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    raise ValueError("give true or false")


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    return Path(_text(value)).expanduser()


def _list(value: object) -> tuple[str, ...]:
    """Returns a list, a comma-separated string, or a table of names and sources as a tuple of strings."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Mapping):
        value = [f"{name}={source}" for name, source in value.items() if isinstance(source, str)]
    if isinstance(value, list | tuple) and value and all(isinstance(part, str) and part for part in value):
        return tuple(value)
    raise ValueError("give a list of strings, or for models a table of names and sources")
