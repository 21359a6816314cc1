"""A multiple-choice task of ``lm-eval`` on the model of a server; prints the log-likelihood of every choice."""

import json
import os
import sys
from pathlib import Path

SERVER, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
os.environ |= {
    "OPENAI_API_KEY": KEY,
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": sys.argv[3],
}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

tokenizer, documents, home = sys.argv[1:]
task = {
    "task": "choices",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": documents}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": "hermes",
        "base_url": f"{SERVER}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer,
        "max_length": 2048,
        "max_retries": 1,
    },
    tasks=[task],
    batch_size=4,
    bootstrap_iters=0,
    task_manager=TaskManager(include_defaults=False),
)
samples = [
    [argument[0], argument[1], *response[0]]
    for sample in found["samples"]["choices"]
    for argument, response in zip(
        [
            list(each.values())[:2] if isinstance(each, dict) else each
            for each in (
                sample["arguments"].values() if isinstance(sample["arguments"], dict) else sample["arguments"]
            )
        ],
        sample["resps"],
        strict=True,
    )
]
Path(home, "results.json").write_text(
    json.dumps({"samples": samples, "acc": found["results"]["choices"]["acc,none"]})
)
print(json.dumps({"samples": samples, "acc": found["results"]["choices"]["acc,none"]}))
