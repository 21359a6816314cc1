"""``lm-eval`` through ``local-completions`` and ``tinkex eval``: its log-likelihoods are those of ``transformers``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import write_chat_models
from tests.models import tiny_llama
from tests.other_clients.environments import run_python
from tests.servers import ServedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first run installs the clients

CONTEXTS = [
    "The quick",
    "A model",
    "What is the",
    "Two plus",
    "Once upon a",
    "the river ran to",
    "The capital of",
]
ENDINGS = [" fox jumps", " is trained by showing it", " sea", " and"]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "endings": """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "likelihoods": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}


def run_command(server: ServedEngine, documents: Path, home: Path) -> tuple[Any, dict[str, list[Any]]]:
    """Runs ``tinkex eval --lm-eval``; returns what it prints, and the items of each task."""
    tasks = home / "tasks"
    tasks.mkdir()
    for name, fields in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {documents}}}}}\ntest_split: test"
        prompt = 'doc_to_text: "{{question}}"\ntarget_delimiter: ""'
        (tasks / f"{name}.yaml").write_text(f"task: {name}\n{data}\n{prompt}\n{fields}")
    here = os.pathsep.join(path for path in sys.path if path)
    options = ("--lm-eval", ",".join(TASKS), "--lm-eval-path", str(tasks), "--model", "hermes", "--json")
    output = home / "items.jsonl"
    found = run_python(
        "lm_eval", server, here, str(home), *options, "-o", str(output), program="lm_eval_command"
    )
    items: dict[str, list[Any]] = {name: [] for name in TASKS}
    for line in output.read_text().splitlines():
        item = json.loads(line)
        items[item["task"]].append(item["sample"])
    return found, items


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_log_likelihoods_and_greedy_marks_equal_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = Path(write_chat_models(tiny_llama(tmp_path / "tiny", context=2048), tmp_path)["hermes"])
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def score(context: str, ending: str) -> tuple[float, bool]:
        """The log-likelihood of an ending, and whether it is what greedy decoding would continue with."""
        tokens, start = tokenizer.encode(context + ending), len(tokenizer.encode(context))
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[start - 1 : -1]
        targets = torch.tensor(tokens[start:])
        total = logprobs.gather(1, targets[:, None]).sum().item()
        return total, bool((logprobs.argmax(-1) == targets).all())

    def greedy_ending(context: str) -> str | None:
        """The text of the most likely next token, if it is one that can be written."""
        tokens = tokenizer.encode(context)
        with torch.no_grad():
            best = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        text: str = tokenizer.decode([best])
        can_be_written = text.strip() and tokenizer.encode(context + text) == [*tokens, best]
        return text if can_be_written else None

    words = [
        f"{context} {word}"
        for context in CONTEXTS
        for word in ("fox", "sea", "model", "the", "river", "Paris")
    ]
    greedy = [(text, ending) for text in words if (ending := greedy_ending(text))][:4]
    assert greedy, "no context has a greedy ending that can be written"
    documents = [
        *({"question": context, "choices": ENDINGS, "answer": 0} for context in CONTEXTS),
        *({"question": context, "choices": [ending, *ENDINGS], "answer": 0} for context, ending in greedy),
    ]
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(json.dumps({**each, "choices": each["choices"][:4]}) for each in documents))
    with serve(tmp_path, "--model", f"hermes={directory}") as server:
        found = run_python("lm_eval", server, str(directory), str(file), str(tmp_path))
        command, items = run_command(server, file, tmp_path)
    assert len(found["samples"]) == 4 * len(documents)
    marks = set()
    for context, ending, log_likelihood, is_greedy in found["samples"]:
        expected, expected_greedy = score(context, ending)
        assert log_likelihood == pytest.approx(expected, abs=1e-4)
        assert bool(is_greedy) == expected_greedy, (context, ending)
        marks.add(expected_greedy)
    assert marks == {True, False}
    assert 0 <= found["acc"] <= 1
    scores = {score["task"]: score for score in command["results"]}
    assert set(scores) == set(TASKS)
    assert scores["choices"]["score"] == found["acc"]
    assert scores["choices"]["num_items"] == len(documents)
    low, high = scores["choices"]["interval"]
    assert low <= found["acc"] <= high
    asked = [(each["question"], choice) for each in documents for choice in each["choices"][:4]]
    given = [response[0] for item in items["choices"] for response in item["resps"]]
    for (context, ending), (log_likelihood, is_greedy) in zip(asked, given, strict=True):
        expected, expected_greedy = score(context, ending)
        assert float(log_likelihood) == pytest.approx(expected, abs=1e-4)
        assert (str(is_greedy) == "True") == expected_greedy
    for item, each in zip(items["likelihoods"], documents, strict=True):
        start = tokenizer.bos_token or tokenizer.eos_token
        assert float(item["resps"][0][0]) == pytest.approx(score(start, each["question"])[0], abs=1e-4)
    for item, each in zip(items["endings"], documents, strict=True):
        tokens = torch.tensor([tokenizer.encode(each["question"])])
        written = model.generate(tokens, max_new_tokens=5, do_sample=False)[0, tokens.shape[1] :]
        text = tokenizer.decode(written, skip_special_tokens=True).split("\n")[0]
        assert item["resps"][0][0] == text
