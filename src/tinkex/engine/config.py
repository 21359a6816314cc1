"""Every setting of the engine, with its default and its limits.

The embedded engine and ``tinkex serve`` build the same :class:`EngineConfig`; nothing else in the engine reads
the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tinkex.errors import SetupError

LONGEST_POLL_S = 44.0
"""The official client gives a poll 45 s; a longer hold would look like a dead server to it."""

LONGEST_SPAN_S = 100 * 365 * 86_400.0
"""A hundred years: what waits longer is beyond the clocks that threads wait by."""

MOST_THREADS = 1024
"""More gain nothing on any machine, and systems that refuse to start them end the process."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

MIB = 1024 * 1024

SAMPLER_COMPUTES = ("auto", "compiled", "torch")
WORKERS = ("thread", "process")


def tinkex_home(environ: Mapping[str, str] | None = None) -> Path:
    """The directory that holds models and engine data: ``$TINKEX_HOME``, or ``~/.tinkex``.

    >>> tinkex_home({"TINKEX_HOME": "/data/tinkex"}).as_posix()
    '/data/tinkex'
    """
    chosen = (os.environ if environ is None else environ).get("TINKEX_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".tinkex"


def chosen_data_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The data directory the user set by ``$TINKEX_DATA_DIR``; None means the one in the home.

    >>> chosen_data_dir({}) is None
    True
    """
    chosen = (os.environ if environ is None else environ).get("TINKEX_DATA_DIR")
    return Path(chosen).expanduser() if chosen else None


def chosen_models(environ: Mapping[str, str] | None = None) -> list[str]:
    """The models the user set by ``$TINKEX_MODELS``, a comma-separated list of ``[NAME=]NAME_OR_DIR``.

    >>> chosen_models({"TINKEX_MODELS": "Qwen/Qwen3-8B=/models/tiny, /models/other"})
    ['Qwen/Qwen3-8B=/models/tiny', '/models/other']
    """
    text = (os.environ if environ is None else environ).get("TINKEX_MODELS", "")
    return [flag.strip() for flag in text.split(",") if flag.strip()]


def chosen_sampler_compute(environ: Mapping[str, str] | None = None) -> str:
    """What samples are computed with: ``$TINKEX_SAMPLER_COMPUTE``, or ``auto``.

    >>> chosen_sampler_compute({"TINKEX_SAMPLER_COMPUTE": "torch"}), chosen_sampler_compute({})
    ('torch', 'auto')
    """
    return (os.environ if environ is None else environ).get("TINKEX_SAMPLER_COMPUTE") or "auto"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; frozen, checked at construction.

    ``models`` maps each served name to its source (a directory or a model name); several names may share one
    source, and then share one copy of the weights. An empty mapping serves the default model.

    >>> config = EngineConfig(home=Path("/data/tinkex"), models={"Qwen/Qwen3-8B": "/models/tiny"})
    >>> config.engine_dir.as_posix(), config.models_home.as_posix(), config.long_poll_s
    ('/data/tinkex/engine', '/data/tinkex/models', 30.0)
    """

    home: Path = field(default_factory=tinkex_home)
    data_dir: Path | None = field(default_factory=chosen_data_dir)
    models: Mapping[str, str] = field(default_factory=dict)
    any_directory: bool = False
    """Whether a client may also name any model directory; for the embedded engine, whose client is its owner."""

    host: str = "127.0.0.1"
    port: int = 8787
    auth: bool = True

    gap_timeout_s: float = 300.0
    """How long operations wait for a missing seq_id of their run before they fail."""
    request_stall_s: float = 60.0
    """How long the head of a call may take, and how long its body may stand still; then it is refused with 408."""
    long_poll_s: float = 30.0
    """How long a poll for a result is held before it is answered with 408."""
    fetched_retention_s: float = 3600.0
    """How long a result stays after it was fetched once, so that a dropped connection can fetch it again."""
    result_retention_s: float = 86_400.0
    """How long a result that nobody fetched stays."""
    expired_retention_s: float = 7 * 86_400.0
    """How long an expired request is still answered with 410 instead of 404."""
    audit_retention_s: float = 365 * 86_400.0
    """How long the audit log remembers."""
    usage_retention_s: float = 2 * 365 * 86_400.0
    """How long it is known who used how much in which hour."""
    session_idle_s: float = 86_400.0
    """How long a session may be silent before its live weights and unnamed snapshots are released."""
    session_silent_s: float = 900.0
    """How long a session may be silent before its live weights make room for new runs where no other room is left."""
    session_grace_s: float = 3600.0
    """How long a finished session keeps its live weights and unnamed snapshots."""
    asset_retention_s: float = 30 * 86_400.0
    """How long an uploaded image stays, if its owner asked for no shorter time."""
    maintenance_interval_s: float = 30.0
    """How often expired results, checkpoints and idle sessions are cleared away."""

    max_body_bytes: int = 256 * MIB
    max_asset_bytes: int = 64 * MIB
    """Largest image that can be uploaded."""
    max_pending_operations: int = 20_000
    """Operations of one user that may wait at once; more are answered with 429."""
    max_tokens_per_s_per_user: int | None = None
    """Tokens one user may have computed in a second: passes by their tokens, samples by prompt and what is drawn; more are
    answered with 429. None: as fast as it goes."""
    max_samples_per_request: int = 1024
    max_live_runs: int = 64
    """Runs with weights in memory at once, over all users."""
    max_live_runs_per_user: int | None = None
    """Runs of one user with weights in memory at once; None: as many as fit."""
    max_disk_bytes: int | None = None
    """Bytes of live checkpoints and assets of all users; saving more is answered with 429, uploading with 507. None: as
    the disk allows."""
    max_disk_bytes_per_user: int | None = None
    """Bytes of live checkpoints and assets one user may keep; saving more is answered with 429, uploading with 507.
    None: as the disk allows."""
    max_tokens_per_pass: int = 2048
    """Token budget of one training pass: more tenants and chunks join it until it is full."""
    max_decode_batch: int = 64
    kv_cache_bytes: int = 2048 * MIB
    """Keys and values of one base model's samples, kept prompts included; when they are used up, samples wait."""
    sampler_compute: str = field(default_factory=chosen_sampler_compute)
    """What samples are computed with: the ``compiled`` core or ``torch``; ``auto`` is the core if it can be used."""
    worker: str = "thread"
    """Where models compute: on a ``thread`` of this process, or in a ``process`` of their own, which is started again
    if it dies."""
    threads: int | None = None
    """Threads that compute; None: what ``$OMP_NUM_THREADS`` says, or one per core."""
    snapshots_in_memory: int = 16
    """Sampler weights kept in memory; the others are read again from disk when they are used."""
    deterministic: bool = False
    """Whether every training operation runs alone, so that its bits do not depend on who else trains. Samples of the
    compiled core never depend on their company."""
    savepoint_after_s: float = 20.0
    """How many seconds of work a run may do between two savepoints; after a crash at most this is done again."""
    savepoint_after_operations: int = 1000
    """How many operations a run may do between two savepoints."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(self.home).expanduser())
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", Path(self.data_dir).expanduser())
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        if not 0 < self.long_poll_s <= LONGEST_POLL_S:
            raise SetupError(
                f"long_poll_s is {self.long_poll_s:g}, but polls must be answered within {LONGEST_POLL_S:g} s "
                "(clients give up after 45 s); choose a value between 0 and 44."
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
            if not 0 < getattr(self, name) <= LONGEST_SPAN_S:
                raise SetupError(
                    f"{name} is {getattr(self, name):g}; it must be a positive number of seconds, at most "
                    f"{LONGEST_SPAN_S:.0f} (100 years)."
                )
        for name in ("session_idle_s", "session_silent_s", "session_grace_s"):
            if not 0 <= getattr(self, name) <= LONGEST_SPAN_S:
                raise SetupError(
                    f"{name} is {getattr(self, name):g}; it must not be negative, and at most {LONGEST_SPAN_S:.0f} s (100 years)."
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
                "a worker process needs a POSIX system; let the models compute on a thread (--worker thread)."
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
        if self.threads is not None and self.threads > MOST_THREADS:
            raise SetupError(f"threads is {self.threads}; choose at most {MOST_THREADS}, or one per core.")
        if not 0 <= self.port <= 65_535:
            raise SetupError(f"port {self.port} does not exist; choose 1–65535, or 0 for any free port.")
        if not self.auth and self.host not in LOOPBACK_HOSTS:
            raise SetupError(
                f"a server without keys on host {self.host} could be used by anyone who reaches it; "
                "drop --no-auth, or listen on 127.0.0.1."
            )

    @property
    def engine_dir(self) -> Path:
        """Where this engine keeps its database, checkpoints and key."""
        return self.data_dir if self.data_dir is not None else self.home / "engine"

    @property
    def models_home(self) -> Path:
        """Where downloaded and converted models live."""
        return self.home / "models"
