"""Create, describe and unload a run with plain calls, and poll each operation by hand.

You will see the calls of the protocol and the states that each poll returns, the run's model, tokenizer and rank,
the run unloaded, the error of an operation on the unloaded run, and a new run created from its checkpoint.
"""

from __future__ import annotations

import os
import time

import tinkex
from tinkex import types


def poll(rest: tinkex.RestClient, name: str, request_id: str) -> dict:
    """Polls until an operation has finished, and prints the state that each poll returns."""
    while True:
        request = {"request_id": request_id, "allow_metadata_only": False}
        state = types.parse_future_response(rest.post("/api/v1/retrieve_future", request).result() or {})
        print(f"  {name}: {type(state).__name__}")
        if isinstance(state, types.FutureCompletedResponse):
            return state.result
        if isinstance(state, types.FutureFailedResponse | types.RequestFailedResponse):
            raise SystemExit(f"{name} failed: {state}")
        time.sleep((getattr(state, "retry_after_ms", None) or 50) / 1000)


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        rest = service.create_rest_client()
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]

        def submit(name: str, body: dict) -> dict:
            accepted = rest.post(f"/api/v1/{name}", body).result()
            return {**accepted, **poll(rest, name, accepted["request_id"])}

        opened = {"tags": ["example"], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"}
        session_id = rest.post("/api/v1/create_session", opened).result()["session_id"]
        wanted = {"session_id": session_id, "model_seq_id": 0, "base_model": model}
        created = submit("create_model", {**wanted, "lora_config": {"rank": 4}, "type": "create_model"})
        run = created["model_id"]
        info = rest.post("/api/v1/get_info", {"model_id": run, "type": "get_info"}).result()
        print(f"run        {info['model_id']}")
        print(f"model      {info['model_data']['model_name']} ({info['model_data']['arch']})")
        print(f"tokenizer  {info['model_data']['tokenizer_id']}")
        print(f"LoRA       {info['is_lora']}, rank {info['lora_rank']}")

        saved = submit(
            "save_weights", {"model_id": run, "path": "before", "seq_id": 1, "type": "save_weights"}
        )
        # An operation can also be polled by its id alone, by any client of the same key.
        again = service.poll(saved["request_id"], types.SaveWeightsResponse).result()
        print(f"saved      {again.path}")
        submit("unload_model", {"model_id": run, "type": "unload_model"})
        print(f"unloaded   {run}")  # its weights are freed, its checkpoints are kept
        try:
            rest.post("/api/v1/optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}).result()
        except tinkex.APIStatusError as error:
            print(f"error      {error.status_code}, retryable: {error.retryable}: {error}")
        resumed = service.create_training_client_from_state_with_optimizer(again.path)
        print("resumed as", resumed.model_id)


if __name__ == "__main__":
    main()
