"""Keeping house: checkpoints with lifetimes and notes, listings and pages, publishing, cleaning up, what is not there."""

import asyncio
import datetime as dt

import tinker
from tinker import types


def train_a_little(training):
    tokens = list(range(20, 32))
    data = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def facts(checkpoint, now):
    return (
        checkpoint.checkpoint_id,
        checkpoint.checkpoint_type,
        checkpoint.public,
        isinstance(checkpoint.size_bytes, int) and checkpoint.size_bytes > 0,
        abs(checkpoint.time - now) < dt.timedelta(hours=1),
        None
        if checkpoint.expires_at is None
        else round((checkpoint.expires_at - now).total_seconds() / 3600),
        checkpoint.tinker_path.rpartition("/")[2],
    )


async def pages(rest, run_id):
    every = await rest.list_user_checkpoints_async(limit=100)
    runs = await rest.list_training_runs_async(limit=100, offset=0)
    one = await rest.get_training_run_async(run_id)
    small = await rest.list_training_runs_async(limit=1)
    return {
        "mine": sorted(c.checkpoint_id for c in every.checkpoints if run_id in c.tinker_path),
        "listed": run_id in [run.training_run_id for run in runs.training_runs],
        "same": one == next(run for run in runs.training_runs if run.training_run_id == run_id),
        "page": (len(small.training_runs), small.cursor.limit, small.cursor.offset),
        "kept": (one.lora_rank, one.base_model, one.user_metadata, one.corrupted, one.is_lora),
    }


def failing(calls):
    found = []
    for call in calls:
        try:
            call()
            found.append("done")
        except tinker.APIStatusError as error:
            found.append((type(error).__name__, error.status_code, type(error.body).__name__))
        except ValueError:
            found.append("ValueError")
    return found


def main():
    service = tinker.ServiceClient(user_metadata={"team": "a"})
    base_model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(
        base_model, rank=4, seed=8, user_metadata={"recipe": "keep"}
    )
    train_a_little(training)
    now = dt.datetime.now(dt.UTC)
    first = training.save_state("step-1", ttl_seconds=7200).result().path
    second = training.save_state("step-2", user_metadata={"note": "best"}).result().path
    sampler = training.save_weights_for_sampler("step-2").result().path
    again = training.save_state("step-2", overwrite=True).result().path

    rest = service.create_rest_client()
    run_id = types.ParsedCheckpointTinkerPath.from_tinker_path(second).training_run_id
    rest.publish_checkpoint_from_tinker_path(second).result()
    public = [c.public for c in rest.list_checkpoints(run_id).result().checkpoints if c.tinker_path == second]
    rest.unpublish_checkpoint_from_tinker_path(second).result()
    rest.set_checkpoint_ttl_from_tinker_path(second, 36_000).result()
    rest.set_checkpoint_ttl_from_tinker_path(first, None).result()
    listed = rest.list_checkpoints(run_id).result()
    found = {
        "again": again == second,
        "public": public,
        "checkpoints": sorted(facts(checkpoint, now) for checkpoint in listed.checkpoints),
        "by_path": rest.get_training_run_by_tinker_path(sampler).result().training_run_id == run_id,
        "weights": rest.get_weights_info_by_tinker_path(second).result().model_dump(),
        "session": run_id in rest.get_session(run_id.partition(":")[0]).result().training_run_ids,
        "sessions": run_id.partition(":")[0] in rest.list_sessions(limit=100).result().sessions,
        **asyncio.run(pages(rest, run_id)),
    }
    rest.delete_checkpoint(run_id, "weights/step-1").result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    found["left"] = [c.checkpoint_id for c in rest.list_checkpoints(run_id).result().checkpoints]
    found["failing"] = failing(
        [
            lambda: rest.delete_checkpoint_from_tinker_path(sampler).result(),
            lambda: rest.get_training_run("no-such-run").result(),
            lambda: rest.list_checkpoints("no-such-run").result(),
            lambda: rest.get_session("no-such-session").result(),
            lambda: rest.get_training_run_by_tinker_path("weights/step-2").result(),
            lambda: service.create_sampling_client(model_path=sampler),
            service.create_sampling_client,
            lambda: training.save_state("step-2").result(),
            lambda: service.create_lora_training_client("no/such-model"),
        ]
    )
    train_a_little(training)
    try:
        with service:
            raise LookupError("the program fails")
    except LookupError:
        found["closed"] = service.close("success").result()
    try:
        service.create_sampling_client(base_model=base_model)
    except RuntimeError:
        found["used"] = "RuntimeError"
    return found
