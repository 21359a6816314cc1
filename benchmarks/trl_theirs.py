"""TRL's side of the benchmark: its trainers on the same model, in fp32 on the CPU, with PEFT's LoRA.

Gradient checkpointing is off, because it makes TRL slower; whatever else is not part of the workload has TRL's default.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from trl_workload import ANSWER_LENGTH, ANSWERS, PAIRS, PROMPTS, RANK, SFT_BATCH, make_workload

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_timer() -> Any:
    """A callback that records the time of every step, and of the whole training."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    return Timer()


def main() -> None:
    """Prints the seconds and CPU seconds of each measured step, and the peak memory, as JSON."""
    case, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    work = make_workload(Tokenizer.from_file(f"{model}/tokenizer.json"))
    timer = make_timer()
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        common: dict[str, Any] = {
            "output_dir": output, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
            "report_to": [], "save_strategy": "no", "learning_rate": 1e-5, "disable_tqdm": True,
        }  # fmt: skip
        trainer: Any
        shared: dict[str, Any] = {
            "model": loaded, "processing_class": AutoTokenizer.from_pretrained(model), "callbacks": [timer],
            "peft_config": LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM"),
        }  # fmt: skip
        if case == "grpo":
            trainer = GRPOTrainer(
                reward_funcs=lambda completion_ids, **_: [
                    sum(token % 2 for token in ids) / len(ids) for ids in completion_ids
                ],
                args=GRPOConfig(
                    **common, per_device_train_batch_size=PROMPTS * ANSWERS, num_generations=ANSWERS,
                    max_completion_length=ANSWER_LENGTH, max_steps=steps + 1,
                    generation_kwargs={"min_new_tokens": ANSWER_LENGTH},
                ),
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.grpo_prompts]),
                **shared,
            )  # fmt: skip
        elif case == "dpo":
            rows = [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in work.dpo_pairs]
            trainer = DPOTrainer(
                args=DPOConfig(**common, per_device_train_batch_size=PAIRS, max_steps=steps + 1),
                train_dataset=Dataset.from_list(rows),
                **shared,
            )
        else:
            grouped = {"train_sampling_strategy": "group_by_length"} if case == "sft_grouped" else {}
            trainer = SFTTrainer(
                args=SFTConfig(
                    **common, per_device_train_batch_size=SFT_BATCH, num_train_epochs=steps, **grouped
                ),
                train_dataset=Dataset.from_list([{"text": text} for text in work.sft_texts]),
                **shared,
            )
        trainer.train()
    per_run = len(work.sft_texts) // SFT_BATCH if case.startswith("sft") else 1
    first = 0 if case.startswith("sft") else 1  # of many steps, so that a warm-up matters little
    marks = timer.times[first::per_run]
    wall = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    cpu = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak}))


if __name__ == "__main__":
    main()
