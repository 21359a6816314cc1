"""Every example runs in its own process and home directory, and prints what its docstring describes.

They run on a tiny model with random weights: its text is meaningless, but training, snapshots and recovery are real.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tinkex.testing.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTED_IN_DOCS = {"quickstart"}  # runs on the real model, in tests/docs
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py") if file.stem not in TESTED_IN_DOCS)
TINY = "tiny/model"
KIMI = "moonshotai/Kimi-K2-Thinking"
MAX_LINES = 96

Check = Callable[[str], None]
CHECKS: dict[str, Check] = {}
SETTINGS: dict[str, dict[str, str]] = {
    "kimi_sampling": {"TINKEX_MODELS": f"{KIMI}={{model}}"},
    "tokenizer_override": {"TOKENIZER": "{model}"},
}
"""Environment variables of an example besides the model; ``{model}`` is the tiny model's directory."""


def check(function: Check) -> Check:
    """Registers a check of the output of the example with the function's name."""
    CHECKS[function.__name__] = function
    return function


def numbers(pattern: str, text: str) -> list[float]:
    """Returns every number that the pattern's group matches."""
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


def falls(values: list[float], count: int) -> bool:
    return len(values) == count and all(later < earlier for earlier, later in pairwise(values))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def environment(name: str, model: Path, home: Path) -> dict[str, str]:
    """Returns the user's environment without their settings."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "TINKEX_", "HF_"))
    }
    own = {key: value.replace("{model}", str(model)) for key, value in SETTINGS.get(name, {}).items()}
    return {
        **kept,
        "HOME": str(home),
        "TINKEX_HOME": str(home / "tinkex"),
        "TINKEX_DATA_DIR": str(home / "data"),
        "TINKEX_MODELS": f"{TINY}={model},tiny/other={model}",  # an example chooses among several
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "300",
        "TINKEX_TOKENIZERS": "light",  # the import of the other kind takes seconds
        **own,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_prints_what_it_describes(name: str, tiny: Path, tmp_path: Path) -> None:
    assert name in CHECKS, f"examples/{name}.py has no check of its output"
    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:tinkex", str(EXAMPLES / f"{name}.py")],
        env=environment(name, tiny, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    CHECKS[name](run.stdout)


def test_every_check_has_its_example() -> None:
    assert sorted(CHECKS) == NAMES


@pytest.mark.parametrize("name", sorted({*NAMES, *TESTED_IN_DOCS}))
def test_an_example_is_short_and_describes_its_output(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= MAX_LINES
    assert "\n\nYou will see" in docstring


def test_the_list_of_examples_is_current() -> None:
    script = ROOT / "scripts" / "generate-examples-readme"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- checks of the output ----


@check
def sampling_basic(out: str) -> None:
    assert re.search(rf"prompt for {TINY}, \d+ tokens:\n.*user\nName a fruit\..*\n.*assistant\n", out)
    assert (
        len(
            re.findall(
                r"^answer \d \((?:length|stop), -\d+\.\d\d nats per token\):\n  ['\"]", out, re.MULTILINE
            )
        )
        == 3
    )


@check
def sampling_stream(out: str) -> None:
    assert re.search(r"(?s).+\n\[\d+ tokens, streamed; stop reason (length|stop)\]", out)
    assert "[stopped after 5 tokens:" in out
    assert "[on the server: the request was cancelled by the client.]" in out


@check
def capabilities_and_logprobs(out: str) -> None:
    assert "health: ok" in out
    assert f"model:  {TINY} (llama), context of 256 tokens" in out
    assert len(numbers(r"(?m)^  '.' +(-\d+\.\d+)$", out)) == len("The capital of France is Paris") - 1
    assert numbers(r"perplexity ([\d.]+)", out)[0] > 1
    best = numbers(r"instead of 's': .* (-[\d.]+)", out)
    assert len(best) == 3
    assert best == sorted(best, reverse=True)


@check
def circuit_breaker(out: str) -> None:
    assert out.count("ada, capabilities: status 500") == 3
    assert numbers(r"ada, capabilities: not sent, next try in ([\d.]+) s", out)[0] > 0
    assert "ada, health: ok" in out
    assert "ben, capabilities: status 500" in out
    assert "state for ada: open" in out
    assert "state for ben: closed" in out
    assert re.findall(r"event: get_server_capabilities is (\w+)", out) == ["open", "half_open", "closed"]
    assert out.count("ada, capabilities: ok") == 1
    assert "own breaker: open\nown breaker after reset: 42" in out


@check
def training_loop(out: str) -> None:
    assert falls(numbers(r"step \d/8  loss per token ([\d.]+)  \d+\.\d\d s", out), 8)
    assert re.search(r"saved tinker://\S+/sampler_weights/mars", out)
    base, adapter = re.findall(r"(?m)^(?:base model|adapter): '.*' → (.*)$", out)
    assert base != adapter


@check
def forward_inference(out: str) -> None:
    assert out.count("float32 (22,)") == 3
    statistics = re.findall(r"    mean (-[\d.]+)  min (-[\d.]+)  max (-[\d.]+)", out)
    assert len(statistics) == 3
    assert all(float(low) < float(mean) < float(high) for mean, low, high in statistics)
    loss, summed = numbers(r"loss:sum ([\d.]+)", out) + numbers(r"from the logprobs ([\d.]+)", out)
    assert loss == pytest.approx(summed, rel=1e-5)
    assert "unchanged: True" in out


@check
def custom_loss_training(out: str) -> None:
    client = numbers(r"client +step \d  loss ([\d.]+)", out)
    server = numbers(r"server +step \d  loss ([\d.]+)", out)
    assert falls(client, 4)
    assert server == pytest.approx(client, rel=1e-4)
    assert "custom/focal:sum" in out


@check
def adam_and_chunking(out: str) -> None:
    assert "1025 examples in 2 requests" in out
    assert "one output with 1025 rows" in out
    assert falls(numbers(r"loss per example (?:after one step )?([\d.]+)", out), 2)
    assert numbers(r"  grad_l2:mean ([\d.]+)", out) == [1.0]


@check
def regularizers_offline(out: str) -> None:
    rows = re.findall(r"(?m)^([a-z0-9_]+) +-?[\d.]+ +-?[\d.]+ +[\d.]+$", out)
    assert rows == [
        "l1",
        "l2",
        "elastic_net",
        "entropy",
        "kl_divergence",
        "consistency",
        "orthogonality",
        "gradient_penalty",
        "remote_penalty",
    ]
    total, base, added = numbers(r"(?:loss|=|\+) ([\d.]+)", out)
    assert total == pytest.approx(base + added, abs=2e-4)
    assert "rejected: the regularizer 'constant'" in out


@check
def regularizers_in_training(out: str) -> None:
    without_kl, with_kl = numbers(r"logprob increased by ([\d.]+) nats", out)
    assert 0 < with_kl < without_kl
    steps = re.findall(r"loss +([\d.]+) = reward +([\d.]+) \+ KL ([\d.]+) \+ entropy (-?[\d.]+)", out)
    assert len(steps) >= 4
    for loss, reward, kl, entropy in steps:
        assert float(loss) == pytest.approx(float(reward) + float(kl) + float(entropy), abs=2e-3)


@check
def recovery_resilient_loop(out: str) -> None:
    steps = re.findall(r"step +(\d+)  loss +([\d.]+)  on train:(\d)", out)
    first = {step: loss for step, loss, run in steps if run == "0"}
    second = {step: loss for step, loss, run in steps if run == "1"}
    assert [*first] == [str(n) for n in range(6)]
    assert [*second] == [str(n) for n in range(4, 12)]
    assert (first["4"], first["5"]) == (second["4"], second["5"])
    assert "12 batches trained" in out


@check
def recovery_monitor(out: str) -> None:
    early, later = numbers(r"saved \S+ at loss ([\d.]+)", out)
    saved, after = numbers(r"loss ([\d.]+) as saved, ", out) + numbers(r"([\d.]+) two steps later", out)
    assert after < saved == later < early
    assert re.search(r"^\S+:train:0: corrupted True$", out, re.MULTILINE)
    assert re.search(r"^resumed as \S+:train:1, because the old run was corrupted$", out, re.MULTILINE)
    assert re.search(r"^from tinker://\S+:train:0/weights/later$", out, re.MULTILINE)
    assert re.search(r"^saved tinker://\S+:train:1/weights/recovered$", out, re.MULTILINE)


@check
def retries_and_errors(out: str) -> None:
    assert re.findall(r"get_server_capabilities, attempt (\d): (.*)", out) == [("1", "503"), ("2", "503")]
    assert out.count("retry in 0.02 s: Error code: 503") == 2
    assert "models: ['toy']" in out
    assert out.count("get_training_run, attempt") == 1
    assert "PermissionDeniedError (403), retryable: False" in out
    assert len(re.findall(r"retry in 0\.\d\d s: RequestFailedError: the worker was lost", out)) == 2
    assert "saved tinker://run-1/weights/a" in out
    assert "ValueError: model_path starts with tinker://" in out
    assert "Captured: [{'error_type': 'PermissionDeniedError', 'status_code': 403}]" in out


@check
def client_metrics(out: str) -> None:
    assert "20 samples, " in out
    ((count, failed, *durations),) = re.findall(
        r"(?m)^asample +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", out
    )
    assert (count, failed) == ("20", "0")
    p50, p95, longest = map(float, durations)
    assert 0 < p50 <= p95 <= longest
    assert "# TYPE tinkex_" in out
    assert numbers(r"(?m)^create_session +(\d+) +0 ", out) == [1]


@check
def log_events(out: str) -> None:
    assert re.search(r"INFO +program +sampling from tiny/model", out)
    assert re.search(r"INFO +program +got \d tokens", out)
    order = [out.index(text) for text in ("SessionOpened", "endpoint='asample'", "SessionClosed")]
    assert order == sorted(order)
    assert "RequestStarted" not in out
    attached, after = out.split("detached: True")
    assert attached.count("INFO    process  RequestFinished endpoint='asample'") == 1
    assert "INFO    process" not in after
    assert len(re.findall(r"DEBUG +client +RequestFinished\(endpoint='asample'", out)) == 3
    assert "Hello" not in out, "the prompt"


@check
def sessions(out: str) -> None:
    assert "the 1 newest sessions:" in out
    assert "sessions example" in out
    assert "1 runs, 1 samplers" in out
    assert "{'purpose': 'show sessions'}" in out
    assert "this program's session, with" in out


@check
def checkpoints(out: str) -> None:
    before, after = out.split("after publishing")
    assert "yours, 1 to 2 of 3:" in before
    assert "yours, 3 to 3 of 3:" in before
    assert "weights/step-1 " in before
    assert "weights/step-1 " not in after
    assert re.search(r"  weights/step-2 .*private, expires ", after)
    assert re.search(r"sampler_weights/step-2 .*public, never expires", after)


@check
def weights_inspection(out: str) -> None:
    run = re.findall(r"a sampler checkpoint of (\S+)", out)[0]
    assert f"runs     1, the newest of them {run}" in out
    assert "last sampler checkpoint sampler_weights/inspected" in out
    assert "LoRA of rank 4 on attn, mlp of tiny/model" in out
    assert "corrupted: False" in out
    assert re.search(r"archive  \S+\.tar", out)
    assert re.search(r"of tiny/model, from tinker://\S+/sampler_weights/inspected", out)


@check
def checkpoint_download(out: str) -> None:
    assert re.search(r"^saved tinker://\S+/weights/exported$", out, re.MULTILINE)
    assert numbers(r"downloaded archive.tar: ([\d,]+) bytes", out)[0] > 10_000
    sizes = numbers(r"(?m)^  \S+\.(?:json|safetensors) +([\d,]+)$", out)
    assert [sum(sizes)] == numbers(r"extracted ([\d,]+) bytes into", out)
    assert "adapter_model.safetensors" in out
    assert "optimizer.safetensors" in out
    assert "a LORA adapter of rank 4 for tiny/model" in out
    assert re.search(r"\d+ tensors, for example \S+ \(", out)


@check
def cli_delete_checkpoints(out: str) -> None:
    assert "2 checkpoints of run" in out
    assert "Deleted 2 checkpoints." in out
    assert "0 checkpoints of run" in out
    assert numbers(r"exit code (\d)", out) == [0, 0, 0, 1]


@check
def async_clients(out: str) -> None:
    slow, fast = (numbers(rf"learning rate {rate}: loss ([\d.]+)", out)[0] for rate in ("0.0005", "0.005"))
    assert fast < slow
    made = re.search(
        r"created (\S+):train:([01]), \1:train:([01]) and", out
    )  # concurrently, so either may be the first
    assert made is not None
    assert made[2] != made[3]
    assert f"{made[1]}:train:2 starts from tinker://{made[1]}:train:{made[3]}/weights/better" in out
    assert numbers(r"starts from \S+ at loss ([\d.]+)", out) == [fast]


@check
def training_persistence(out: str) -> None:
    fourth, repeated, resumed, reset = numbers(r"  loss ([\d.]+)", out)
    assert fourth == repeated == resumed != reset
    assert re.search(r"saved \S+/weights/third-step, expires \d{4}-\d\d-\d\d", out)


@check
def save_weights_and_sample(out: str) -> None:
    before, after, again = numbers(r"(?m)^(?:first|second) snapshot.* +(-[\d.]+)$", out)
    assert before == again < after
    assert "' → " in out


@check
def model_info_and_unload(out: str) -> None:
    assert re.findall(r"(?m)^  (\w+): FutureCompletedResponse$", out) == [
        "create_model",
        "save_weights",
        "unload_model",
    ]
    assert "model      tiny/model (llama)" in out
    assert "LoRA       True, rank 4" in out
    run = re.findall(r"(?m)^run        (\S+)$", out)[0]
    assert f"saved      tinker://{run}/weights/before" in out
    assert f"unloaded   {run}" in out
    assert "error      410, retryable: False:" in out
    resumed = re.findall(r"(?m)^resumed as (\S+:train:\d)$", out)
    assert resumed
    assert resumed[0] != run


@check
def queue_states(out: str) -> None:
    assert "8 samples finished" in out
    assert re.search(
        r"the last of them was paused_capacity: \d samples wait for a place in the decode batch", out
    )
    assert re.search(r"\d × Sample paused_capacity: \d samples wait for a place in the decode batch", out)
    for run in ("train:0", "train:1"):
        ((*losses, states),) = re.findall(
            rf"{run} finished with losses ([\d.]+), ([\d.]+), ([\d.]+); its observer: (\d+) states", out
        )
        assert falls([float(loss) for loss in losses], 3)
        assert int(states) > 0
    ((every, largest),) = re.findall(r"observers of single samples: (\d+) states, at most (\d+) each", out)
    assert int(every) == sum(numbers(r"(\d+) × Sample ", out)), "each state went to one observer"
    assert 0 < int(largest) < int(every)
    assert re.search(
        r"\d × (ForwardBackward|OptimStep) active: in line with \d+ other training operations", out
    )


@check
def sampling_backpressure(out: str) -> None:
    assert numbers(r"all concurrently: 24 of 24 finished, paused (\d+) times", out)[0] > 0
    assert re.search(r"longest pause \d\.\d\d s; reason: 10 operations of yours are waiting already", out)
    assert numbers(r"at most 8 concurrently: 24 of 24 finished, paused (\d+) times", out) == [0]
    assert re.findall(r"  paused (\d) s for (\d+) bytes: too many prompts", out) == [
        ("1", "4000"),
        ("5", "140000"),
    ]
    free, penalized, _ = numbers(r"at most (\d+) submitted simultaneously", out)
    assert penalized < free / 2


@check
def wire_heartbeat(out: str) -> None:
    assert re.findall(r"POST (\w+)\S*: (\d+)", out) == [
        ("create_session", "200"),
        ("session_heartbeat", "200"),
        ("heartbeat", "404"),
        ("session_heartbeat", "404"),
        ("sessions", "200"),
    ]


@check
def cli_sample_text(out: str) -> None:
    command, answer = out.partition("\nexit code 0\n")[0].split("\n", 1)
    assert command.startswith("$ tinkex sample What is the capital of France?")
    assert answer
    assert numbers(r"as JSON, exit code 0: (\d+) prompt tokens", out)[0] > 30
    assert len(re.findall(r"^  (length|stop): ['\"]", out, re.MULTILINE)) == 1


@check
def cli_sample_prompt_file(out: str) -> None:
    assert re.findall(r"^(\S+): exit code 0, \d+ prompt tokens", out, re.MULTILINE) == [
        "text.txt",
        "chat.json",
        "tokens.json",
    ]
    assert "tokens.json: exit code 0, 3 prompt tokens" in out
    assert len(re.findall(r"^  (length|stop): ['\"]", out, re.MULTILINE)) == 6


@check
def tokenizer_override(out: str) -> None:
    assert "→ thinkingmachineslabinc/meta-llama-3-instruct-tokenizer" in out
    assert "decoded: 'Tokenizers cut text into pieces.'" in out
    assert "the model's own: the same tokens" in out
    assert "completion, decoded with the chosen one:" in out


@check
def kimi_sampling(out: str) -> None:
    assert "KimiTokenizer with 525 tokens, 256 of them special" in out
    assert "pieces: 'ar' '月亮' ' ' '123' '45'" in out
    assert "unchanged by the round trip: True" in out
    assert "a chat: '<|im_user|>Say hi.<|im_end|><|im_assistant|>', 10 tokens" in out
    assert "<|im_end|>: 1 token, as plain text 10" in out
    assert f"models: {KIMI}" in out
    assert f"answer of {KIMI}:" in out


@check
def file_upload_multipart(out: str) -> None:
    uploads = re.findall(r"(?m)^(\w+) +(\d+) bytes png (asset://\w+)$", out)
    assert [kind for kind, *_ in uploads] == ["path", "bytes", "file", "pipe"]
    assert len({tuple(rest) for _, *rest in uploads}) == 1, "equal content has the same asset id"
    assert "names: a%22b%0D%0AX: 1.png and large; 2 different images on the server" in out
    assert "rejected: a str is ambiguous" in out
    assert "images are not supported:" in out
    assert "reads text only" in out
    assert re.findall(r"(?m)^  (note\S+|image) +(.*)$", out)[:-1] == [
        ("note[title]", "squares"),
        ("note[tags][]", "grey"),
        ("note[tags][]", "small"),
        ("note[size][width]", "64"),
        ("note[size][height]", ""),
        ("note[draft]", "true"),
    ]
    assert re.search(r"(?m)^  image +a file of \d+ bytes$", out)


@check
def multimodal_prompt(out: str) -> None:
    assert re.search(r"image +16 tokens", out)
    text, image, question = numbers(r"(?m)^  \S+ +(\d+) tokens$", out)
    assert numbers(r"a prompt of (\d+) tokens", out) == [text + image + question]
    assert "tiny/model does not support images:" in out
    assert "reads text only" in out
    first, second, resumed = numbers(r"(?:loss|step|train:1:) ([\d.]+)", out)
    assert resumed == second < first
    assert len(re.findall(r"(?m)^unloaded \S+:train:\d$", out)) == 2
    assert re.search(r"deleted tinker://\S+/weights/disc, 0 checkpoints left", out)


@check
def telemetry_reports(out: str) -> None:
    severities = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    assert re.findall(r"(?m)^(\w+) accepted: True$", out) == severities
    assert "not sent: TelemetryDataDropped(event_name='example.batch', fields=('batch',))" in out
    assert "raised as usual: division by zero" in out
    assert "delivered: True" in out
    assert "stopped: True" in out
    arrived = re.findall(r"(?m)^  (\w+) +(\w+) *(.*)$", out.partition("9 reports arrived:")[2])
    assert [kind for _, kind, _ in arrived] == [
        "SESSION_START",
        *["GENERIC_EVENT"] * 6,
        "UNHANDLED_EXCEPTION",
        "SESSION_END",
    ]
    assert [severity for severity, _, rest in arrived if "level" in rest] == severities
    assert "ZeroDivisionError" in arrived[-2][2]
    assert "tml-example-key" not in out


@check
def open_telemetry(out: str) -> None:
    lines, tree = out.split(" spans in 1 trace, ")
    trace_id = tree.partition(":")[0]
    mine = re.findall(rf"^{trace_id} +[\d.]+ ms  (.*)$", lines, re.MULTILINE)
    assert int(lines.rpartition("\n")[2]) == len(mine), "every span belongs to this trace"
    assert mine[-1] == "my program"
    assert {"my training step", "tinkex.forward_backward", "tinkex.engine.optim_step"} <= {*mine}
    assert mine.count("tinkex.queue") == 3
    assert tree.count("\n   my training step") == 1
    assert re.search(r"^ {15}tinkex\.engine\.optim_step", tree, re.MULTILINE)
