"""Supervised fine-tuning: batches, a decaying learning rate, evaluation, checkpoints, a look at the samples."""

import numpy as np
import tinker
from tinker import types
from tinker.types.tensor_data import TensorData


def datum(tokens, prompt_length):
    weights = np.array([0.0] * (prompt_length - 1) + [1.0] * (len(tokens) - prompt_length), dtype=np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "weights": TensorData.from_numpy(weights),
            "target_tokens": TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
        },
    )


def mean_nll(outputs, data):
    logprobs = np.concatenate([output["logprobs"].tolist() for output in outputs])
    weights = np.concatenate([one.loss_fn_inputs["weights"].tolist() for one in data])
    return float(-np.dot(logprobs, weights) / weights.sum())


def main():
    service = tinker.ServiceClient(user_metadata={"program": "supervised"})
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(base_model=names[0], rank=8, seed=11)
    tokenizer = training.get_tokenizer()
    pairs = [
        ("What is two plus two?", " Four."),
        ("The capital of France is", " Paris."),
        ("The sea is", " blue."),
    ]
    data = []
    for question, answer in pairs:
        prompt = tokenizer.encode(question, add_special_tokens=False)
        data.append(datum(prompt + tokenizer.encode(answer, add_special_tokens=False), len(prompt)))

    curve, norms = [], []
    steps = 6
    for step in range(steps):
        batch = [data[step % len(data)], data[(step + 1) % len(data)]]
        adam = tinker.AdamParams(learning_rate=2e-2 * (1 - step / steps), beta1=0.9, beta2=0.95, eps=1e-8)
        passed = training.forward_backward(batch, loss_fn="cross_entropy")
        stepped = training.optim_step(adam)
        result = passed.result()
        norms.append(sorted(stepped.result().metrics or {}))
        curve.append((mean_nll(result.loss_fn_outputs, batch), result.metrics["loss:sum"]))
    evaluated = training.forward(data, "cross_entropy").result()

    state = training.save_state(name=f"{steps:06d}").result()
    weights = training.save_weights_for_sampler(name=f"{steps:06d}", ttl_seconds=3600).result()
    parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(state.path)
    sampler = service.create_sampling_client(model_path=weights.path)
    prompt = types.ModelInput.from_ints(tokenizer.encode(pairs[1][0], add_special_tokens=False))
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=["\n"])
    sample = sampler.sample(prompt=prompt, sampling_params=params, num_samples=1).result()
    scored = sampler.compute_logprobs(prompt).result()
    service.close("success").result()
    return {
        "curve": curve,
        "step_metrics": norms,
        "evaluation": mean_nll(evaluated.loss_fn_outputs, data),
        "kinds": (parsed.checkpoint_type, parsed.checkpoint_id),
        "greedy": sample.sequences[0].tokens,
        "greedy_logprobs": sample.sequences[0].logprobs,
        "stop_reason": sample.sequences[0].stop_reason,
        "prompt": scored,
    }
