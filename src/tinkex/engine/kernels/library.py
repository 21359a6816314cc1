"""Finds the compiled core, or says why there is none."""

from __future__ import annotations

from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_void_p
from pathlib import Path

from tinkex.engine.kernels.build import LIBRARY, sources_digest
from tinkex.engine.kernels.layout import DrawC, HeadC, ModelC, PassC

__all__ = ["Core", "CoreUnavailable", "load_core"]

_INSTALL = "install a C compiler and reinstall the package (pip install --force-reinstall --no-deps tinkex, or -e . in a checkout)"


class CoreUnavailable(Exception):
    """There is no compiled core here; the message says why, and what would give one."""


class Core:
    """The compiled core for this processor. Its calls leave the interpreter free for other threads.

    Example:
        >>> core = load_core()
        >>> core.variant
        'avx2'
    """

    def __init__(self, library: CDLL, variant: str) -> None:
        self._library = library
        self._handle = library.tinkex_core_variant(variant.encode())
        if not self._handle:
            raise CoreUnavailable(
                f"the compiled core has no variant {variant!r} that runs on this processor; leave it out"
            )
        self.variant: str = library.tinkex_core_name(self._handle).decode()
        """The instructions it uses: ``avx512``, ``avx2`` or ``portable``."""

    def forward(self, model: ModelC, rows: PassC, num_threads: int) -> None:
        """Hidden states of packed rows; their keys and values are added to the cache."""
        self._check(self._library.tinkex_core_forward(self._handle, byref(model), byref(rows), num_threads))

    def head(self, model: ModelC, rows: HeadC, num_threads: int) -> None:
        """Logits of hidden states."""
        self._check(self._library.tinkex_core_head(self._handle, byref(model), byref(rows), num_threads))

    def draw(self, rows: DrawC, num_threads: int) -> None:
        """One token per row of logits."""
        self._check(self._library.tinkex_core_draw(self._handle, byref(rows), num_threads))

    def _check(self, result: int) -> None:
        if result:
            raise MemoryError("the compiled core could not allocate the memory of a pass")


def load_core(path: Path = LIBRARY, *, variant: str = "") -> Core:
    """The core in ``path``; raises ``CoreUnavailable`` where there is none, or none that fits.

    ``variant`` asks for other instructions than the fastest this processor has.
    """
    if not path.is_file():
        raise CoreUnavailable(f"the package was installed without its compiled core; {_INSTALL}")
    try:
        library = CDLL(str(path))
        library.tinkex_core_sources.restype = c_char_p
        built_from = library.tinkex_core_sources().decode()
    except (OSError, AttributeError) as error:
        raise CoreUnavailable(f"{path} cannot be used ({error}); {_INSTALL}") from error
    if built_from != sources_digest():
        raise CoreUnavailable(f"{path} was built from other sources than these; {_INSTALL}")
    library.tinkex_core_variant.argtypes = [c_char_p]
    library.tinkex_core_variant.restype = c_void_p
    library.tinkex_core_name.argtypes = [c_void_p]
    library.tinkex_core_name.restype = c_char_p
    library.tinkex_core_forward.argtypes = [c_void_p, POINTER(ModelC), POINTER(PassC), c_int]
    library.tinkex_core_head.argtypes = [c_void_p, POINTER(ModelC), POINTER(HeadC), c_int]
    library.tinkex_core_draw.argtypes = [c_void_p, POINTER(DrawC), c_int]
    return Core(library, variant)
