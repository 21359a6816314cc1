"""``tinkex chat`` in a real terminal and in a pipe, with a server and with the embedded engine."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.cli.terminal import Terminal, on_terminal
from tests.models import tiny_llama
from tests.servers import ServedEngine, serve
from tinkex.tokenizers import tokenizer_from_directory
from tinkex.tokenizers.conversation import end_of_turn

pytestmark = pytest.mark.slow

GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can write for long."""
    return tiny_llama(tmp_path_factory.mktemp("roomy") / "model", context=16_384)


@pytest.fixture(scope="module")
def roomy(roomy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    with serve(tmp_path_factory.mktemp("chat"), "--model", f"tiny/roomy={roomy_model}") as server:
        yield server


@pytest.fixture(scope="module")
def endless(roomy_model: Path) -> tuple[str, ...]:
    """Options with which an answer does not end by itself."""
    ends = end_of_turn(tokenizer_from_directory(roomy_model))
    biases = [option for token in ends for option in ("--logit-bias", f"{token}=-100")]
    return (*biases, "--max-tokens", "16000")


def env_of(server: ServedEngine) -> dict[str, str]:
    return {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}


def metric(server: ServedEngine, name: str) -> float:
    """The sum of a metric of the server."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def say(terminal: Terminal, text: str) -> str:
    """Types a message, and returns what is shown until the next prompt."""
    terminal.type(f"{text}\n")
    terminal.wait_for(f"{text}\r\n")
    return terminal.wait_for("\r\n> ").removesuffix("> ")


def test_a_conversation_in_a_terminal(served_engine: ServedEngine, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("mine")
    with on_terminal("chat", *GREEDY, env=env_of(served_engine), cwd=tmp_path) as terminal:
        assert "Chatting with tiny/llama. /help lists commands" in terminal.wait_for("> ")
        first = say(terminal, "Hello")
        assert first.strip()
        say(terminal, "And then?")
        assert "wrote 4 messages to one.json" in say(terminal, "/save one.json")
        assert "2 messages left" in say(terminal, "/undo")
        assert "system message set" in say(terminal, "/system Be brief.")
        assert "wrote 3 messages" in say(terminal, "/save two.json")
        assert "wrote 3 messages" in say(terminal, "/save " + str(tmp_path / "two.json"))
        assert "exists and was not written by this chat" in say(terminal, "/save other.txt")
        assert "no messages left" in say(terminal, "/clear")
        assert say(terminal, "Hello") != ""
        assert "read 4 messages" in say(terminal, "/load one.json")
        assert "there is no command /nonsense" in say(terminal, "/nonsense")
        assert "/compare NAME" in say(terminal, "/help")
        assert "tiny/llama" in say(terminal, "/model")
        assert "Error:" in say(terminal, "/model no/such-model")
        assert "tiny/llama is a base model" in say(terminal, "/compare")
        terminal.type("\x04")
        assert terminal.wait() == 0
    one, two = (json.loads((tmp_path / name).read_text())["messages"] for name in ("one.json", "two.json"))
    assert [message["role"] for message in one] == ["user", "assistant"] * 2
    assert one[0]["content"] == "Hello"
    assert first.replace("\r\n", "\n").startswith(one[1]["content"] + "\n(stopped after 6 tokens")
    assert (tmp_path / "other.txt").read_text() == "mine"
    assert two == [{"role": "system", "content": "Be brief."}, *one[:2]]
    again = tinkex("sample", "--file", "one.json", *GREEDY, server=served_engine, cwd=tmp_path)
    assert again.code == 0, again.err


def test_ctrl_c_stops_an_answer_here_and_on_the_server_and_not_the_program(
    roomy: ServedEngine, endless: tuple[str, ...], tmp_path: Path
) -> None:
    with on_terminal("chat", *endless, "--seed", "3", env=env_of(roomy), cwd=tmp_path) as terminal:
        terminal.wait_for("> ")
        before = metric(roomy, "tinkex_tokens_total")
        terminal.type("Tell me everything\n")
        terminal.wait_for("Tell me everything\r\n")
        terminal.wait_for_more(50)
        assert metric(roomy, "tinkex_sequences") == 1
        terminal.type("\x03")
        terminal.wait_for("(stopped; the answer so far is part of the conversation, /undo removes it)")
        terminal.wait_for("> ")
        deadline = time.monotonic() + 60
        while metric(roomy, "tinkex_sequences"):
            assert time.monotonic() < deadline
        assert metric(roomy, "tinkex_tokens_total") == before  # a cancelled sample is not counted
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-D or /quit quits)")
        terminal.wait_for("> ")
        assert "wrote 2 messages" in say(terminal, "/save stopped.json")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    question, answer = json.loads((tmp_path / "stopped.json").read_text())["messages"]
    assert question == {"role": "user", "content": "Tell me everything"}
    assert answer["content"]


def test_the_embedded_engine_answers_and_stops_too(
    roomy_model: Path, endless: tuple[str, ...], tmp_path: Path
) -> None:
    env = {"TINKEX_HOME": str(tmp_path / "home"), "TINKEX_MODELS": f"tiny/roomy={roomy_model}"}
    with on_terminal("chat", "--local", *endless, env=env, cwd=tmp_path) as terminal:
        assert "starting the engine in this process" in terminal.wait_for("> ")
        for _ in range(2):
            terminal.type("Tell me everything\n")
            terminal.wait_for("Tell me everything\r\n")
            terminal.wait_for_more(50)
            terminal.type("\x03")
            terminal.wait_for("(stopped; the answer so far")
            terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


@pytest.fixture(scope="module")
def trained(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that answers with control characters."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data.jsonl").write_text(
        json.dumps({"prompt": "Where?", "completion": "\x1b[2J\x07The sea."}) + "\n"
    )
    options = ("--rank", "4", "--steps", "15", "--learning-rate", "0.02", "--sample-tokens", "4", "--json")
    done = tinkex("train", "sft", "data.jsonl", *options, server=served_engine, cwd=folder)
    path: str = done.json["sampler_checkpoint"]
    return path


def test_a_checkpoint_is_compared_with_its_base_model_side_by_side(
    served_engine: ServedEngine, trained: str, tmp_path: Path
) -> None:
    command = ("chat", "--model-path", trained, *GREEDY[:2], "--max-tokens", "20")
    with on_terminal(*command, env=env_of(served_engine), cwd=tmp_path, term="xterm") as terminal:
        terminal.wait_for("> ")
        terminal.type("Where?\n")
        terminal.wait_for(r"\x1b[2J\x07The sea.")
        terminal.wait_for("> ")
        terminal.type("/compare\n")
        terminal.wait_for(f"comparing tiny/llama with {trained}; /compare ends it")
        terminal.wait_for("> ")
        terminal.type("/clear\n")
        terminal.wait_for("no messages left")
        terminal.wait_for("> ")
        terminal.type("Where?\n")
        terminal.wait_for("tiny/llama")
        terminal.wait_for("The sea.")
        terminal.wait_for("> ")
        terminal.type("/compare\n")
        terminal.wait_for(f"only {trained} answers now")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "\x1b[2J\x07" not in terminal.shown  # the model's control characters reach no terminal


def test_lines_of_a_pipe_are_messages(served_engine: ServedEngine, trained: str, tmp_path: Path) -> None:
    lines = "Where?\n\n/system Be brief.\n//where\n/save chat.json\n"
    options = ("chat", "--model-path", trained, *GREEDY[:2], "--max-tokens", "20")
    done = tinkex(*options, server=served_engine, stdin=lines, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("\x1b[2J\x07The sea.\n")  # a pipe gets the text unchanged
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[3]["content"] == "/where"
    both = tinkex(*options, "--compare", server=served_engine, stdin="Where?\n").out
    assert both.startswith("tiny/llama:\n")
    assert f"\n\n{trained}:\n\x1b[2J\x07The sea.\n" in both


def test_json_answers_are_lines_and_a_saved_conversation_continues(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": asked}))
    command = ("chat", "--file", "chat.json", *GREEDY, "--json")
    done = tinkex(*command, server=served_engine, stdin="And then?\n", cwd=tmp_path)
    assert done.err == ""
    first, second = (json.loads(line) for line in done.out.splitlines())
    sampled = tinkex(
        "sample", "--file", "chat.json", *GREEDY, "--json", server=served_engine, cwd=tmp_path
    ).json
    assert first["content"] == sampled["sequences"][0]["text"]
    assert first["num_prompt_tokens"] == len(sampled["prompt_tokens"])
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + first["num_tokens"]
    assert (first["role"], first["model"]) == ("assistant", "tiny/llama")


def test_a_full_context_says_what_to_do_and_the_chat_continues(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    long = "word " * 400
    piped = tinkex("chat", *GREEDY, server=served_engine, stdin=f"{long}\n", cwd=tmp_path)
    assert (piped.code, piped.out) == (1, "")
    assert "the context of tiny/llama holds 512" in piped.err
    assert "make room with /undo or /clear" in piped.err
    (tmp_path / "long.json").write_text(json.dumps({"messages": [{"role": "user", "content": long}]}))
    with on_terminal("chat", *GREEDY, env=env_of(served_engine), cwd=tmp_path) as terminal:
        terminal.wait_for("> ")
        assert "this message was not sent" in say(terminal, "/load long.json")
        assert "Error" not in say(terminal, "Hello")
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_an_answer_that_fills_the_context_says_so(
    served_engine: ServedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    ends = end_of_turn(tokenizer_from_directory(tiny_model))
    biases = [option for token in ends for option in ("--logit-bias", f"{token}=-100")]
    done = tinkex("chat", *biases, "--max-tokens", "600", server=served_engine, stdin="Hello\n", cwd=tmp_path)
    assert "(the context of tiny/llama is full; make room with /undo or /clear" in done.err
    short = tinkex("chat", *biases, "--max-tokens", "5", server=served_engine, stdin="Hello\n", cwd=tmp_path)
    assert "(stopped after 5 tokens; --max-tokens allows more)" in short.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "a", "--model-path", "tinker://r/weights/a"), "not both"),
        (("--compare",), "--compare needs a checkpoint"),
        (("--stop", "a", "--stop-token", "3"), "not both"),
        (("--file", "text"), "holds no conversation"),
        (("--temperature", "-1"), "temperature"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_contradicting_options_are_rejected(
    arguments: tuple[str, ...], message: str, served_engine: ServedEngine, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("The sea")
    done = tinkex("chat", *arguments, server=served_engine, cwd=tmp_path)
    assert done.code in {1, 2}
    assert message in done.err
