"""Counts the functions and files that one embedded operation passes through, client and engine together.

python benchmarks/call_path.py          a table: operation, functions and files of the engine, and of the whole package
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
PACKAGE = "/tinkex/"
ENGINE = "/tinkex/engine/"


class CallPath:
    """Records the functions that run on any thread while :meth:`record` calls a function."""

    def __init__(self) -> None:
        self._seen: set[CodeType] = set()
        self._recording = False

    def install(self) -> None:
        """Profiles this thread and every thread started later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def record(self, function: Callable[[], Any]) -> set[CodeType]:
        """Returns the functions of the package that run during the call."""
        self._seen = set()
        self._recording = True
        try:
            function()
        finally:
            self._recording = False
        return {
            code for code in self._seen if PACKAGE in code.co_filename and not code.co_name.startswith("<")
        }

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._recording and event == "call":
            self._seen.add(frame.f_code)


def main() -> None:
    calls = CallPath()
    calls.install()
    import tinkex
    from tests.models import tiny_llama
    from tinkex import types

    with tempfile.TemporaryDirectory() as home:
        model = tiny_llama(Path(home) / "tiny")
        service = tinkex.ServiceClient(base_url="local")
        training = service.create_lora_training_client(base_model=str(model), rank=4)
        tokens = list(range(5, 25))
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        sampler = service.create_sampling_client(base_model=str(model))
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        prompt = types.ModelInput.from_ints(tokens)
        operations: dict[str, Callable[[], Any]] = {
            "forward_backward": lambda: training.forward_backward([datum], "cross_entropy").result(),
            "optim_step": lambda: training.optim_step(types.AdamParams(learning_rate=1e-4)).result(),
            "sample": lambda: sampler.sample(prompt, num_samples=1, sampling_params=params).result(),
        }
        print("| operation | engine: functions | files | package: functions | files |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, operation in operations.items():
            for _ in range(3):
                operation()
            seen = calls.record(operation)
            engine = {code for code in seen if ENGINE in code.co_filename}
            counts = [len(engine), len(files(engine)), len(seen), len(files(seen))]
            print(f"| {name} | " + " | ".join(map(str, counts)) + " |")


def files(codes: set[CodeType]) -> set[str]:
    return {code.co_filename for code in codes}


if __name__ == "__main__":
    main()
