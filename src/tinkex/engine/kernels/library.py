"""Loads the compiled core, or says why there is none."""

from __future__ import annotations

from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path

from tinkex.engine.kernels.build import LIBRARY, build_error_file, sources_digest
from tinkex.engine.kernels.layout import DrawC, HeadC, LoraPassC, ModelC, PassC

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
    """The compiled core for this processor. Its calls release the interpreter lock.

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
        """Computes the hidden states of packed rows, and writes their keys and values into the KV cache."""
        self._check(self._library.tinkex_core_forward(self._handle, byref(model), byref(rows), num_threads))

    def head(self, model: ModelC, rows: HeadC, num_threads: int) -> None:
        """Computes the logits of hidden states."""
        self._check(self._library.tinkex_core_head(self._handle, byref(model), byref(rows), num_threads))

    def draw(self, rows: DrawC, num_threads: int) -> None:
        """Draws one token per row of logits."""
        self._check(self._library.tinkex_core_draw(self._handle, byref(rows), num_threads))

    def lora_forward(self, rows: LoraPassC, team: int, num_threads: int) -> None:
        """Adds LoRA to the outputs of a training pass, on the threads of ``team``."""
        self._check(self._library.tinkex_core_lora(self._handle, byref(rows), 0, team, num_threads))

    def lora_backward(self, rows: LoraPassC, team: int, num_threads: int) -> None:
        """Adds the gradients of A, B and the inputs, on the threads of ``team``."""
        self._check(self._library.tinkex_core_lora(self._handle, byref(rows), 1, team, num_threads))

    def packed_bytes(self, storage: int, outputs: int, inputs: int) -> int:
        """Bytes that a matrix takes in another format; 0 if the format does not support its size."""
        return int(self._library.tinkex_core_packed_bytes(self._handle, storage, outputs, inputs))

    def pack(
        self, source: int, outputs: int, inputs: int, storage: int, target: int, num_threads: int
    ) -> bool:
        """Packs a matrix into another format; False if unpacking would not give back the same numbers."""
        result = self._library.tinkex_core_pack(
            self._handle, source, outputs, inputs, storage, target, num_threads
        )
        if result == _NOT_EXACT:
            return False
        self._check(result)
        return True

    def _check(self, result: int) -> None:
        if result:
            raise MemoryError("the compiled core could not allocate the memory of a pass")


def load_core(path: Path = LIBRARY, *, variant: str = "") -> Core:
    """The core in ``path``; raises ``CoreUnavailable`` if there is none, or none that can be used.

    ``variant`` names an instruction set; by default the core uses the fastest that this processor supports.
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
    library.tinkex_core_lora.argtypes = [c_void_p, POINTER(LoraPassC), c_int, c_void_p, c_int]
    return Core(library, variant)


def _build_error(library: Path) -> str:
    """Why the package was built without ``library``, in parentheses; empty if that is not recorded."""
    try:
        first_line, *_ = build_error_file(library).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return f" ({first_line})"
