"""The official client, unmodified, against `tinkex serve` in a process of its own."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
import tinker
from tinker import types

import tinkex
from tests.servers import ServedEngine

MODEL = "tiny/llama"

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


@pytest.fixture(scope="module")
def service(served_engine: ServedEngine):
    client = tinker.ServiceClient(base_url=served_engine.url, api_key=served_engine.key)
    with client:
        yield client


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    inputs: dict = {"target_tokens": tokens[1:]}
    if weights is not None:
        inputs["weights"] = weights
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sentence(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, length + 1).tolist()


def test_the_whole_loop(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=8, seed=1)
    data = [datum(sentence(i, 12)) for i in range(4)]
    losses = []
    for _ in range(8):
        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-2))
        output = step.result()
        losses.append(output.metrics["loss:sum"])
        assert [len(o["logprobs"].data) for o in output.loss_fn_outputs] == [12] * 4
    assert losses[-1] < 0.7 * losses[0]

    saved = training.save_state("step8").result()
    assert saved.path == f"tinker://{training.model_id}/weights/step8"
    sampler = training.save_weights_and_get_sampling_client()
    response = sampler.sample(
        types.ModelInput.from_ints([5, 6]), 3, types.SamplingParams(max_tokens=4, stop=[])
    ).result()
    assert [len(s.tokens) for s in response.sequences] == [4, 4, 4]
    assert all(s.logprobs is not None and len(s.logprobs) == 4 for s in response.sequences)


def test_the_server_records_metrics_of_every_step(
    service: tinker.ServiceClient, served_engine: ServedEngine
) -> None:
    training = service.create_lora_training_client(MODEL, rank=8, seed=1)
    losses = []
    for step in range(3):
        passed = training.forward_backward([datum(sentence(step, 12))], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(passed.result().metrics["loss:sum"])
    rest = tinkex.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    metrics = rest.get_training_run_metrics(training.model_id).result(30)
    assert metrics["loss:sum"].values == pytest.approx(losses)
    assert metrics["learning_rate:mean"].values == [1e-3] * 3
    assert metrics["unclipped_grad_l2:mean"].steps == [1, 2, 3]


@pytest.mark.slow
def test_several_chunks_in_one_call_add_up(service: tinker.ServiceClient) -> None:
    """1,100 datums exceed the 1,024 of one request, so the call arrives as chunk 2 first, then chunk 1."""
    training = service.create_lora_training_client(MODEL, rank=2, seed=1)
    data = [datum(sentence(i, 2)) for i in range(1100)]
    output = training.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1100
    total = -sum(float(np.sum(o["logprobs"].data)) for o in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    step = training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert step.metrics is not None
    # A pass in two calls leaves the same gradient as in one.
    twin = service.create_lora_training_client(MODEL, rank=2, seed=1)
    twin.forward_backward(data[:500], "cross_entropy")
    twin.forward_backward(data[500:], "cross_entropy")
    again = twin.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert again.metrics == pytest.approx(step.metrics, rel=1e-3)


def test_logprobs_of_trainer_and_sampler_agree(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=4, seed=2)
    tokens = sentence(9, 20)
    for _ in range(3):
        training.forward_backward([datum(tokens)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    sampler = training.save_weights_and_get_sampling_client()
    trained = training.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert sampled[0] is None
    np.testing.assert_allclose(sampled[1:], trained, atol=1e-4)


def test_a_run_resumes_with_and_without_its_optimizer(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=4, seed=3, train_unembed=False)
    data = [datum(sentence(1, 10))]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    path = training.save_state("mid").result().path

    def next_losses(client: tinker.TrainingClient) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return losses

    expected = next_losses(training)
    assert next_losses(service.create_training_client_from_state_with_optimizer(path)) == expected
    fresh = next_losses(service.create_training_client_from_state(path))
    assert fresh[0] == expected[0]
    assert fresh[1] != expected[1]


@pytest.mark.slow
def test_the_async_face_works(service: tinker.ServiceClient) -> None:
    async def run() -> tuple[float, int]:
        training = await service.create_lora_training_client_async(MODEL, rank=2)
        step = await training.forward_backward_async([datum(sentence(2, 5))], "cross_entropy")
        await (await training.optim_step_async(types.AdamParams()))
        sampler = await training.save_weights_and_get_sampling_client_async()
        samples = await asyncio.gather(
            *(
                sampler.sample_async(
                    types.ModelInput.from_ints([7]), 1, types.SamplingParams(max_tokens=2, stop=[])
                )
                for _ in range(8)
            )
        )
        return (await step).metrics["loss:sum"], sum(len(s.sequences[0].tokens) for s in samples)

    loss, tokens = asyncio.run(run())
    assert loss > 0
    assert tokens == 16


@pytest.mark.slow
def test_one_poll_brings_many_samples(service: tinker.ServiceClient) -> None:
    assert service.holder.get_client_config().sample_use_retrieve_futures
    sampler = service.create_sampling_client(base_model=MODEL)
    params = types.SamplingParams(max_tokens=2, stop=[])
    futures = [sampler.sample(types.ModelInput.from_ints([5 + n]), 1, params) for n in range(60)]
    assert all(len(future.result(timeout=60).sequences[0].tokens) == 2 for future in futures)


def test_a_copy_of_a_sampler_has_a_number_of_its_own(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    params = types.SamplingParams(max_tokens=2, stop=[], seed=1)
    answers = [
        each.sample(types.ModelInput.from_ints([5]), 1, params).result(timeout=60).sequences[0].tokens
        for each in (sampler, *copies)
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_samples_that_are_given_up_leave_the_batch(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)

    async def give_up() -> None:
        endless = types.SamplingParams(max_tokens=240, stop=[])
        prompt = types.ModelInput.from_ints([5])
        tasks = [asyncio.create_task(sampler.sample_async(prompt, 8, endless)) for _ in range(20)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(give_up())
    short = types.SamplingParams(max_tokens=1, stop=[])
    assert sampler.sample(types.ModelInput.from_ints([5]), 1, short).result(timeout=60).sequences


def test_policy_gradient_losses_run(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2, seed=0)
    tokens = sentence(4, 6)
    logprobs = training.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [1.0] * 6}
    rl = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    for loss_fn in ("importance_sampling", "ppo"):
        output = training.forward_backward([rl], loss_fn).result()
        # On-policy every ratio is 1, so the loss is minus the sum of the advantages.
        assert output.metrics["loss:sum"] == pytest.approx(-6.0, abs=1e-3)


def test_custom_losses_run_on_the_client(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2, seed=0)
    data = [datum(sentence(5, 6)), datum(sentence(6, 4))]

    def squared(datums, logprobs):
        loss = sum((lp**2).sum() for lp in logprobs)
        return loss, {"mean_logprob:mean": float(sum(lp.detach().mean() for lp in logprobs))}

    output = training.forward_backward_custom(data, squared).result()
    assert output.metrics["loss:sum"] > 0
    assert "mean_logprob:mean" in output.metrics
    training.optim_step(types.AdamParams()).result()


def test_bad_input_is_a_typed_error_and_the_run_continues(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2, seed=0)
    good = [datum(sentence(5, 6))]
    before = training.forward(good, "cross_entropy").result().metrics["loss:sum"]
    with pytest.raises(tinker.BadRequestError, match="999999"):
        training.forward_backward([datum([5, 999_999, 7])], "cross_entropy").result()
    assert training.forward(good, "cross_entropy").result().metrics["loss:sum"] == before


@pytest.mark.slow
def test_the_server_lists_what_it_holds(service: tinker.ServiceClient, served_engine: ServedEngine) -> None:
    training = service.create_lora_training_client(MODEL, rank=2, user_metadata={"purpose": "listing"})
    path = training.save_state("listed").result().path
    assert MODEL in [m.model_name for m in service.get_server_capabilities().supported_models]
    info = training.get_info()
    assert (info.model_data.model_name, info.lora_rank) == (MODEL, 2)
    assert training.get_tokenizer().encode("hello")
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (MODEL, 2, {"purpose": "listing"})
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [path]
    weights = rest.get_weights_info_by_tinker_path(path).result()
    assert (weights.base_model, weights.is_lora, weights.lora_rank) == (MODEL, True, 2)


def test_a_wrong_key_is_rejected(served_engine: ServedEngine) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=served_engine.url, api_key="tml-wrong").create_lora_training_client(
            MODEL
        )


def test_an_unknown_model_is_answered_with_those_served(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.TinkerError, match=MODEL):
        service.create_lora_training_client("nobody/has-this")


def test_model_names_may_carry_a_context_length_up_to_the_models(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(f"{MODEL}:peft:64", rank=2)
    assert training.get_info().lora_rank == 2
    path = training.save_weights_for_sampler("suffix").result().path
    sampling = service.create_sampling_client(base_model=f"{MODEL}:peft:32;{path}")
    assert sampling.get_base_model() == f"{MODEL}:peft:32"
    with pytest.raises(tinker.BadRequestError, match="asks for a context of 262144 tokens"):
        service.create_lora_training_client(f"{MODEL}:peft:262144", rank=2)


def test_the_key_says_who_it_is(service: tinker.ServiceClient, served_engine: ServedEngine) -> None:
    rest = tinker.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    assert rest.whoami().result().user_urn == "tml:user:local"


def test_custom_losses_run_on_the_server(service: tinker.ServiceClient) -> None:
    torch = pytest.importorskip("torch")
    training = service.create_lora_training_client(MODEL, rank=2, seed=0)
    tokens = sentence(5, 6)
    data = [datum(tokens, [1.0] * 6)]

    def neg_ll(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/likelihood:mean": torch.exp(-loss)}

    handle = service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id
    output = training.forward_backward_custom(data, handle).result()
    plain = training.forward(data, "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert output.metrics["custom/likelihood:mean"] == pytest.approx(
        np.exp(-output.metrics["loss:sum"]), rel=1e-4
    )
    training.optim_step(types.AdamParams()).result()
