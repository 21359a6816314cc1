"""Sample from a prompt file, and write the answers to another file.

You will see three kinds of prompt files (text, a chat, token ids) and the answers to each.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import tinkex
from tinkex.cli import run

BASE_URL = os.environ.get("TINKER_BASE_URL") or "local"
PROMPTS = {
    "text.txt": "The first rule of sailing is",
    "chat.json": json.dumps({"messages": [{"role": "user", "content": "Name a knot."}]}),
    "tokens.json": json.dumps([72, 101, 108]),
}


def main() -> None:
    with tinkex.ServiceClient(base_url=BASE_URL) as service:
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in PROMPTS.items():
            prompt, output = Path(scratch, name), Path(scratch, f"{name}.answers")
            prompt.write_text(content)
            options = [
                "--file",
                str(prompt),
                "--output",
                str(output),
                "-n",
                "2",
                "--max-tokens",
                "8",
                "--json",
            ]
            if name == "text.txt":
                options.append("--raw")  # unchanged, not as a user message
            code = run(["sample", *options, "--seed", "1", "--model", model, "--base-url", BASE_URL])
            answers = json.loads(output.read_text())
            print(f"{name}: exit code {code}, {len(answers['prompt_tokens'])} prompt tokens")
            for sequence in answers["sequences"]:
                print(f"  {sequence['stop_reason']}: {sequence['text']!r}")


if __name__ == "__main__":
    main()
