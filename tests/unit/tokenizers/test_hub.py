"""Tokenizers by a model's name, over the hub's protocol: rules, revision, token, cache."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.tokenizers.hub import Hub, hub_of
from tinkex.tokenizers.names import LLAMA_3, pinned_revision

pytestmark = pytest.mark.slow

REVISION = "fedcba9876543210fedcba9876543210fedcba98"


def kimi_files(home: Path) -> Path:
    home.mkdir()
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (home / "tiktoken.model").write_text("\n".join(lines))
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    return home


def load(
    hub: Hub, cache: Path, model: str, *options: str, transformers: bool = False, **env: str
) -> list[str]:
    """Loads a tokenizer in a fresh process; the hub's library reads its settings when it is imported."""
    program = f"""
    import sys
    if not {transformers}:
        sys.modules["transformers"] = None  # as if it were not installed
    from tinkex.errors import SetupError
    from tinkex.tokenizers import get_tokenizer
    try:
        tokenizer = get_tokenizer({model!r}, {", ".join(options)})
    except SetupError as error:
        print("SetupError")
        print(error)
    else:
        assert get_tokenizer({model!r}, {", ".join(options)}) is tokenizer
        print(type(tokenizer).__name__)
        print(tokenizer.decode(tokenizer.encode("hello 12", add_special_tokens=False)))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **env},
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip().splitlines()


def downloads(hub: Hub) -> list[str]:
    return [
        line.removeprefix("GET ") for line in hub.asked if line.startswith("GET ") and "/api/" not in line
    ]


@pytest.mark.parametrize(
    ("model", "repository"),
    [
        ("org/model:peft:262144", "org/model"),
        ("org/model/variant", "org/model"),
        ("meta-llama/Llama-3.1-8B", LLAMA_3),
    ],
)
def test_a_model_s_name_leads_to_its_tokenizer(
    tmp_path: Path, tiny_model: Path, model: str, repository: str
) -> None:
    with hub_of({(repository, "main"): tiny_model}) as hub:
        assert load(hub, tmp_path, model) == ["LightTokenizer", "hello 12"]
        asked = downloads(hub)
        assert all(path.startswith(f"/{repository}/resolve/") for path in asked)
        # everything lies in the cache; a second process fetches nothing again
        assert load(hub, tmp_path, model) == ["LightTokenizer", "hello 12"]
        assert downloads(hub) == asked


def test_what_is_cached_works_without_the_hub(tmp_path: Path, tiny_model: Path) -> None:
    with hub_of({("org/model", "main"): tiny_model}) as hub:
        load(hub, tmp_path, "org/model")
        before = len(hub.asked)
        assert load(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1") == ["LightTokenizer", "hello 12"]
        assert len(hub.asked) == before


def test_a_revision_and_another_cache_are_honoured(tmp_path: Path, tiny_model: Path) -> None:
    with hub_of({("org/model", REVISION): tiny_model}) as hub:
        options = (f"revision={REVISION!r}", f"cache_dir={str(tmp_path / 'mine')!r}")
        assert load(hub, tmp_path / "home", "org/model", *options) == ["LightTokenizer", "hello 12"]
        assert all(f"/resolve/{REVISION}/" in path for path in downloads(hub))
        assert (tmp_path / "mine" / "models--org--model").is_dir()


def test_a_gated_repository_needs_the_token(tmp_path: Path, tiny_model: Path) -> None:
    with hub_of({("org/model", "main"): tiny_model}, token="hf_secret") as hub:
        said = load(hub, tmp_path, "org/model")
        assert said[0] == "SetupError"
        assert "no tokenizer for 'org/model'" in said[1]
        assert load(hub, tmp_path, "org/model", "token='hf_secret'")[0] == "LightTokenizer"
        assert load(hub, tmp_path / "other", "org/model", HF_TOKEN="hf_secret")[0] == "LightTokenizer"


def test_kimi_comes_from_its_pinned_revision_and_runs_no_code_of_the_hub(tmp_path: Path) -> None:
    name = "moonshotai/Kimi-K2-Thinking"
    revision = pinned_revision(name)
    assert revision is not None
    home = kimi_files(tmp_path / "kimi")
    (home / "tokenization_kimi.py").write_text("raise SystemExit('this code must not run')")
    with hub_of({(name, revision): home}) as hub:
        for transformers in (False, True):
            said = load(hub, tmp_path / "cache", f"{name}:peft:262144", transformers=transformers)
            assert said == ["KimiTokenizer", "hello 12"]
        assert not [path for path in hub.asked if path.endswith(".py")]


def test_with_transformers_its_own_tokenizer_is_returned(tmp_path: Path, tiny_model: Path) -> None:
    with hub_of({("org/model", REVISION): tiny_model}) as hub:
        said = load(hub, tmp_path, "org/model", f"revision={REVISION!r}", transformers=True)
        assert said[0] != "LightTokenizer"
        assert said[-1] == "hello 12"
