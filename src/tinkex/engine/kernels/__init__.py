"""The compiled core: transformer passes, logits, token draws and LoRA training kernels in C, on the CPU, in fp32.

``csrc`` holds the sources; ``build`` compiles them when the package is installed; ``library`` loads the result or says
why there is none; ``layout`` mirrors the C structures. Callers need a fallback: a package that was built without a C
compiler has no core.
"""

from tinkex.engine.kernels.library import Core, CoreUnavailable, load_core

__all__ = ["Core", "CoreUnavailable", "load_core"]
