"""The first hour of a new user, from an empty home to an exported model, every command as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.docsite.terminal import PAGE, Recording, commands, record
from tests.cli.commands import Done, on_a_terminal, tinkex

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "docs" / "figures" / "terminal"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

TRAINING_LINES = (
    r"Reading data\.csv",
    r"18 examples from data\.csv \(question/answer\), 2 held out for evaluation",
    r"starting the engine in this process",
    r"opening the model",
    r"run in my-run",
    r"creating the run",
    r"loading tiny-llama",
    r"sampling (before|after) training",
    r"evaluating",
    r"before training: eval loss \d+\.\d+",
    r"after step \d+: eval loss \d+\.\d+",
    r"[━╌]{20} step \d+/12  loss \d+\.\d+  \d+ tokens/s  \d+ s left",
    r"checkpoint after step \d+: tinker://\S+/weights/(best|final)",
)
"""Every line that training prints on stderr, apart from its result."""

PLAN_LINES = (
    r"Model     tiny/llama",
    r"Examples  18 to train on, 2 for evaluation",
    r"Tokens    [\d,]+ in all steps; the longest example has \d+",
    r"Steps     12, each of up to 2 batches whose gradients are added",
    r"Packing   24 passes of 3 sequences, \d+ tokens; of [\d,]+ tokens [\d,]+ are different, [\d,]+ shared; [\d,]+ computed",
    r"Time      about \d+ (s|min), without evaluation and samples",
    r"Memory    \d\.\d GB for the model and one pass; training adds to it",
    r"Nothing was started\.",
)
"""Every line of a plan."""

REPORT_LINES = (
    r"",
    r"Fine-tuned tiny/llama \(SFT\): 12 steps on 18 examples in \d+ s",
    r"loss per step",
    r" *[\d.]* ┤[ ▁▂▃▄▅▆▇█]*",
    r" *└─+ 12 points",
    r"eval loss: (\d+\.\d+ after step \d+(, )?)+",
    r"Prompt   Where\?",
    r"(Before|After)   .*",
    r"After    The sea\.",
    r"The checkpoints are those after step \d+, the best evaluation of a step\.",
    r"Packing             24 passes of 3 sequences, .* computed",
    r"Checkpoint          tinker://\S+/weights/best",
    r"Sampler checkpoint  tinker://\S+/sampler_weights/best",
    r"Report              my-run/report\.html",
    r'Try it: tinkex sample "…" --model-path tinker://\S+ --local',
)
"""Every line of a report."""


def assert_known(text: str, known: tuple[str, ...]) -> None:
    """Fails for a line that is not among the known ones."""
    for line in text.splitlines():
        assert any(re.fullmatch(one, line) for one in known), line


def test_from_an_empty_home_to_an_exported_model(tiny_model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()

    def typed(*command: str) -> Done:
        done = tinkex(*command, "--local", home=home, cwd=tmp_path, TINKEX_MODELS=f"tiny/llama={tiny_model}")
        assert done.code == 0, (command, done.err)
        return done

    (tmp_path / "data.csv").write_text("question,answer\n" + "Where?,The sea.\n" * 20)
    options = (
        "--rank",
        "4",
        "--learning-rate",
        "0.02",
        "--batch-size",
        "3",
        "--steps",
        "12",
        "--sample-tokens",
        "6",
        "--accumulate",
        "2",
    )
    plan = typed("train", "sft", "data.csv", *options, "--check")
    assert_known(plan.out, PLAN_LINES)
    assert len(plan.out.splitlines()) == len(PLAN_LINES)
    assert not (tmp_path / "my-run").exists()

    trained = typed("train", "sft", "data.csv", *options, "--keep-best", "--report", "-o", "my-run")
    assert_known(trained.err, TRAINING_LINES)
    assert_known(trained.out, REPORT_LINES)
    for promised in ("eval loss: ", "After    The sea.", "Report  ", "Try it: "):
        assert promised in trained.out
    page = (tmp_path / "my-run" / "report.html").read_text()
    assert page.count("<pre>The sea.</pre>") == 1, "the rows have one prompt, which is sampled once"
    (tried,) = re.findall(r'^Try it: (tinkex sample "…" .*)$', trained.out, re.MULTILINE)
    assert tried.endswith(" --local")

    for name in ("my-run", "@last", tried.split()[-2]):
        answer = typed("sample", "Where?", "--model-path", name, "--temperature", "0")
        assert answer.out == "The sea.\n", name
    assert typed("train", "sft", "--resume", "my-run").out == trained.out
    repeated = typed("train", "--config", "my-run/run.toml", "-o", "again")
    assert repeated.out.partition(" in ")[0] == trained.out.partition(" in ")[0]
    assert (tmp_path / "again" / "report.html").exists(), "the config has every option"

    result = json.loads((tmp_path / "my-run" / "report.json").read_text())["checkpoint"]
    assert result.endswith("/weights/best")
    downloaded = typed("checkpoint", "download", "my-run", "-o", "adapters", "--json").json["destination"]
    assert downloaded.endswith("_weights_best")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in (tmp_path / downloaded).iterdir()
    }
    typed("checkpoint", "merge", "my-run", "merged", "--dtype", "float32")
    assert typed("sample", "Where?", "--model", "./merged", "--temperature", "0").out == "The sea.\n"


def test_on_a_terminal_the_progress_is_one_line_that_updates(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("question,answer\n" + "Where?,The sea.\n" * 4)
    env = {"TINKEX_HOME": str(tmp_path / "home"), "TINKEX_MODELS": f"tiny/llama={tiny_model}"}
    options = ("--rank", "2", "--steps", "3", "--sample-tokens", "2", "--local")
    shown = on_a_terminal("train", "sft", "data.csv", *options, env=env, cwd=tmp_path)
    assert shown.count("\r\x1b[2K") > 5
    assert (
        shown.index("opening the model") < shown.index("sampling before training") < shown.index("step 1/3")
    )


SHAPES = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"[━╺╸╌─]+", "bar"),
    (r"^(Prompt|Before|After) .*", r"\1"),
    (r"^ *[\d.]* ┤.*", "curve"),
    (r"^loading .*", "loading"),
    (r"^captains_log_task (bar)? *\d+%.*", "captains_log_task"),
    (r"[-+]?\d[\d.,:]*", "0"),
    (r"0 to 0", "0"),
    (r"0 [kKMG]?B|0 bytes", "size"),
    (r"(0/)?size.*", "size"),
    (r"-?bar:bar:bar", "0"),
    (r"\s+", " "),
)


def shape_of(line: str) -> str:
    """Returns a line without what differs from run to run and from model to model: numbers, ids and sampled text."""
    for pattern, shape in SHAPES:
        line = re.sub(pattern, shape, line)
    return line.strip()


def test_every_command_for_the_first_hour_prints_what_its_recording_shows(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Types the commands of the page on terminals, from an empty home to an evaluated and exported model."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {
        "HOME": str(tmp_path),
        "TINKEX_HOME": str(tmp_path / "home"),
        "TINKEX_MODELS": f"{MODEL}={tiny_model}",
        "TINKER_TELEMETRY": "0",
    }
    typed = commands((ROOT / PAGE).read_text())
    assert list(typed) == ["sample", "train", "eval", "download", "merge"]
    for name, command in typed.items():
        promised = Recording.from_cast((RECORDINGS / f"{name}.cast").read_text())
        assert promised.command == command, "record it again with: scripts/figures --record-terminal"
        printed = record(command, tmp_path, env)
        allowed = {shape_of(line) for line in promised.live_lines}
        answers = name == "sample"  # its last line is whatever the model says
        for line in printed.screen[: -1 if answers else None]:
            note = line.startswith("Note ")  # advice for a model that learns less well
            assert note or not line.strip() or shape_of(line) in allowed, (command, line)
        # Rich shows an escape character that it is given as text; only whole sequences may reach the terminal.
        written = "".join(text for _, text in printed.events)
        assert "\x1b\x1b" not in written, (command, written)
        for phase in PHASES[name]:
            assert any(phase in line for line in promised.live_lines), (command, phase)
            assert any(phase in line for line in printed.live_lines), (command, phase)
    assert (tmp_path / "merged" / "config.json").exists()


PHASES = {
    "sample": ("starting the engine", "loading "),
    "train": (
        "Reading ",
        "opening the model",
        "loading ",
        "sampling before training  1/3",
        "evaluating",
        "step 1/12",
        "step 12/12",
        "sampling after training  1/3",
    ),
    "eval": ("starting the engine", "captains_log_task ━", " 8 items"),
    "download": ("archive.tar ",),
    "merge": ("merging weights",),
}
"""What is shown while each command takes its time."""
