"""Train a small language model to answer in a new style, on this machine, in about a minute.

You will see an answer of the base model, a LoRA adapter trained on sixteen examples of a captain's log, the
answer in the new style, and the checkpoint. The question is not in the training data.
Runs on the embedded engine; set TINKER_BASE_URL to run the same file on a server.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import tinkex
from tinkex import types
from tinkex.observability.terminal import text_plot, training_line

QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
MODEL = os.environ.get("TINKER_BASE_MODEL") or "HuggingFaceTB/SmolLM2-135M-Instruct"
NEXT = """
Next:
  .venv/bin/tinkex sample "Who are you?" --model-path {path}{where}   # ask more questions
  .venv/bin/tinkex checkpoint download {path}{where}   # download a PEFT directory
  .venv/bin/tinkex serve     # serve the engine to any Tinker client, including the official one"""
DATA = Path(__file__).parent / "data" / "captains_log.jsonl"


def as_datum(tokenizer, messages) -> types.Datum:
    """Trains on the assistant's tokens only: the prompt's tokens have weight 0."""
    prompt = list(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))
    answer = tokenizer.encode(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)
    tokens, weights = prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer)
    inputs = {"target_tokens": tokens[1:], "weights": weights[1:]}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def ask(sampler, tokenizer) -> str:
    """Returns the greedy answer to the question."""
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    params = types.SamplingParams(max_tokens=40, temperature=0.0)
    response = sampler.sample(types.ModelInput.from_ints(list(prompt)), 1, params).result()
    return tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help=f"base model to train (default {MODEL})")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the 16 examples (default 5)")
    options = parser.parse_args()
    base_url = os.environ.get("TINKER_BASE_URL") or "local"

    with tinkex.ServiceClient(base_url=base_url) as service:
        training = service.create_lora_training_client(options.model, rank=16, seed=0)
        tokenizer = training.get_tokenizer()
        before = ask(service.create_sampling_client(base_model=options.model), tokenizer)
        print(f"\nBefore   {QUESTION}\n         {before}\n")

        data = [as_datum(tokenizer, json.loads(line)["messages"]) for line in DATA.open()]
        batches, losses = [data[i : i + 4] for i in range(0, len(data), 4)] * options.epochs, []
        with training_line(len(batches)) as line:
            for batch in batches:
                step = training.forward_backward(batch, "cross_entropy")
                training.optim_step(types.AdamParams(learning_rate=1e-3))
                losses.append(step.result().metrics["loss:sum"] / step.result().metrics["weights:sum"])
                line.update(loss=losses[-1], num_tokens=sum(d.model_input.length for d in batch))

        after = ask(training.save_weights_and_get_sampling_client(), tokenizer)
        print(f"\nAfter    {QUESTION}\n         {after}\n")
        path = training.save_state("quickstart", overwrite=True).result().path
        print(f"{text_plot(losses, label='loss per answer token')}\n\nCheckpoint   {path}")
    print(NEXT.format(path=path, where=" --local" if base_url == "local" else ""))


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, tinkex.TinkexError) as error:
        raise SystemExit(f"\nStopped. {error}".rstrip()) from None
