"""Distillation: what a teacher thinks of a student's tokens, its top-k tokens as soft targets, then PPO on both."""

import asyncio

import numpy as np
import tinker
import torch
from tinker.types.datum import Datum
from tinker.types.model_input import ModelInput
from tinker.types.sampling_params import SamplingParams
from tinker.types.tensor_data import TensorData

K = 3


async def rollouts(student, prompts):
    drawn = await asyncio.gather(
        *(
            student.sample_async(prompt, num_samples=2, sampling_params={"max_tokens": 6, "seed": 40 + place})
            for place, prompt in enumerate(prompts)
        )
    )
    return [
        (prompt, sequence.tokens, sequence.logprobs)
        for prompt, response in zip(prompts, drawn, strict=True)
        for sequence in response.sequences
    ]


async def scored(teacher, prompt, tokens):
    whole = ModelInput.from_ints(prompt.to_ints() + list(np.array(tokens)))
    logprobs = await teacher.compute_logprobs_async(whole)
    last = await teacher.compute_logprobs_async(whole, prompt_logprobs_last_n=len(tokens))
    return whole, logprobs[prompt.length :], last[-len(tokens) :]


async def soft_targets(teacher, whole):
    answer = await teacher.sample_async(
        prompt=whole,
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=K,
    )
    rows = [row for row in answer.topk_prompt_logprobs if row is not None]
    ids = np.array([[token for token, _ in row] for row in rows])
    weights = np.exp(np.array([[logprob for _, logprob in row] for row in rows]))
    asked = await teacher.sample_async(
        whole,
        1,
        SamplingParams(max_tokens=1, temperature=0.0),
        target_prompt_logprobs=TensorData.from_numpy(ids),
    )
    found = np.array(asked.target_prompt_logprobs.tolist())
    return ids, weights / weights.sum(axis=1, keepdims=True), float(np.abs(np.exp(found) - weights).max())


async def distil(service, base_model):
    training = await service.create_lora_training_client_async(base_model, rank=np.int64(4), seed=12)
    teacher = await service.create_sampling_client_async(base_model=base_model)
    student = await training.save_weights_and_get_sampling_client_async()
    prompts = [ModelInput.from_ints([7 * place + 11, 30 + place, 5]) for place in range(2)]
    found, online, soft, agree = [], [], [], []
    for prompt, tokens, logprobs in await rollouts(student, prompts):
        whole, reference, last = await scored(teacher, prompt, tokens)
        reverse_kl = torch.tensor(logprobs) - torch.tensor(reference)
        ahead = prompt.length - 1
        online.append(
            Datum(
                model_input=ModelInput.from_ints(whole.to_ints()[:-1]),
                loss_fn_inputs={
                    "target_tokens": torch.tensor(whole.to_ints()[1:]),
                    "logprobs": torch.cat([torch.zeros(ahead), torch.tensor(logprobs)]),
                    "advantages": torch.cat([torch.zeros(ahead), -reverse_kl]),
                },
            )
        )
        ids, weights, apart = await soft_targets(teacher, whole)
        soft.append(
            Datum(
                model_input=ModelInput.from_ints(whole.to_ints()[:-1]),
                loss_fn_inputs={"target_tokens": torch.from_numpy(ids), "weights": torch.from_numpy(weights)},
            )
        )
        agree.append(apart < 1e-3 and np.allclose(reference, last, atol=1e-4))
        found.append((tokens, reference, reverse_kl.tolist()))
    clip = {"clip_low_threshold": np.float32(0.5), "clip_high_threshold": 2}
    curve = []
    for _ in range(2):
        passed = await training.forward_backward_async(online, "ppo", loss_fn_config=clip)
        softly = await training.forward_backward_async(soft, "cross_entropy")
        stepped = await training.optim_step_async(tinker.AdamParams(learning_rate=5e-3, grad_clip_norm=1))
        curve.append(((await passed).metrics["loss:sum"], (await softly).metrics["loss:sum"]))
        await stepped
        curve.append([tensor["logprobs"].shape for tensor in (await softly).loss_fn_outputs])
    return {"found": found, "curve": curve, "agree": agree}


def main():
    with tinker.ServiceClient(user_metadata={"program": "distilled"}) as service:
        base_model = service.get_server_capabilities().supported_models[0].model_name
        return asyncio.run(distil(service, base_model))
