"""Send more data than fits into one request, and set every parameter of the optimizer.

You will see 1,025 examples sent as two requests, because servers accept at most 1,024 per request, and
returned as one output; then one optimizer step with weight decay and gradient clipping, and the new loss.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types
from tinkex.observability.events import RequestFinished


class Requests:
    """Counts the client's requests by endpoint."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, RequestFinished):
            self.count[event.endpoint] = self.count.get(event.endpoint, 0) + 1


def main() -> None:
    requests = Requests()
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url, events=requests) as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, seed=0)

        data = [
            types.Datum(types.ModelInput.from_ints([5, n % 200]), {"target_tokens": [n % 200, 7]})
            for n in range(1025)
        ]
        passed = training.forward_backward(data, "cross_entropy").result()
        before = passed.metrics["loss:sum"] / len(data)
        print(f"{len(data)} examples in {requests.count['forward_backward']} requests")
        print(f"one output with {len(passed.loss_fn_outputs)} rows, loss per example {before:.4f}")

        params = types.AdamParams(
            learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
        )
        applied = training.optim_step(params).result()
        for name, value in (applied.metrics or {}).items():
            print(f"  {name} {value:.4f}")
        after = training.forward(data[:256], "cross_entropy").result().metrics["loss:sum"] / 256
        print(f"loss per example after one step {after:.4f}")


if __name__ == "__main__":
    main()
