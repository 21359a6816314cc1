"""Count and time a client's requests with a metrics sink.

You will see twenty concurrent samples, then per endpoint the number of requests and failures and the p50, p95
and maximum duration, and a few lines in Prometheus format.
"""

from __future__ import annotations

import os
import re

import tinkex
from tinkex import types
from tinkex.observability.metrics import MetricsSink, Snapshot

REQUESTS = re.compile(r'tinkex_requests_total\{endpoint="(\w+)",outcome="(\w+)"\}')


def table(snapshot: Snapshot) -> str:
    """Formats one line per endpoint."""
    requests: dict[str, dict[str, int]] = {}
    for name, count in snapshot.counters.items():
        if found := REQUESTS.fullmatch(name):
            requests.setdefault(found[1], {})[found[2]] = int(count)
    lines = [f"{'endpoint':26} {'requests':>8} {'failed':>7} {'p50 ms':>8} {'p95 ms':>8} {'max ms':>9}"]
    for endpoint, outcomes in sorted(requests.items()):
        duration = snapshot.histograms[f'tinkex_request_duration_ms{{endpoint="{endpoint}"}}']
        total = sum(outcomes.values())
        failed = total - outcomes.get("ok", 0)
        lines.append(
            f"{endpoint:26} {total:8} {failed:7} {duration.p50:8.1f} {duration.p95:8.1f} {duration.max:9.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    sink = MetricsSink()
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url, events=sink) as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("Once upon a time"))
        params = types.SamplingParams(max_tokens=8)
        futures = [sampler.sample(prompt, 1, params) for _ in range(20)]
        tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
        print(f"{len(futures)} samples, {tokens} tokens\n")
    print(table(sink.metrics.snapshot()))
    print("\n" + "\n".join(sink.metrics.prometheus().splitlines()[:4]))


if __name__ == "__main__":
    main()
