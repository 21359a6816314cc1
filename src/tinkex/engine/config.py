"""Every setting of the engine, with its default and its limits.

The embedded engine and ``tinkex serve`` build the same :class:`EngineConfig`; no other part of the engine reads the
environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from tinkex.errors import SetupError

MAX_LONG_POLL_S = 44.0
"""The official client times out after 45 s."""

MAX_DURATION_S = 100 * 365 * 86_400.0
"""A hundred years: longer waits overflow the timeouts of thread primitives."""

MAX_THREADS = 1024
"""More threads are not faster on any machine, and the process is killed if the system cannot start them."""

MAX_WORKERS = 256
"""Workers of one role on one machine."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

MIB = 1024 * 1024

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The memory limit of a container, in versions 2 and 1 of control groups."""

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

SAMPLER_COMPUTES = ("auto", "compiled", "torch")
WORKERS = ("thread", "process", "ray")

_RESOURCE = re.compile(r"\s*([A-Za-z][\w.:-]{0,99})=([0-9]{1,9}(?:\.[0-9]{1,4})?)([KMGT]?)\s*")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
    allow_origins: Sequence[str] = ()
    """Origins of web pages that may call this server, such as ``https://chat.example.org``."""

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
    """How long a session may be without heartbeats before its runs end and its unnamed snapshots are deleted."""
    session_silent_s: float = 900.0
    """How long a session may be without heartbeats before its runs are evicted to their savepoints."""
    session_grace_s: float = 3600.0
    """How long after a session finished its runs end and its unnamed snapshots are deleted; its runs leave memory sooner."""
    session_retention_s: float = 30 * 86_400.0
    """How long what is left of a session is kept after its last use: the session, its runs without checkpoints, its samplers
    and its uploaded losses."""
    snapshot_idle_s: float = 1800.0
    """How long an unnamed snapshot is kept after its last use, unless it is one of the newest of its run."""
    newest_snapshots_kept: int = 8
    """Unnamed snapshots of each run that are kept while its session lasts, however long they are not used."""
    asset_retention_s: float = 30 * 86_400.0
    """How long an uploaded image is kept, unless its owner sets a shorter time."""
    upload_retention_s: float = 86_400.0
    """How long an upload of weights may take; it is deleted then if it is not finished."""
    maintenance_interval_s: float = 30.0
    """How often expired results, checkpoints and idle sessions are deleted."""

    max_body_bytes: int = 32 * MIB
    """Size limit for a request that is decoded in memory, also after decompression."""
    max_asset_bytes: int = 64 * MIB
    """Size limit for an uploaded image."""
    max_upload_bytes: int = 16 * 1024 * MIB
    """Size limit for a file of an upload of weights."""
    max_pending_operations: int = 20_000
    """Pending operations of one user; more are rejected with 429."""
    max_pending_bytes_per_user: int = 256 * MIB
    """Bytes of the requests of one user's pending operations; more are rejected with 429. An operation that others wait for
    may exceed it by ``max_body_bytes``."""
    max_pending_bytes: int = 1024 * MIB
    """The same for all users together."""
    max_pending_bytes_in_memory: int = 64 * MIB
    """Memory for the requests of pending operations; those of further ones stay on disk until their turn comes."""
    max_tokens_per_s_per_user: int | None = None
    """Rate limit in tokens per second for one user, counting the tokens of passes, prompts and samples; more are rejected
    with 429. None: no limit."""
    max_samples_per_request: int = 1024
    max_live_bytes: int | None = None
    """Memory of runs: weights, gradients and moments. Above it, idle runs are evicted to their savepoints, and restored when
    they are next used. None: a quarter of the machine's memory."""
    max_live_runs: int | None = None
    """Runs in memory, of all users; above it, idle ones are evicted in the same way. None: no limit but the bytes."""
    max_live_runs_per_user: int | None = None
    """Runs of one user that have not ended, in memory or not; runs of sessions that finished or are silent do not count.
    More are rejected with 429. None: no limit per user."""
    max_disk_bytes: int | None = None
    """Bytes that all users may store: checkpoints, snapshots, savepoints, images, and rows of the database. What would store
    more is rejected with 429, an upload with 507. None: no limit but the disk."""
    max_disk_bytes_per_user: int | None = None
    """Bytes that one user may store, counted in the same way. None: no limit but the disk."""
    max_rollout_bytes_per_run: int = 64 * MIB
    """Bytes of the rollouts of one run that are kept; the oldest steps are deleted for new ones."""
    max_rollout_bytes_per_user: int = 512 * MIB
    """Bytes of the rollouts of one user that are kept; the oldest are deleted for new ones."""
    max_tokens_per_pass: int = 2048
    """Token budget of one training pass: tenants and chunks are added until it is full. Shared prefixes count once."""
    data_parallel_tokens: int | None = None
    """Distinct tokens above which a pass of one operation is cut into shards of about as many; trainers without work of their own
    compute some of them. None: ``max_tokens_per_pass`` with several trainers, and no cut with one. 0: no cut."""
    max_decode_batch: int = 64
    kv_cache_bytes: int = 2048 * MIB
    """KV cache of one base model, prefix cache included; samples wait while it is full."""
    sampler_compute: str = field(default_factory=sampler_compute_from_env)
    """The sampler implementation: the ``compiled`` core or ``torch``; ``auto`` uses the core if it is available."""
    worker: str = "thread"
    """Where models run: on a ``thread`` of this process, in a worker ``process``, which is restarted if it crashes, or in such
    processes on the nodes of a ``ray`` cluster."""
    ray_address: str = "local"
    """The cluster: ``host:port``, ``auto`` for the one of this machine, or ``local`` to start one on this machine's loopback."""
    trainer_resources: str = ""
    """What a trainer reserves on its node, such as ``CPU=4,memory=8G``. Empty: a CPU for each of its threads."""
    sampler_resources: str = ""
    """The same for a sampler."""
    trainers: int = 1
    """Workers that train; each holds its share of the runs. Without samplers they sample too."""
    samplers: int = 0
    """Workers that only sample. 0: the trainers do it."""
    min_samplers: int | None = None
    """The fewest workers that only sample, if their number follows the load. None: 1, if ``max_samplers`` is set."""
    max_samplers: int | None = None
    """The most of them: samplers are added while samples wait for a place. None: there are always ``samplers``."""
    sampler_idle_s: float = 60.0
    """How long fewer samplers must have been enough before one is removed."""
    threads: int | None = None
    """Compute threads of each worker; None: ``$OMP_NUM_THREADS``, or one per core, which several workers divide."""
    snapshots_in_memory: int = 16
    """Sampler weights kept in memory; others are loaded from disk when they are used."""
    prefix_sharing: bool = True
    """Whether training computes tokens that datums of a run have in common at their beginning once per pass."""
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
        object.__setattr__(self, "allow_origins", tuple(_parse_origin(each) for each in self.allow_origins))
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
            "session_retention_s",
            "snapshot_idle_s",
            "asset_retention_s",
            "upload_retention_s",
            "maintenance_interval_s",
            "savepoint_after_s",
            "sampler_idle_s",
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
            "max_upload_bytes",
            "max_pending_operations",
            "max_pending_bytes_per_user",
            "max_pending_bytes",
            "max_pending_bytes_in_memory",
            "max_samples_per_request",
            "max_rollout_bytes_per_run",
            "max_rollout_bytes_per_user",
        ):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in (
            "max_tokens_per_pass",
            "max_decode_batch",
            "kv_cache_bytes",
            "snapshots_in_memory",
            "newest_snapshots_kept",
            "savepoint_after_operations",
        ):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.data_parallel_tokens is not None and self.data_parallel_tokens < 0:
            raise SetupError(
                f"data_parallel_tokens is {self.data_parallel_tokens}; choose at least 1 token, or 0 to cut no passes."
            )
        if self.sampler_compute not in SAMPLER_COMPUTES:
            raise SetupError(
                f"sampler_compute is {self.sampler_compute!r}; choose one of: {', '.join(SAMPLER_COMPUTES)} (it can come "
                "from $TINKEX_SAMPLER_COMPUTE)."
            )
        if self.worker not in WORKERS:
            raise SetupError(f"worker is {self.worker!r}; choose one of: {', '.join(WORKERS)}.")
        parse_resources(self.trainer_resources)
        parse_resources(self.sampler_resources)
        if self.worker != "thread" and os.name != "posix":
            what = "a Ray cluster" if self.worker == "ray" else "a worker process"
            raise SetupError(
                f"{what} needs a POSIX system (Linux or macOS); run the models on a thread here (--worker thread)."
            )
        if not 1 <= self.trainers <= MAX_WORKERS or not 0 <= self.samplers <= MAX_WORKERS:
            raise SetupError(
                f"trainers is {self.trainers} and samplers is {self.samplers}; choose 1 to {MAX_WORKERS} trainers, and 0 to "
                f"{MAX_WORKERS} samplers (0: the trainers sample too)."
            )
        self._check_scaling()
        for name in (
            "max_live_bytes",
            "max_live_runs",
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

    def _check_scaling(self) -> None:
        if self.max_samplers is None:
            default = type(self).sampler_idle_s
            for name, is_set in (
                ("min_samplers", self.min_samplers is not None),
                ("sampler_idle_s", self.sampler_idle_s != default),
            ):
                if is_set:
                    raise SetupError(
                        f"{name} is {getattr(self, name):g}, and applies only to samplers whose number follows the load; set "
                        "max_samplers too, or remove it."
                    )
            return
        if self.samplers:
            raise SetupError(
                f"samplers is {self.samplers} and max_samplers is {self.max_samplers}; choose a fixed number (samplers), or one that "
                "follows the load (min_samplers, max_samplers)."
            )
        if not 1 <= self.max_samplers <= MAX_WORKERS or not 0 <= self.fewest_samplers <= self.max_samplers:
            raise SetupError(
                f"min_samplers is {self.fewest_samplers} and max_samplers is {self.max_samplers}; choose max_samplers from 1 to "
                f"{MAX_WORKERS}, and min_samplers from 0 to that."
            )

    @property
    def fewest_samplers(self) -> int:
        """The samplers that there are without load."""
        if self.max_samplers is None:
            return self.samplers
        return 1 if self.min_samplers is None else self.min_samplers

    @property
    def most_samplers(self) -> int:
        """The samplers that there are with enough load."""
        return self.samplers if self.max_samplers is None else self.max_samplers

    @property
    def engine_dir(self) -> Path:
        """The directory of the engine's database, checkpoints and key."""
        return self.data_dir if self.data_dir is not None else self.home / "engine"

    @property
    def live_bytes_limit(self) -> int:
        """The memory of runs: ``max_live_bytes``, or a quarter of the machine's memory."""
        return self.max_live_bytes if self.max_live_bytes is not None else memory_bytes() // 4

    @property
    def shard_tokens(self) -> int | None:
        """The distinct tokens of a shard of a larger pass; None if no pass is cut.

        >>> EngineConfig().shard_tokens, EngineConfig(trainers=2).shard_tokens, EngineConfig(data_parallel_tokens=9).shard_tokens
        (None, 2048, 9)
        """
        if self.data_parallel_tokens is not None:
            return self.data_parallel_tokens or None
        return self.max_tokens_per_pass if self.trainers > 1 else None

    @property
    def models_home(self) -> Path:
        """The directory of downloaded and converted models."""
        return self.home / "models"


def parse_resources(text: str) -> Mapping[str, float]:
    """Returns what ``NAME=AMOUNT`` pairs reserve on a node; raises :class:`SetupError` for anything else.

    >>> parse_resources("CPU=2,memory=1G")
    {'CPU': 2.0, 'memory': 1073741824.0}
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text.strip() else ():
        match = _RESOURCE.fullmatch(part)
        if match is None or match[1] in found:
            raise SetupError(
                f"the resources {text!r} cannot be read at {part.strip()!r}; give each resource once, such as CPU=2,memory=8G."
            )
        found[match[1]] = float(match[2]) * _UNITS[match[3]]
    return found


@cache
def memory_bytes() -> int:
    """Returns the memory of the machine, or of the container if that is less; 16 GiB if neither is known.

    >>> memory_bytes() > 0
    True
    """
    found: list[int] = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(file).read_text()))  # "max" without a limit
    return min((size for size in found if size > 0), default=16 * 1024 * MIB)


def _parse_origin(text: str) -> str:
    """Returns an origin as browsers send it.

    >>> _parse_origin("HTTPS://Chat.example.org:443")
    'https://chat.example.org'
    """
    found = _ORIGIN.fullmatch(text)
    if found is None:
        raise SetupError(
            f"allow_origins has {text!r}; give the scheme, host and port of each web page, such as https://chat.example.org "
            "or http://localhost:3000, without a path. '*' and 'null' are not accepted, because any page could use them."
        )
    scheme, host, port = found[1].lower(), found[2].lower(), found[3] or ""
    return f"{scheme}://{host}{'' if port == _DEFAULT_PORTS.get(scheme) else port}"
