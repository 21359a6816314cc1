"""Every setting of the engine, with its default and its limits.

The embedded engine and ``tinkex serve`` build the same :class:`EngineConfig`; no other part of the engine reads the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tinkex.errors import SetupError

MAX_LONG_POLL_S = 44.0
"""The official client times out after 45 s."""

MAX_DURATION_S = 100 * 365 * 86_400.0
"""A hundred years: longer waits overflow the timeouts of thread primitives."""

MAX_THREADS = 1024
"""More threads are not faster on any machine, and the process is killed if the system cannot start them."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

MIB = 1024 * 1024

SAMPLER_COMPUTES = ("auto", "compiled", "torch")
WORKERS = ("thread", "process")


def tinkex_home(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the directory for models and engine data: ``$TINKEX_HOME``, or ``~/.tinkex``.

    >>> tinkex_home({"TINKEX_HOME": "/data/tinkex"}).as_posix()
    '/data/tinkex'
    """
    home = (os.environ if environ is None else environ).get("TINKEX_HOME")
    return Path(home).expanduser() if home else Path.home() / ".tinkex"


def data_dir_from_env(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns ``$TINKEX_DATA_DIR``, or None for the default under the home directory.

    >>> data_dir_from_env({}) is None
    True
    """
    data_dir = (os.environ if environ is None else environ).get("TINKEX_DATA_DIR")
    return Path(data_dir).expanduser() if data_dir else None


def models_from_env(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the models in ``$TINKEX_MODELS``, a comma-separated list of ``[NAME=]NAME_OR_DIR``.

    >>> models_from_env({"TINKEX_MODELS": "Qwen/Qwen3-8B=/models/tiny, /models/other"})
    ['Qwen/Qwen3-8B=/models/tiny', '/models/other']
    """
    text = (os.environ if environ is None else environ).get("TINKEX_MODELS", "")
    return [flag.strip() for flag in text.split(",") if flag.strip()]


def sampler_compute_from_env(environ: Mapping[str, str] | None = None) -> str:
    """Returns the sampler implementation: ``$TINKEX_SAMPLER_COMPUTE``, or ``auto``.

    >>> sampler_compute_from_env({"TINKEX_SAMPLER_COMPUTE": "torch"}), sampler_compute_from_env({})
    ('torch', 'auto')
    """
    return (os.environ if environ is None else environ).get("TINKEX_SAMPLER_COMPUTE") or "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; frozen, validated at construction.

    ``models`` maps each served name to its source (a directory or a model name); names with the same source share one
    copy of the weights. An empty mapping serves the default model.

    >>> config = EngineConfig(home=Path("/data/tinkex"), models={"Qwen/Qwen3-8B": "/models/tiny"})
    >>> config.engine_dir.as_posix(), config.models_home.as_posix(), config.long_poll_s
    ('/data/tinkex/engine', '/data/tinkex/models', 30.0)
    """

    home: Path = field(default_factory=tinkex_home)
    data_dir: Path | None = field(default_factory=data_dir_from_env)
    models: Mapping[str, str] = field(default_factory=dict)
    any_directory: bool = False
    """Whether clients may also use the path of any model directory; for the embedded engine."""

    host: str = "127.0.0.1"
    port: int = 8787
    auth: bool = True

    gap_timeout_s: float = 300.0
    """How long operations wait for a missing seq_id of their run before they fail."""
    request_stall_s: float = 60.0
    """Timeout for the headers of a request, and for the next chunk of its body; then it is rejected with 408."""
    long_poll_s: float = 30.0
    """How long a poll for a result waits before it returns 408."""
    fetched_retention_s: float = 3600.0
    """How long a result is kept after it was first fetched, so that a client can retry after a connection error."""
    result_retention_s: float = 86_400.0
    """How long a result that was never fetched is kept."""
    expired_retention_s: float = 7 * 86_400.0
    """How long an expired request returns 410 instead of 404."""
    audit_retention_s: float = 365 * 86_400.0
    """How long entries of the audit log are kept."""
    usage_retention_s: float = 2 * 365 * 86_400.0
    """How long the usage per hour is kept."""
    session_idle_s: float = 86_400.0
    """How long a session may be without heartbeats before its live weights and unnamed snapshots are released."""
    session_silent_s: float = 900.0
    """How long a session may be without heartbeats before its live weights are released if new runs need the room."""
    session_grace_s: float = 3600.0
    """How long a finished session keeps its live weights and unnamed snapshots."""
    asset_retention_s: float = 30 * 86_400.0
    """How long an uploaded image is kept, unless its owner sets a shorter time."""
    maintenance_interval_s: float = 30.0
    """How often expired results, checkpoints and idle sessions are deleted."""

    max_body_bytes: int = 256 * MIB
    max_asset_bytes: int = 64 * MIB
    """Size limit for an uploaded image."""
    max_pending_operations: int = 20_000
    """Pending operations of one user; more are rejected with 429."""
    max_tokens_per_s_per_user: int | None = None
    """Rate limit in tokens per second for one user, counting the tokens of passes, prompts and samples; more are rejected
    with 429. None: no limit."""
    max_samples_per_request: int = 1024
    max_live_runs: int = 64
    """Runs with weights in memory, of all users."""
    max_live_runs_per_user: int | None = None
    """Runs of one user with weights in memory; None: no limit per user."""
    max_disk_bytes: int | None = None
    """Bytes of live checkpoints and assets of all users; saving more is rejected with 429, uploading with 507. None: no
    limit but the disk."""
    max_disk_bytes_per_user: int | None = None
    """Bytes of live checkpoints and assets of one user; saving more is rejected with 429, uploading with 507. None: no
    limit but the disk."""
    max_tokens_per_pass: int = 2048
    """Token budget of one training pass: tenants and chunks are added until it is full."""
    max_decode_batch: int = 64
    kv_cache_bytes: int = 2048 * MIB
    """KV cache of one base model, prefix cache included; samples wait while it is full."""
    sampler_compute: str = field(default_factory=sampler_compute_from_env)
    """The sampler implementation: the ``compiled`` core or ``torch``; ``auto`` uses the core if it is available."""
    worker: str = "thread"
    """Where models run: on a ``thread`` of this process, or in a worker ``process``, which is restarted if it crashes."""
    threads: int | None = None
    """Compute threads; None: ``$OMP_NUM_THREADS``, or one per core."""
    snapshots_in_memory: int = 16
    """Sampler weights kept in memory; others are loaded from disk when they are used."""
    deterministic: bool = False
    """Whether training operations run one per pass, so that results are bitwise independent of other tenants. Samples of
    the compiled core are always batch-invariant."""
    savepoint_after_s: float = 20.0
    """Seconds of work between two savepoints of a run, which limits the replay after a crash."""
    savepoint_after_operations: int = 1000
    """Operations between two savepoints of a run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(self.home).expanduser())
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", Path(self.data_dir).expanduser())
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        if not 0 < self.long_poll_s <= MAX_LONG_POLL_S:
            raise SetupError(
                f"long_poll_s is {self.long_poll_s:g}; it must be positive and at most {MAX_LONG_POLL_S:g} "
                "(clients time out after 45 s)."
            )
        for name in (
            "gap_timeout_s",
            "request_stall_s",
            "fetched_retention_s",
            "result_retention_s",
            "expired_retention_s",
            "audit_retention_s",
            "usage_retention_s",
            "asset_retention_s",
            "maintenance_interval_s",
            "savepoint_after_s",
        ):
            if not 0 < getattr(self, name) <= MAX_DURATION_S:
                raise SetupError(
                    f"{name} is {getattr(self, name):g}; it must be a positive number of seconds, at most "
                    f"{MAX_DURATION_S:.0f} (100 years)."
                )
        for name in ("session_idle_s", "session_silent_s", "session_grace_s"):
            if not 0 <= getattr(self, name) <= MAX_DURATION_S:
                raise SetupError(
                    f"{name} is {getattr(self, name):g}; it must not be negative, and at most {MAX_DURATION_S:.0f} s (100 years)."
                )
        for name in (
            "max_body_bytes",
            "max_asset_bytes",
            "max_pending_operations",
            "max_samples_per_request",
            "max_live_runs",
        ):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in (
            "max_tokens_per_pass",
            "max_decode_batch",
            "kv_cache_bytes",
            "snapshots_in_memory",
            "savepoint_after_operations",
        ):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.sampler_compute not in SAMPLER_COMPUTES:
            raise SetupError(
                f"sampler_compute is {self.sampler_compute!r}; choose one of: {', '.join(SAMPLER_COMPUTES)} (it can come "
                "from $TINKEX_SAMPLER_COMPUTE)."
            )
        if self.worker not in WORKERS:
            raise SetupError(f"worker is {self.worker!r}; choose one of: {', '.join(WORKERS)}.")
        if self.worker == "process" and os.name != "posix":
            raise SetupError(
                "a worker process needs a POSIX system; run the models on a thread (--worker thread)."
            )
        for name in (
            "max_live_runs_per_user",
            "max_disk_bytes_per_user",
            "max_disk_bytes",
            "max_tokens_per_s_per_user",
            "threads",
        ):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise SetupError(f"{name} is {limit}; it must be at least 1, or None for the default.")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise SetupError(f"threads is {self.threads}; choose at most {MAX_THREADS}, or one per core.")
        if not 0 <= self.port <= 65_535:
            raise SetupError(f"port is {self.port}; choose 1–65535, or 0 for any free port.")
        if not self.auth and self.host not in LOOPBACK_HOSTS:
            raise SetupError(
                f"a server without authentication on host {self.host} is open to everyone who can reach it; "
                "drop --no-auth, or listen on 127.0.0.1."
            )

    @property
    def engine_dir(self) -> Path:
        """The directory of the engine's database, checkpoints and key."""
        return self.data_dir if self.data_dir is not None else self.home / "engine"

    @property
    def models_home(self) -> Path:
        """The directory of downloaded and converted models."""
        return self.home / "models"
