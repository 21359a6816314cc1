"""The variants of the core that this machine can run."""

from __future__ import annotations

from tinkex.engine.kernels import Core, CoreUnavailable, load_core

VARIANTS = ("avx512", "avx2", "portable")


def find_core(variant: str) -> Core | None:
    """The core in one variant; None where the package has no core, or the processor no such instructions."""
    try:
        return load_core(variant=variant)
    except CoreUnavailable:
        return None


CORES = {name: core for name in VARIANTS if (core := find_core(name)) is not None}
