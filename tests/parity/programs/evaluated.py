"""Evaluation: many concurrent questions under a semaphore, several samplers, answers that fail, a process pool's task."""

import asyncio
import collections
import copy
import pickle

import tinker
from tinker import types

QUESTIONS = [f"{left} plus {right} is" for left in range(6) for right in range(4)]


class Policy:
    """What evaluators hand around: a client with its settings."""

    def __init__(self, client, tokenizer, **settings):
        self.client, self.tokenizer = client, tokenizer
        self.params = types.SamplingParams(**settings)

    async def answer(self, question):
        prompt = types.ModelInput.from_ints(self.tokenizer.encode(question, add_special_tokens=False))
        response = await self.client.sample_async(
            prompt=prompt, num_samples=1, sampling_params=self.params, topk_sample_logprobs=2
        )
        (sequence,) = response.sequences
        return sequence.tokens, sequence.stop_reason, [len(row) for row in sequence.topk_logprobs]


async def evaluate(policy, questions, at_once):
    gate = asyncio.Semaphore(at_once)
    done = []

    async def one(question):
        async with gate:
            answer = await policy.answer(question)
        done.append(question)
        return answer

    answers = await asyncio.gather(*(one(question) for question in questions))
    assert sorted(done) == sorted(questions)
    return answers


async def first_of(policy, questions):
    """The first to finish; the others are given up."""
    tasks = [asyncio.create_task(policy.answer(question)) for question in questions]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    given_up = await asyncio.gather(*pending, return_exceptions=True)
    return all(isinstance(one, asyncio.CancelledError | tuple) for one in given_up) and len(done) >= 1


def rejections(client):
    """What comes of a call that cannot be answered, and where."""
    prompt = types.ModelInput.from_ints([5, 6])
    found = []
    for given, params in [
        (types.ModelInput.from_ints([10**6]), types.SamplingParams(max_tokens=1)),
        (types.ModelInput.from_ints(list(range(5, 400)) * 40), types.SamplingParams(max_tokens=1)),
        (types.ModelInput.empty(), types.SamplingParams(max_tokens=1)),
    ]:
        future = client.sample(given, 1, params)
        error = future.exception(timeout=60)
        found.append((type(error).__name__, error.status_code, isinstance(error, tinker.APIStatusError)))
        found.append(type(pickle.loads(pickle.dumps(error))).__name__)
    for wrong in [
        lambda: client.sample(prompt, 1, types.SamplingParams(max_tokens=1), prompt_logprobs_last_n=3),
        lambda: client.sample(prompt, 1, {"max_tokens": "many"}).result(60),
        lambda: client.sample(prompt, 1.5, types.SamplingParams(max_tokens=1)).result(60),
    ]:
        try:
            wrong()
        except ValueError:
            found.append("ValueError")
    return found


def main():
    service = tinker.ServiceClient()
    base_model = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_sampling_client(base_model=base_model)
    tokenizer = service.create_lora_training_client(base_model, rank=4).get_tokenizer()
    policy = Policy(client, tokenizer, max_tokens=5, temperature=0.0)
    answers = asyncio.run(evaluate(policy, QUESTIONS, at_once=8))
    elsewhere = copy.copy(policy)
    elsewhere.client = pickle.loads(pickle.dumps(client))
    again = asyncio.run(evaluate(elsewhere, QUESTIONS[:6], at_once=3))
    common = collections.Counter(token for tokens, _, _ in answers for token in tokens).most_common(1)[0][0]
    stopped = Policy(client, tokenizer, max_tokens=5, temperature=0.0, stop=[common])
    seeded = [
        Policy(client, tokenizer, max_tokens=4, seed=seed, top_k=20, top_p=0.9, temperature="0.7")
        for seed in (1, 1, 2)
    ]
    drawn = [asyncio.run(evaluate(one, QUESTIONS[:2], at_once=2)) for one in seeded]
    found = {
        "answers": answers,
        "elsewhere": again == answers[:6],
        "stopped": asyncio.run(evaluate(stopped, QUESTIONS[:5], at_once=5)),
        "seeded": (drawn[0], drawn[0] == drawn[1]),
        "first": asyncio.run(first_of(policy, QUESTIONS[:4])),
        "rejections": rejections(client),
        "base_model": client.get_base_model(),
    }
    service.close("success").result()
    return found
