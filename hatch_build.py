"""Compiles the engine's core when the package is built, also for an editable install; without a compiler it is left out."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/tinkex/engine/kernels"


class CoreBuildHook(BuildHookInterface[Any]):
    """Puts the compiled core beside the Python code that loads it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel say which platform it is for; or say why there is no core, and go on."""
        kernels = Path(self.root) / KERNELS
        build = runpy.run_path(str(kernels / "build.py"))
        try:
            library: Path = build["build_core"]()
        except build["BuildError"] as error:
            build["LIBRARY"].unlink(missing_ok=True)  # one of other sources would only be refused
            self.app.display_warning(
                f"tinkex is built without its compiled core, sampling will be slower: {error}"
            )
            return
        if version != "editable":
            build_data["artifacts"].append(f"/{KERNELS}/{library.name}")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
