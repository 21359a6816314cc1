"""The compiled core: a pass of our transformer, its logits and the draw of tokens, in C, on the CPU, in fp32.

``csrc`` holds the source; ``build`` compiles it when the package is installed; ``library`` finds the result or says
why there is none; ``layout`` is what both sides agree on. Whoever uses it has to have another way: a machine
without a compiler has no core.
"""

from tinkex.engine.kernels.library import Core, CoreUnavailable, load_core

__all__ = ["Core", "CoreUnavailable", "load_core"]
