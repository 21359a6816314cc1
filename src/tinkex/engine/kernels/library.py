"""Finds the compiled core, or says why there is none."""

from __future__ import annotations

from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path

from tinkex.engine.kernels.build import LIBRARY, build_error_file, sources_digest
from tinkex.engine.kernels.layout import DrawC, HeadC, ModelC, PairsC, PassC

__all__ = ["Core", "CoreUnavailable", "load_core"]

_FIX = (
    "install a C compiler and reinstall the package: pip install --force-reinstall --no-deps --no-cache-dir tinkex, "
    "or -e . in a checkout"
)
_NOT_EXACT = 2


class CoreUnavailable(Exception):
    """There is no compiled core here that can be used; says the ``reason``, and the ``fix``."""

    def __init__(self, reason: str, fix: str = _FIX) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


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
                f"the compiled core has no variant {variant!r} that runs on this processor",
                "let it choose the fastest one that does",
            )
        self.variant: str = library.tinkex_core_name(self._handle).decode()
        """The instruction set it uses: ``avx512``, ``avx2``, or ``portable``, which runs on every processor."""

    def forward(self, model: ModelC, rows: PassC, num_threads: int) -> None:
        """Hidden states of packed rows; their keys and values are added to the cache."""
        self._check(self._library.tinkex_core_forward(self._handle, byref(model), byref(rows), num_threads))

    def head(self, model: ModelC, rows: HeadC, num_threads: int) -> None:
        """Logits of hidden states."""
        self._check(self._library.tinkex_core_head(self._handle, byref(model), byref(rows), num_threads))

    def draw(self, rows: DrawC, num_threads: int) -> None:
        """One token per row of logits."""
        self._check(self._library.tinkex_core_draw(self._handle, byref(rows), num_threads))

    def add_pairs(self, rows: PairsC, team: int, num_threads: int) -> None:
        """What the low-rank pairs of a training pass add to the outputs, on the threads of a ``team``."""
        self._check(self._library.tinkex_core_pairs(self._handle, byref(rows), 0, team, num_threads))

    def add_pair_gradients(self, rows: PairsC, team: int, num_threads: int) -> None:
        """The gradients of the pairs, and what the pairs add to the gradient of the inputs."""
        self._check(self._library.tinkex_core_pairs(self._handle, byref(rows), 1, team, num_threads))

    def packed_bytes(self, stored: int, outputs: int, inputs: int) -> int:
        """What a matrix would take in another form; 0 where the form does not suit its size."""
        return int(self._library.tinkex_core_packed_bytes(self._handle, stored, outputs, inputs))

    def pack(
        self, source: int, outputs: int, inputs: int, stored: int, target: int, num_threads: int
    ) -> bool:
        """Writes a matrix in another form; False if a number would come out otherwise than it went in."""
        result = self._library.tinkex_core_pack(
            self._handle, source, outputs, inputs, stored, target, num_threads
        )
        if result == _NOT_EXACT:
            return False
        self._check(result)
        return True

    def _check(self, result: int) -> None:
        if result:
            raise MemoryError("the compiled core could not allocate the memory of a pass")


def load_core(path: Path = LIBRARY, *, variant: str = "") -> Core:
    """The core in ``path``; raises ``CoreUnavailable`` where there is none, or none that fits.

    ``variant`` asks for other instructions than the fastest this processor has.
    """
    if not path.is_file():
        raise CoreUnavailable(f"the package was built without the compiled core{_build_error(path)}")
    try:
        library = CDLL(str(path))
        library.tinkex_core_sources.restype = c_char_p
        built_from = library.tinkex_core_sources().decode()
    except (OSError, AttributeError) as error:
        raise CoreUnavailable(f"{path} cannot be loaded ({error})") from error
    if built_from != sources_digest():
        raise CoreUnavailable(f"{path} was built from other sources than the package has")
    library.tinkex_core_variant.argtypes = [c_char_p]
    library.tinkex_core_variant.restype = c_void_p
    library.tinkex_core_name.argtypes = [c_void_p]
    library.tinkex_core_name.restype = c_char_p
    library.tinkex_core_forward.argtypes = [c_void_p, POINTER(ModelC), POINTER(PassC), c_int]
    library.tinkex_core_head.argtypes = [c_void_p, POINTER(ModelC), POINTER(HeadC), c_int]
    library.tinkex_core_draw.argtypes = [c_void_p, POINTER(DrawC), c_int]
    library.tinkex_core_packed_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    library.tinkex_core_packed_bytes.restype = c_int64
    library.tinkex_core_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]
    library.tinkex_core_pairs.argtypes = [c_void_p, POINTER(PairsC), c_int, c_void_p, c_int]
    return Core(library, variant)


def _build_error(library: Path) -> str:
    """Why the package was built without ``library``, in parentheses; empty if that is not recorded."""
    try:
        first_line, *_ = build_error_file(library).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return f" ({first_line})"
