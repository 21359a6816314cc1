"""Compiles the engine's core when the package is built, also for an editable install; without a compiler the package has none."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/tinkex/engine/kernels"


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled core to the package, or the reason why there is none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the core and tag the wheel with its platform; without a core the wheel is pure Python."""
        kernels = Path(self.root) / KERNELS
        build = runpy.run_path(str(kernels / "build.py"))
        built: Path = build["build_for_package"]()
        if version != "editable":
            build_data["artifacts"].append(f"/{KERNELS}/{built.name}")
        if built != build["LIBRARY"]:
            self.app.display_warning(
                "tinkex is built without its compiled core, so sampling runs on torch, at about half the speed: "
                + built.read_text(encoding="utf-8")
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
