"""Train with regularizers: reward an answer, but stay close to the reference model.

You will see an answer sampled and rewarded for a few steps, without and with a KL term: the loss as the sum of
reward, KL and entropy, and the change of the answer's logprobs.
"""

from __future__ import annotations

import os

import torch

import tinkex
from tinkex import types
from tinkex.losses.regularizers import Entropy, KLDivergence


def reinforce(data, logprobs):
    """Rewards each token by its advantage."""
    pairs = zip(data, logprobs, strict=True)
    gains = [(lp * datum.loss_fn_inputs["advantages"].to_torch()).sum() for datum, lp in pairs]
    return -torch.stack(gains).sum(), {}


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        prompt = sampler.get_tokenizer().encode("The captain's log, day seven:")
        params = types.SamplingParams(max_tokens=16, seed=2)
        answer = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]

        # The prompt has no reward; the answer's logprobs at sampling time are the reference.
        unrewarded = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": prompt[1:] + answer.tokens,
            "advantages": torch.tensor(unrewarded + [1.0] * len(answer.tokens)),
            "reference": torch.tensor(unrewarded + answer.logprobs),
        }
        datum = types.Datum(types.ModelInput.from_ints(prompt + answer.tokens[:-1]), inputs)
        on_answer = {"sampled_by": "reference", "where": "advantages"}
        for kl_weight in (0.0, 10.0):
            training = service.create_lora_training_client(model, rank=8, seed=0)
            terms = [
                types.RegularizerSpec(KLDivergence("reference", **on_answer), weight=kl_weight),
                types.RegularizerSpec(Entropy(mode="maximize", **on_answer), weight=0.01),
            ]
            print(f"KL weight {kl_weight}")
            for _ in range(4):
                passed = training.forward_backward_custom([datum], reinforce, regularizers=terms)
                training.optim_step(types.AdamParams(learning_rate=5e-4)).result()
                metrics = passed.result().metrics
                print(
                    f"  loss {metrics['loss:sum']:8.3f} = reward {metrics['base_loss:sum']:8.3f}"
                    f" + KL {metrics['regularizer/kl_divergence/contribution:sum']:.4f}"
                    f" + entropy {metrics['regularizer/entropy/contribution:sum']:.4f}"
                )
            after = training.forward_backward_custom([datum], reinforce).result().metrics["loss:sum"]
            change = (-sum(answer.logprobs) - after) / len(answer.tokens)
            print(f"  the answer's logprob increased by {change:.4f} nats per token")


if __name__ == "__main__":
    main()
