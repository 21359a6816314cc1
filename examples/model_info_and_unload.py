"""Query the properties of a run, and unload it to free memory on the server.

You will see the run's model, tokenizer and rank, the run unloaded, the error of an operation on the unloaded
run, and a new run created from its checkpoint.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        info = training.get_info()
        print(f"run        {info.model_id}")
        print(f"model      {info.model_data.model_name} ({info.model_data.arch})")
        print(f"tokenizer  {info.model_data.tokenizer_id}")
        print(f"LoRA       {info.is_lora}, rank {info.lora_rank}")

        path = training.save_state("before-unloading").result().path
        print("unloaded  ", training.unload().result().model_id)  # frees the weights, keeps the checkpoints
        datum = types.Datum(types.ModelInput.from_ints([5, 9]), {"target_tokens": [9, 12]})
        try:
            training.forward_backward([datum], "cross_entropy").result()
        except tinkex.APIStatusError as error:
            print(f"error      {error.status_code}: {error}")
        again = service.create_training_client_from_state_with_optimizer(path)
        print("resumed as", again.model_id)


if __name__ == "__main__":
    main()
