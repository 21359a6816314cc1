"""``tinkex run --prompt`` samples, ``tinkex run`` alone explains itself, and every command takes a timeout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from tests.cli.commands import tinkex
from tests.cli.test_help import COMMANDS
from tests.scripted import ScriptedServer, over_http
from tests.servers import ServedEngine
from tinkex.cli import tinkex as root
from tinkex.testing import reply


def test_the_group_alone_prints_its_help() -> None:
    done = tinkex("run")
    assert (done.code, done.err) == (0, "")
    for word in ("--prompt", "--prompt-file", "list", "info", "Examples:"):
        assert word in done.out


@pytest.mark.parametrize("group", [(), ("checkpoint",), ("session",), ("model",), ("auth",)], ids=" ".join)
def test_a_group_without_a_command_prints_its_help(group: tuple[str, ...]) -> None:
    done = tinkex(*group)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: tinkex")
    assert done.out == tinkex(*group, "--help").out


@pytest.mark.slow
def test_tokens_are_sampled_from_although_there_is_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text("[5, 6]")
    server = ScriptedServer(
        healthz=lambda value, request: reply({"status": "ok"}),
        tokenizer_file=lambda value, request: reply({"detail": "none"}, status=404),
    )
    with over_http(server) as url:
        arguments = ("run", "--prompt-file", str(file), "--base-model", "toy", "--base-url", url)
        shown, as_json, text = (
            tinkex(*each, "--api-key", "tml-x", process=True)
            for each in (
                arguments,
                (*arguments, "--format", "json"),
                ("run", "--prompt", "a", *arguments[3:]),
            )
        )
    assert (shown.code, as_json.code, text.code) == (0, 0, 1)
    assert "[decode error: " in shown.out
    assert "stop_reason=stop | avg_logprob=0.0000" in shown.out
    assert json.loads(as_json.out)["sequences"][0]["tokens"] == [5, 6]


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_every_command_takes_a_timeout(path: tuple[str, ...]) -> None:
    command: click.Command = root
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    assert path == ("serve",) or any("--timeout" in option.opts for option in command.params)


@pytest.mark.slow
def test_common_options_may_stand_before_the_command_of_a_group(served_engine: ServedEngine) -> None:
    before = tinkex("checkpoint", "--json", "--timeout", "30", "list", server=served_engine)
    after = tinkex("checkpoint", "list", "--json", "--timeout", "30", server=served_engine)
    assert before.code == 0, before.err
    assert before.json == after.json
    assert "--timeout" not in tinkex("checkpoint").out, "the help of its commands shows it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--prompt-file", "{file}"), "exactly one of --prompt and --prompt-file"),
        (("--max-tokens", "3"), "exactly one of --prompt and --prompt-file"),
        (("--prompt", "a", "--base-model", "b", "--model-path", "tinker://r/weights/a"), "not both"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "list"), "--prompt is an option of 'tinkex run --prompt …'"),
        (("--prompt", "a", "--timeout", "0"), "--timeout"),
        (("--prompt", "a", "--top-p", "7"), "top_p"),
    ],
)
def test_contradicting_options_are_rejected(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("The sea")
    done = tinkex("run", *(one.format(file=file) for one in arguments))
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "num_tokens"),
    [("The sea", None), ("[5, 6, 7]", 3), ('{"tokens": [5, 6]}', 2)],
    ids=["text", "list", "object"],
)
def test_a_prompt_file_is_text_or_tokens(
    content: str, num_tokens: int | None, served_engine: ServedEngine, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text(content)
    options = ("--prompt-file", "prompt", "--max-tokens", "4", "--num-samples", "2", "--json")
    done = tinkex("run", *options, "--output", "out.json", server=served_engine, cwd=tmp_path)
    assert (done.code, done.out) == (0, ""), done.err
    value = json.loads((tmp_path / "out.json").read_text())
    assert set(value) == {"sequences", "prompt_logprobs", "topk_prompt_logprobs", "type"}
    assert len(value["sequences"]) == 2
    for sequence in value["sequences"]:
        assert set(sequence) == {"tokens", "logprobs", "stop_reason"}
        assert 1 <= len(sequence["tokens"]) == len(sequence["logprobs"]) <= 4


@pytest.mark.slow
def test_samples_are_printed_with_their_stop_reason_and_mean_logprob(served_engine: ServedEngine) -> None:
    done = tinkex("run", "--prompt", "The sea", "--max-tokens", "3", "-n", "2", server=served_engine)
    assert done.code == 0, done.err
    assert "Starting sampling..." in done.err
    rows = re.findall(r"^stop_reason=(length|stop) \| avg_logprob=(-\d+\.\d{4})$", done.out, re.MULTILINE)
    assert len(rows) == 2
    assert re.findall(r"^Sample (\d):$", done.out, re.MULTILINE) == ["1", "2"]
    piped = tinkex("run", "--prompt", "The sea", "--max-tokens", "3", "--json", server=served_engine)
    assert piped.json["type"] == "sample"


@pytest.mark.slow
def test_a_result_that_takes_too_long_is_an_error_that_names_the_option(served_engine: ServedEngine) -> None:
    options = ("--prompt", "The sea", "--max-tokens", "400", "-n", "32", "--timeout", "0.01")
    done = tinkex("run", *options, server=served_engine)
    assert done.code == 1
    assert "--timeout" in done.err or "timed out" in done.err.lower() or "did not respond" in done.err
