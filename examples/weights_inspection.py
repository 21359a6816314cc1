"""Inspect a checkpoint: its run, its weights, its archive and its sampler.

You will see the run and its checkpoint in the server's lists, the LoRA settings of the weights, the URL of
their archive, and the description of a sampler created from them.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, train_unembed=False)
        path = training.save_weights_for_sampler("inspected").result().path
        rest = service.create_rest_client()

        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        print(f"path     {path}")
        print(f"         a {parsed.checkpoint_type} checkpoint of {parsed.training_run_id}")

        runs = rest.list_training_runs(limit=3).result()
        print(
            f"runs     {runs.cursor.total_count}, the newest of them {runs.training_runs[0].training_run_id}"
        )
        run = rest.get_training_run_by_tinker_path(path).result()
        print(f"its run  {run.base_model}, rank {run.lora_rank}, corrupted: {run.corrupted}")
        print(f"         last sampler checkpoint {run.last_sampler_checkpoint.checkpoint_id}")

        info = rest.get_weights_info_by_tinker_path(path).result()
        trained = [name for name in ("attn", "mlp", "unembed") if getattr(info, f"train_{name}")]
        print(f"weights  LoRA of rank {info.lora_rank} on {', '.join(trained)} of {info.base_model}")

        archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        print(f"archive  {archive.url.partition('?')[0]}")

        service.create_sampling_client(model_path=path)
        session = rest.get_session(service.holder.get_session_id()).result()
        sampler = rest.get_sampler(session.sampler_ids[-1]).result()
        print(f"sampler  {sampler.sampler_id}")
        print(f"         of {sampler.base_model}, from {sampler.model_path}")


if __name__ == "__main__":
    main()
