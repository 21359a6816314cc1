"""Sample with the command line, from a program: text for people, JSON for programs.

You will see the command `tinkex sample` stream an answer, then the same command print JSON, which the
program reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import os

from tinkex.cli import run

WHERE = ["--base-url", os.environ.get("TINKER_BASE_URL") or "local"]
MODEL = ["--model", os.environ["TINKER_BASE_MODEL"]] if os.environ.get("TINKER_BASE_MODEL") else []


def main() -> None:
    # The key, if the server wants one, is read from TINKER_API_KEY, so that it stands on no command line.
    asked = ["sample", "What is the capital of France?", "--max-tokens", "12", "--seed", "1", *MODEL, *WHERE]
    print("$ tinkex", *asked, flush=True)
    print("exit code", run(asked))

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run([*asked, "--json"])
    answer = json.loads(printed.getvalue())
    print(f"as JSON, exit code {code}: {len(answer['prompt_tokens'])} prompt tokens")
    for sequence in answer["sequences"]:
        print(f"  {sequence['stop_reason']}: {sequence['text']!r}")


if __name__ == "__main__":
    main()
