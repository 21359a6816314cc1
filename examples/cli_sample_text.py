"""Call the sample command from a program: text output and JSON output.

You will see the command `tinkex sample` stream an answer, then the same command print JSON, which the
program parses.
"""

from __future__ import annotations

import contextlib
import io
import json
import os

import tinkex
from tinkex.cli import run

BASE_URL = os.environ.get("TINKER_BASE_URL") or "local"


def main() -> None:
    with tinkex.ServiceClient(base_url=BASE_URL) as service:
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
    # The key comes from TINKER_API_KEY, so that it is on no command line.
    command = [
        "sample",
        "What is the capital of France?",
        "--max-tokens",
        "12",
        "--seed",
        "1",
        "--model",
        model,
        "--base-url",
        BASE_URL,
    ]
    print("$ tinkex", *command, flush=True)
    print("exit code", run(command))

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run([*command, "--json"])
    answer = json.loads(printed.getvalue())
    print(f"as JSON, exit code {code}: {len(answer['prompt_tokens'])} prompt tokens")
    for sequence in answer["sequences"]:
        print(f"  {sequence['stop_reason']}: {sequence['text']!r}")


if __name__ == "__main__":
    main()
