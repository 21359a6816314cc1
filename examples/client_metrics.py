"""Count and time what a client does, without touching its code.

You will see twenty samples taken at once, and then, per endpoint, how many requests it took, how many failed,
and the median, the 95th percentile and the worst of their times; at the end a few of the same lines as Prometheus reads them.
"""

from __future__ import annotations

import os
import re

import tinkex
from tinkex import types
from tinkex.observability.metrics import MetricsSink, Snapshot

REQUESTS = re.compile(r'tinkex_requests_total\{endpoint="(\w+)",outcome="(\w+)"\}')


def table(seen: Snapshot) -> str:
    """All endpoints, a line each."""
    requests: dict[str, dict[str, int]] = {}
    for name, count in seen.counters.items():
        if found := REQUESTS.fullmatch(name):
            requests.setdefault(found[1], {})[found[2]] = int(count)
    lines = [f"{'endpoint':26} {'requests':>8} {'failed':>7} {'p50 ms':>8} {'p95 ms':>8} {'worst ms':>9}"]
    for endpoint, outcomes in sorted(requests.items()):
        took = seen.histograms[f'tinkex_request_duration_ms{{endpoint="{endpoint}"}}']
        total = sum(outcomes.values())
        failed = total - outcomes.get("ok", 0)
        lines.append(f"{endpoint:26} {total:8} {failed:7} {took.p50:8.1f} {took.p95:8.1f} {took.max:9.1f}")
    return "\n".join(lines)


def main() -> None:
    sink = MetricsSink()
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url, events=sink) as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
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
