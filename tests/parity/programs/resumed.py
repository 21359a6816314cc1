"""Stop and resume: with and without the optimizer's state, by the newer names and by the older ones."""

import asyncio

import tinker
from tinker import types


def batch(step):
    tokens = [(5 * step + 11 * place) % 300 + 5 for place in range(9)]
    return [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]


def some_steps(training, steps):
    losses = []
    for step in steps:
        passed = training.forward_backward(batch(step), "cross_entropy")
        training.optim_step(adam_params=types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


async def go_on(service, path):
    training = await service.create_training_client_from_state_with_optimizer_async(path)
    return await asyncio.to_thread(some_steps, training, range(3, 6))


async def by_the_older_name(service, base_model, path):
    training = await service.create_lora_training_client_async(base_model, rank=4, seed=3)
    await (await training.load_state_async(path))
    return await asyncio.to_thread(some_steps, training, range(3, 6))


def main():
    service = tinker.ServiceClient()
    base_model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(
        base_model, rank=4, seed=3, user_metadata={"recipe": "resume"}
    )
    found = {"first": some_steps(training, range(3))}
    path = training.save_state("resume-0003").result().path
    found["never_stopped"] = some_steps(training, range(3, 6))
    found["with_optimizer"] = asyncio.run(go_on(service, path))
    fresh = service.create_training_client_from_state(path, user_metadata={"recipe": "fresh"})
    found["fresh_optimizer"] = some_steps(fresh, range(3, 6))
    found["load_state"] = asyncio.run(by_the_older_name(service, base_model, path))

    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    found["run"] = (
        run.base_model,
        run.lora_rank,
        run.user_metadata,
        run.training_run_id == training.model_id,
    )
    found["checkpoints"] = [
        (one.checkpoint_id, one.checkpoint_type)
        for one in rest.list_checkpoints(training.model_id).result().checkpoints
    ]
    sampler = fresh.save_weights_and_get_sampling_client(name="ignored")
    found["sampler"] = (sampler.get_base_model(), isinstance(sampler._sampling_session_id, str))
    rest.delete_checkpoint_from_tinker_path(path).result()
    try:
        service.create_training_client_from_state(path)
    except tinker.NotFoundError as error:
        found["gone"] = error.status_code
    try:
        training.forward_backward([], "cross_entropy")
    except ValueError as error:
        found["empty"] = type(error).__name__
    service.close("success").result()
    return found
