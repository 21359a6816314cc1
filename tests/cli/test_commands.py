"""Commands against a served engine: tables, JSON output and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.servers import ServedEngine
from tinkex.cli.invocation import INTERACTIVE_RETRIES, Invocation
from tinkex.errors import APIConnectionError

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def saved(served_engine: ServedEngine) -> str:
    """A training checkpoint on the server."""
    done = tinkex(
        "checkpoint", "save", "--base-model", MODEL, "--name", "first", "--kind", "training", "--rank", "4",
        "--seed", "1", "--json", server=served_engine,
    )  # fmt: skip
    path: str = done.json["path"]
    return path


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").split("/")[0]


@pytest.mark.slow
def test_models_are_listed_filtered_and_described(served_engine: ServedEngine) -> None:
    listed = tinkex("model", "list", "--json", server=served_engine, process=True).json
    assert [model["model_name"] for model in listed["models"]] == [MODEL]
    table = tinkex("model", "list", "LLA", server=served_engine).out
    assert re.search(r"Model\s+Max Context\s+Trainable\s+Sampleable", table)
    assert re.search(r"tiny/llama\s+512\s+Yes\s+Yes", table)
    missing = tinkex("model", "list", "gpt", server=served_engine)
    assert (missing.code, missing.out) == (1, "")
    assert MODEL in missing.err
    assert tinkex("model", "info", MODEL, "--json", server=served_engine).json["max_context_length"] == 512


def test_a_model_directory_is_described_and_pulled_from_a_directory(
    served_engine: ServedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    local = tinkex("model", "info", str(tiny_model), "--json", server=served_engine).json["local"]
    assert local["architecture"] == "llama"
    assert local["size_bytes"] > 100_000
    pulled = tinkex("model", "pull", str(tiny_model), "--json", home=tmp_path).json
    assert pulled["directory"] == str(tiny_model)


def test_a_corrupt_model_directory_is_an_error_that_names_the_file(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        done = tinkex("model", "info", str(tmp_path), server=served_engine)
        assert (done.code, done.out) == (1, "")
        assert str(tmp_path / "config.json") in done.err
        assert "corrupt" in done.err


def test_invalid_ports_and_threads_are_usage_errors(tmp_path: Path) -> None:
    for command in (("serve", "--port", "x"), ("serve", "--threads", "-1"), ("doctor", "--port", "99999")):
        done = tinkex(*command, home=tmp_path)
        assert (done.code, done.out) == (2, ""), command


def test_runs_are_listed_with_selected_columns_and_described(served_engine: ServedEngine, saved: str) -> None:
    run_id = run_of(saved)
    listed = tinkex("run", "list", "--limit", "0", "--json", server=served_engine).json["runs"]
    assert run_id in [run["training_run_id"] for run in listed]
    one = tinkex("run", "list", "--limit", "1", "-c", "id,status,checkpoint", server=served_engine).out
    assert re.search(r"Run ID\s+Status\s+Last Checkpoint", one)
    info = tinkex("run", "info", run_id, server=served_engine).out
    assert re.search(r"LoRA\s+Rank 4", info)
    assert saved in info
    wrong = tinkex("run", "list", "-c", "colour", server=served_engine)
    assert wrong.code == 2
    assert "checkpoint_time" in wrong.err
    unknown = tinkex("run", "info", "nobody:train:0", server=served_engine)
    assert (unknown.code, unknown.out) == (1, "")


@pytest.mark.slow
def test_a_saved_checkpoint_has_a_default_name_and_is_described_in_a_file(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "saved.json"
    arguments = ("checkpoint", "save", "--base-model", MODEL, "--rank", "2", "-o", str(file))
    shown = tinkex(*arguments, "--format", "json", server=served_engine).json
    assert shown == json.loads(file.read_text())
    assert shown["path"].endswith("/sampler_weights/checkpoint-llama")
    assert (shown["base_model"], shown["kind"], shown["model_id"]) == (
        MODEL,
        "sampler",
        run_of(shown["path"]),
    )
    listed = tinkex("checkpoint", "list", "--run-id", shown["model_id"], "--json", server=served_engine).json
    assert (listed["total"], listed["shown"]) == (1, 1)


def test_checkpoints_are_listed_described_published_and_given_a_ttl(
    served_engine: ServedEngine, saved: str
) -> None:
    listed = tinkex("-f", "json", "checkpoint", "list", "--run-id", run_of(saved), server=served_engine).json
    assert listed["run_id"] == run_of(saved)
    assert [one["tinker_path"] for one in listed["checkpoints"]] == [saved]
    table = tinkex("checkpoint", "list", "--limit", "0", server=served_engine).out
    assert re.search(
        r"weights/first\s+training\s+tiny/llama\s+\d+\.\d KB\s+No\s+(?:just now|\d+ minutes? ago)\s+Never\s+tinker://",
        table,
    )
    assert tinkex("checkpoint", "publish", saved, server=served_engine).out == f"Published {saved}.\n"
    assert tinkex("checkpoint", "set-ttl", saved, "--ttl", "7200", "-q", server=served_engine).out == ""
    info = tinkex("checkpoint", "info", saved, "--json", server=served_engine).json
    assert (info["public"], info["lora_rank"], info["base_model"]) == (True, 4, MODEL)
    assert info["expires_at"]
    tinkex("checkpoint", "unpublish", saved, server=served_engine)
    tinkex("checkpoint", "set-ttl", saved, "--remove", server=served_engine)
    info = tinkex("checkpoint", "info", saved, "--json", server=served_engine).json
    assert (info["public"], info["expires_at"]) == (False, None)
    assert tinkex("checkpoint", "set-ttl", saved, server=served_engine).code == 2


def test_delete_asks_for_confirmation_and_reports_each_failure(
    served_engine: ServedEngine, saved: str
) -> None:
    paths = [
        tinkex("checkpoint", "save", "--model-path", saved, "--name", name, "--json", server=served_engine).json["path"]
        for name in ("one", "two")
    ]  # fmt: skip
    declined = tinkex("checkpoint", "delete", paths[0], stdin="n\n", server=served_engine)
    assert (declined.code, declined.out) == (0, "Nothing was deleted.\n")
    assert "Delete 1 checkpoint permanently?" in declined.err
    # Without an answer, as in a script, the command must not look as if it had deleted something.
    unanswered = tinkex("checkpoint", "delete", paths[0], server=served_engine)
    assert (unanswered.code, unanswered.out) == (1, "")
    assert "--yes" in unanswered.err
    missing = paths[0].replace("one", "none")
    done = tinkex("checkpoint", "delete", paths[0], missing, "--yes", "--json", server=served_engine)
    assert done.code == 1
    result = json.loads(done.out)
    assert result["deleted_count"] == 1
    assert [failure["tinker_path"] for failure in result["failed"]] == [missing]
    assert "list_user_checkpoints" not in result["failed"][0]["error"], "a command advises commands"
    assert missing in done.err
    run_id = run_of(paths[1])
    filtered = tinkex(
        "checkpoint", "delete", "--run-id", run_id, "--type", "training", "-y", server=served_engine
    )
    assert "no matching checkpoint" in filtered.out
    early = tinkex(
        "checkpoint",
        "delete",
        "--run-id",
        run_id,
        "--before",
        "2020-01-01",
        "-y",
        "--json",
        server=served_engine,
    )
    assert early.json["deleted_count"] == 0
    assert tinkex("checkpoint", "delete", "--run-id", run_id, stdin="y\n", server=served_engine).code == 0
    assert (
        tinkex("checkpoint", "list", "--run-id", run_id, "--json", server=served_engine).json["checkpoints"]
        == []
    )
    assert tinkex("checkpoint", "delete", server=served_engine).code == 2
    assert tinkex("checkpoint", "delete", saved, "--type", "sampler", server=served_engine).code == 2


def test_sessions_are_listed_described_and_their_timeline_exported(
    served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    session_id = run_of(saved).split(":")[0]
    assert (
        session_id
        in tinkex("session", "list", "--limit", "0", "--json", server=served_engine).json["sessions"]
    )
    info = tinkex("session", "info", session_id, "--json", server=served_engine).json
    assert info["training_run_ids"] == [run_of(saved)]
    done = tinkex("session", "export-trace", session_id, "--json", server=served_engine, cwd=tmp_path)
    file = Path(done.json["destination"])
    assert file == tmp_path / f"{session_id}.pftrace"
    assert json.loads(file.read_text())["otherData"]["session_id"] == session_id
    url = tinkex("session", "export-trace", session_id, "--url-only", server=served_engine).out.strip()
    assert url.startswith(served_engine.url)


def test_usage_and_storage_are_shown_and_written_as_csv(
    served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    window = ("2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z")
    usage = tinkex("billing", "usage", *window, "--json", server=served_engine)
    if usage.code == 0:
        assert set(usage.json) == {"data", "sessions", "cost_data_through"}
        csv = tinkex("billing", "usage", *window, "--csv", "-", server=served_engine).out
        assert csv.splitlines()[0].startswith("bucket_start,bucket_end")
    assert tinkex("billing", "usage", "yesterday", "today", server=served_engine).code == 2
    file = tmp_path / "storage.csv"
    tinkex("billing", "checkpoint-storage", "--csv", str(file), server=served_engine)
    assert "size_bytes" in file.read_text().splitlines()[0]
    assert tinkex("billing", "checkpoint-storage", "--json", server=served_engine).json["data"]


@pytest.mark.slow
def test_prompts_come_as_argument_file_or_stdin(served_engine: ServedEngine, tmp_path: Path) -> None:
    common = ("--max-tokens", "4", "--temperature", "0", "--json")
    chat = tinkex("sample", "The sea", *common, server=served_engine, process=True).json
    assert len(chat["sequences"][0]["tokens"]) <= 4
    raw = tinkex("sample", "--raw", *common, stdin="The sea\n", server=served_engine).json
    assert len(raw["prompt_tokens"]) < len(chat["prompt_tokens"])
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"tokens": raw["prompt_tokens"]}))
    same = tinkex("sample", "--file", str(file), *common, server=served_engine).json
    assert same["sequences"][0]["tokens"] == raw["sequences"][0]["tokens"]
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "The sea"}]}))
    assert tinkex("sample", "--file", str(file), *common, server=served_engine).json == chat
    assert tinkex("sample", server=served_engine).code == 2
    assert tinkex("sample", "a", "--file", str(file), server=served_engine).code == 2


def test_an_invalid_prompt_file_is_an_error_that_names_it(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.json"
    wrong = ({"messages": "hi"}, {"messages": []}, {"messages": [1]}, {"tokens": []}, {"tokens": ["a"]},
             {"tokens": [1], "messages": []})  # fmt: skip
    for value in wrong:
        file.write_text(json.dumps(value))
        done = tinkex("sample", "--file", str(file), "--max-tokens", "1", server=served_engine)
        assert (done.code, done.out) == (1, ""), value
        assert str(file) in done.err
    file.write_text("[" * 5000)
    deep = tinkex("sample", "--file", str(file), "--max-tokens", "1", "--raw", server=served_engine)
    assert "context" in deep.err, "the file is used as a long text"


def test_logprob_options_are_rejected_without_json(served_engine: ServedEngine) -> None:
    for option in (("--prompt-logprobs",), ("--topk-prompt-logprobs", "2"), ("--topk-logprobs", "2")):
        done = tinkex("sample", "x", *option, server=served_engine)
        assert (done.code, done.out) == (2, "")
        assert "--json" in done.err


def test_the_streamed_text_equals_the_sampled_text(served_engine: ServedEngine) -> None:
    common = ("sample", "The sea", "--max-tokens", "12", "--seed", "3")
    whole = tinkex(*common, "--json", server=served_engine).json["sequences"][0]["text"]
    streamed = tinkex(*common, server=served_engine)
    assert (streamed.code, streamed.out) == (0, whole + "\n")


def test_every_sampling_option_is_honoured(served_engine: ServedEngine, saved: str, tmp_path: Path) -> None:
    several = tinkex(
        "sample", "Once upon", "--raw", "-n", "3", "--max-tokens", "5", "--seed", "7", "--top-k", "20", "--top-p",
        "0.9", "--prompt-logprobs", "--topk-prompt-logprobs", "2", "--topk-logprobs", "2", "--json",
        server=served_engine,
    ).json  # fmt: skip
    assert len(several["sequences"]) == 3
    assert len({tuple(one["tokens"]) for one in several["sequences"]}) > 1
    assert several["prompt_logprobs"][0] is None
    assert len(several["topk_prompt_logprobs"][1]) == 2
    assert len(several["sequences"][0]["topk_logprobs"][0]) == 2
    first = several["sequences"][0]["tokens"][0]
    stopped = tinkex(
        "sample", "Once upon", "--raw", "--max-tokens", "5", "--temperature", "0", "--stop-token", str(first), "--json",
        server=served_engine,
    ).json  # fmt: skip
    assert stopped["sequences"]
    text = tinkex(
        "sample", "Once upon", "-n", "2", "--max-tokens", "3", "--system", "Be brief.", server=served_engine
    )
    assert re.search(r"Sample 1 \(\w+\):.*Sample 2", text.out, re.DOTALL)
    target = tmp_path / "answer.txt"
    quiet = tinkex(
        "sample", "x", "--model-path", saved, "--max-tokens", "2", "-o", str(target), server=served_engine
    )
    assert (quiet.code, quiet.out) == (0, "")
    assert target.exists()
    assert tinkex("sample", "x", "--temperature", "-1", server=served_engine).code == 2
    assert tinkex("sample", "x", "--top-p", "2", server=served_engine).code == 2


def test_samples_of_a_schema_a_regex_and_a_grammar(served_engine: ServedEngine, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text('{"enum": [true, {"a": [1]}]}', encoding="utf-8")
    grammar.write_text('start: /[0-9]/ "+" /[0-9]/', encoding="utf-8")
    common = ("sample", "A sum", "--raw", "--max-tokens", "60", "--seed", "1")
    done = tinkex(*common, "--json-schema", str(schema), server=served_engine)
    assert json.loads(done.out) in (True, {"a": [1]}), done.err
    assert re.fullmatch(
        r"[0-9]\+[0-9]\n", tinkex(*common, "--grammar", str(grammar), server=served_engine).out
    )
    matched = tinkex(*common, "--regex", "a{3}", "--json", server=served_engine).json["sequences"][0]
    assert (matched["text"], matched["stop_reason"]) == ("aaa", "stop")


def test_min_p_penalties_and_biases_reach_the_server(served_engine: ServedEngine) -> None:
    common = ("sample", "A", "--raw", "--max-tokens", "5", "--stop-token", "0", "--json")
    greedy, close = (
        tinkex(*common, *options, server=served_engine).json["sequences"][0]["tokens"]
        for options in (("--temperature", "0"), ("--min-p", "1"))
    )
    assert greedy == close
    biased = tinkex(*common, "--logit-bias", "70=100", "--logit-bias", "71=-100", server=served_engine)
    assert biased.json["sequences"][0]["tokens"] == [70] * 5
    penalised = tinkex(
        *common, "--temperature", "0", "--presence-penalty", "2", "--frequency-penalty", "2", "--repetition-penalty", "9",
        server=served_engine,
    )  # fmt: skip
    assert len(set(penalised.json["sequences"][0]["tokens"])) == 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--min-p", "2"), "min_p"),
        (("--logit-bias", "word=1"), "word=1"),
        (("--regex", "a", "--grammar", __file__), "--regex and --grammar"),
        (("--json-schema", __file__), "not JSON"),
        (("--regex", "(a"), "unclosed"),
    ],
)
def test_a_sampling_option_that_cannot_work_is_an_error_that_names_it(
    served_engine: ServedEngine, options: tuple[str, ...], named: str
) -> None:
    done = tinkex("sample", "x", *options, server=served_engine)
    assert done.code in {1, 2}
    assert named in done.err
    assert done.out == ""


def test_an_unreachable_server_is_an_error_that_names_its_url(tmp_path: Path) -> None:
    done = tinkex(
        "run", "list", "--base-url", "http://127.0.0.1:9", "--api-key", "tml-x", TINKEX_MAX_RETRIES="0", home=tmp_path
    )  # fmt: skip
    assert (done.code, done.out) == (1, "")
    assert "http://127.0.0.1:9" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["download", "merge", "push-hf"])
def test_checkpoint_commands_fail_fast_if_the_server_is_unreachable(tmp_path: Path, command: str) -> None:
    more = ("out",) if command == "merge" else ("--hf-token", "hf_x") if command == "push-hf" else ()
    done = tinkex(
        "checkpoint", command, "tinker://a:train:0/weights/b", *more, "--base-url", "http://127.0.0.1:9", "--api-key",
        "tml-x", home=tmp_path, cwd=tmp_path, process=True,
    )  # fmt: skip
    assert (done.code, done.out) == (1, "")
    assert "no reply from http://127.0.0.1:9" in done.err
    assert [path for path in tmp_path.iterdir() if path.name != ".tinkex"] == []


def test_interactive_commands_retry_a_few_times_and_training_retries_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TINKEX_MAX_RETRIES", raising=False)
    invocation = Invocation(base_url="http://127.0.0.1:9", api_key="tml-x")
    assert invocation.config(max_retries=INTERACTIVE_RETRIES).max_retries == INTERACTIVE_RETRIES
    assert invocation.config().max_retries is None
    monkeypatch.setenv("TINKEX_MAX_RETRIES", "0")
    assert invocation.config(max_retries=INTERACTIVE_RETRIES).max_retries == 0
    with pytest.raises(APIConnectionError):
        invocation.rest().get_health().result(30)
    try:
        with pytest.raises(APIConnectionError):
            invocation.service()
    finally:
        invocation.restore()


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "hint"),
    [
        (("run", "info", "nope", "--json"), "NotFoundError", 1, "tinkex run list"),
        (("run", "list", "--json", "--api-key", "tml-wrong"), "AuthenticationError", 1, "tinkex auth login"),
        (("-f", "json", "run", "info"), "UsageError", 2, "tinkex run info -h"),
        (("sample", "--wrong", "--json"), "UsageError", 2, "tinkex sample -h"),
        (("--format=json", "smaple"), "UsageError", 2, "tinkex -h"),
        (("run", "info", "--json", "--base-url", "nowhere", "x"), "ConfigError", 1, None),
    ],
)
def test_with_json_an_error_is_one_object_on_stderr(
    served_engine: ServedEngine, arguments: tuple[str, ...], kind: str, code: int, hint: str | None
) -> None:
    done = tinkex(*arguments, server=served_engine)
    assert (done.code, done.out) == (code, "")
    failure = json.loads(done.err)
    assert (failure["type"], failure["exit_code"]) == (kind, code)
    assert failure["message"]
    assert hint is None or hint in failure["hint"]


def test_without_json_an_error_is_one_line_and_a_hint(served_engine: ServedEngine) -> None:
    done = tinkex("run", "info", "nope", server=served_engine)
    message, hint = done.err.splitlines()
    assert message.startswith("Error: there is no training run 'nope'")
    assert hint.startswith("Hint: ")
    assert "tinkex run list" in hint


def test_known_models_are_listed_without_a_server(tiny_model: Path, tmp_path: Path) -> None:
    models = tmp_path / ".tinkex" / "models"
    shutil.copytree(tiny_model, models / "HuggingFaceTB--SmolLM2-135M-Instruct")
    shutil.copytree(tiny_model, models / "me--mine")
    (models / "half").mkdir()
    env = {"TINKEX_MODELS": f"my/other={tiny_model}"}
    listed = tinkex("model", "list", "--known", "--json", home=tmp_path, **env).json["models"]
    here = {one["model"]: one["directory"] for one in listed if one["directory"]}
    assert here == {
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(models / "HuggingFaceTB--SmolLM2-135M-Instruct"),
        "me/mine": str(models / "me--mine"),
        "my/other": str(tiny_model),
    }
    assert [one["model"] for one in listed if one["tested"]] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert {one["licence"] for one in listed if one["model"] == "me/mine"} == {None}
    table = tinkex("model", "list", "--known", "135m", home=tmp_path).out
    for words in ("yes", "135 M", "256.6 MB", "513.1 MB", "Apache-2.0", "tests"):
        assert words in table
    missing = tinkex("model", "list", "--known", "gpt", home=tmp_path)
    assert missing.code != 0
    assert "tinkex model pull NAME" in missing.err


@pytest.mark.slow
def test_a_model_is_exported_as_gguf_and_read_again(tiny_model: Path, tmp_path: Path) -> None:
    wrote = tinkex("model", "export", str(tiny_model), "tiny.gguf", home=tmp_path, cwd=tmp_path, process=True)
    assert wrote.out.startswith("Wrote tiny.gguf (")
    assert "F16). Run it with: llama-cli -m tiny.gguf" in wrote.out
    assert wrote.err == f"opening {tiny_model}\nreading the tokenizer\nmerging weights\n"
    again = tinkex("model", "pull", "tiny.gguf", "--json", home=tmp_path, cwd=tmp_path, process=True).json
    assert (Path(again["directory"]) / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model", "export", "{model}", "taken.gguf"), "exists already; choose another name"),
        (("model", "export", "{model}", "new"), "ends in .gguf, such as new.gguf"),
        (("model", "export", "{model}", "new.gguf", "--gguf", "q4_0"), "'q4_0' is not one of 'f16', 'q8_0'"),
        (("checkpoint", "merge", "adapter", "new.gguf"), "add --gguf f16 or --gguf q8_0"),
        (("checkpoint", "merge", "adapter", "new", "--gguf", "f16"), "ends in .gguf, such as new.gguf"),
        (
            ("checkpoint", "merge", "adapter", "new.gguf", "--gguf", "f16", "--dtype", "float16"),
            "--dtype is for model directories",
        ),
    ],
)  # fmt: skip
def test_an_export_that_cannot_be_says_what_to_type(
    tiny_model: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "taken.gguf").touch()
    typed = [argument.format(model=tiny_model) for argument in arguments]
    failed = tinkex(*typed, home=tmp_path, cwd=tmp_path)
    assert failed.code != 0
    assert words in failed.err


@pytest.mark.slow
def test_every_checkpoint_command_works_on_the_embedded_engine(tiny_model: Path, tmp_path: Path) -> None:
    models = f"tiny={tiny_model}"
    made = tinkex(
        "checkpoint", "save", "--base-model", "tiny", "--name", "a", "--kind", "training", "--local", "--json",
        home=tmp_path, process=True, TINKEX_MODELS=models,
    ).json  # fmt: skip
    listed = tinkex(
        "--local", "--json", "checkpoint", "list", home=tmp_path, process=True, TINKEX_MODELS=models
    ).json
    assert [one["tinker_path"] for one in listed["checkpoints"]] == [made["path"]]
    got = tinkex(
        "checkpoint", "download", made["path"], "--base-url", "local", "--json",
        home=tmp_path, cwd=tmp_path, process=True, TINKEX_MODELS=models,
    ).json  # fmt: skip
    assert (Path(got["destination"]) / "adapter_model.safetensors").is_file()
    merged = tinkex(
        "checkpoint", "merge", made["path"], "merged", "--dtype", "float32", "--local", "--json",
        home=tmp_path, cwd=tmp_path, process=True, TINKEX_MODELS=models,
    ).json  # fmt: skip
    assert (tmp_path / merged["destination"] / "config.json").is_file()
    exported = tinkex(
        "checkpoint", "merge", made["path"], "merged.gguf", "--gguf", "q8_0", "--local", "--json",
        home=tmp_path, cwd=tmp_path, process=True, TINKEX_MODELS=models,
    ).json  # fmt: skip
    assert (tmp_path / exported["destination"]).stat().st_size == exported["size_bytes"]
    uploaded = tinkex(
        "checkpoint", "upload", got["destination"], "--local", "--json",
        home=tmp_path, process=True, TINKEX_MODELS=models,
    )  # fmt: skip
    assert "experimental" not in uploaded.err
    imported = uploaded.json
    for more, stderr in (
        ((), "starting the engine in this process\nloading tiny-llama\n"),
        (("--quiet",), ""),
    ):
        text = tinkex(
            "sample", "The sea", "--model-path", imported["checkpoint_path"], "--max-tokens", "2", "--local", *more,
            home=tmp_path, process=True, TINKEX_MODELS=models,
        )  # fmt: skip
        assert (text.code, text.err) == (0, stderr)


@pytest.mark.slow
def test_checkpoints_are_uploaded_and_searched(
    served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    got = tinkex("checkpoint", "download", saved, "-o", str(tmp_path), "--json", server=served_engine).json
    table = tinkex(
        "checkpoint", "upload", got["destination"], "--project", "cli-uploads", server=served_engine
    )
    assert table.code == 0, table.err
    path = re.search(r"tinker://\S+/external_weights/uploaded", table.out)
    search = ("checkpoint", "search", "--project", "cli-uploads", "--base-model", MODEL, "--type", "external")
    found = tinkex(*search, "--json", server=served_engine).json["checkpoints"]
    assert [(one["tinker_path"], one["base_model"]) for one in found] == [(path[0], MODEL)]
    assert path[0] in tinkex(*search, "--limit", "0", server=served_engine).out
    assert "0 checkpoints" in tinkex(*search, "--metadata", "a=b", server=served_engine).out
    others = tinkex("checkpoint", "search", "--owner", "nobody", "--json", server=served_engine)
    assert others.json == {"checkpoints": []}
    for wrong in (("--metadata", "a"), ("--owner", "x", "--accessible"), ("--limit", "-1")):
        assert tinkex("checkpoint", "search", *wrong, server=served_engine).code == 2
    unknown = tinkex("checkpoint", "search", "--project", "of-nobody", server=served_engine)
    assert (unknown.code, "of-nobody" in unknown.err) == (1, True)
    nothing = tinkex("checkpoint", "upload", str(tmp_path), server=served_engine)
    assert (nothing.code, "is not a PEFT adapter" in nothing.err) == (1, True)


@pytest.mark.slow
def test_ctrl_c_at_a_confirmation_aborts_the_command(served_engine: ServedEngine, saved: str) -> None:
    environment = {**os.environ, "TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "checkpoint", "delete", saved],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stderr is not None
    prompt = b""
    while b"[y/N]" not in prompt:
        byte = process.stderr.read(1)
        assert byte, prompt
        prompt += byte
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Interrupted." in err
    assert b"Traceback" not in err
    assert tinkex("checkpoint", "info", saved, server=served_engine).code == 0
