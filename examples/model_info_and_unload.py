"""Ask a run what it is, and free its place on the server when you are done.

You will see the run's model, tokenizer and rank, the run unloaded, what the server says to an operation that
comes too late, and a new run made from the checkpoint that was saved before.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        info = training.get_info()
        print(f"run        {info.model_id}")
        print(f"model      {info.model_data.model_name} ({info.model_data.arch})")
        print(f"tokenizer  {info.model_data.tokenizer_id}")
        print(f"LoRA       {info.is_lora}, rank {info.lora_rank}")

        path = training.save_state("before-unloading").result().path
        print("unloaded  ", training.unload().result().model_id)  # live weights go, checkpoints stay
        datum = types.Datum(types.ModelInput.from_ints([5, 9]), {"target_tokens": [9, 12]})
        try:
            training.forward_backward([datum], "cross_entropy").result()
        except tinkex.APIStatusError as error:
            print(f"too late   {error.status_code}: {error}")
        again = service.create_training_client_from_state_with_optimizer(path)
        print("goes on as", again.model_id)


if __name__ == "__main__":
    main()
