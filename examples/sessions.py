"""List the sessions on a server with their runs and samplers.

You will see a session created with a name, a training run and a sampler created in it, the newest sessions
listed, and the server's description of each.
"""

from __future__ import annotations

import os

import tinkex


def main() -> None:
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(
        base_url=base_url, display_name="sessions example", user_metadata={"purpose": "show sessions"}
    ) as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        service.create_sampling_client(base_model=model)

        rest = service.create_rest_client()
        # iter_sessions() returns all of them; access_scope="accessible" includes those of other users.
        page = rest.list_sessions(limit=5, access_scope="owned").result()
        print(f"the {len(page.sessions)} newest sessions:")
        for session_id in page.sessions:
            described = rest.get_session(session_id).result()
            print(f"  {session_id}  {described.display_name or '(no name)'}")
            print(f"    {len(described.training_run_ids)} runs, {len(described.sampler_ids)} samplers")
            print(f"    metadata: {described.user_metadata or {}}")
            if training.model_id in described.training_run_ids:
                print(f"    this program's session, with {training.model_id}")


if __name__ == "__main__":
    main()
