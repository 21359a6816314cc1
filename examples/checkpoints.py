"""List checkpoints page by page, publish one, set the TTL of one, and delete one.

You will see three checkpoints of a new run, all your checkpoints page by page, and the three again after the
changes.
"""

from __future__ import annotations

import os

import tinkex


def show(rest: tinkex.RestClient, run_id: str) -> None:
    for one in rest.list_checkpoints(run_id).result().checkpoints:
        access = "public" if one.public else "private"
        expires = f"expires {one.expires_at:%Y-%m-%d %H:%M}" if one.expires_at else "never expires"
        print(
            f"  {one.checkpoint_id:22} {one.checkpoint_type:9} {one.size_bytes:>9,} bytes  {access}, {expires}"
        )


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        rest = service.create_rest_client()

        first = training.save_state("step-1").result().path
        second = training.save_state("step-2").result().path
        sampler = training.save_weights_for_sampler("step-2").result().path
        print(f"checkpoints of {training.model_id}")
        show(rest, training.model_id)

        offset, total = 0, 1
        while offset < total:
            page = rest.list_user_checkpoints(limit=2, offset=offset).result()
            total = page.cursor.total_count
            print(f"yours, {offset + 1} to {offset + len(page.checkpoints)} of {total}:")
            print(*(f"  {one.tinker_path}" for one in page.checkpoints), sep="\n")
            offset += len(page.checkpoints)
            if offset >= 6:  # iter_user_checkpoints() fetches all pages
                break

        rest.publish_checkpoint_from_tinker_path(sampler).result()
        rest.set_checkpoint_ttl_from_tinker_path(second, 3600).result()
        rest.delete_checkpoint_from_tinker_path(first).result()
        print("after publishing one, setting the TTL of one and deleting one")
        show(rest, training.model_id)


if __name__ == "__main__":
    main()
