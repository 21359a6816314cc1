"""Count and time what a client does, without touching its code.

You will see twenty samples taken at once, and then, per endpoint, how many requests it took, how many failed,
and the median and worst of their times. A sink of a few lines is all it needs.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict

import tinkex
from tinkex import types
from tinkex.events import Event, RequestFinished


class Metrics:
    """Collects finished requests; it is called on the client's own thread, so it does nothing slow."""

    def __init__(self) -> None:
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)
        self.failed: Counter[str] = Counter()

    def emit(self, event: Event) -> None:
        """Takes one event of the client."""
        if isinstance(event, RequestFinished):
            self.times_s[event.endpoint].append(event.elapsed_s)
            self.failed[event.endpoint] += event.status is None or event.status >= 400

    def table(self) -> str:
        """All endpoints, a line each."""
        lines = [f"{'endpoint':26} {'requests':>8} {'failed':>7} {'median ms':>10} {'worst ms':>9}"]
        for endpoint, times in sorted(self.times_s.items()):
            median, worst = statistics.median(times) * 1e3, max(times) * 1e3
            lines.append(
                f"{endpoint:26} {len(times):8} {self.failed[endpoint]:7} {median:10.1f} {worst:9.1f}"
            )
        return "\n".join(lines)


def main() -> None:
    metrics = Metrics()
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tinkex.ServiceClient(base_url=base_url, events=metrics) as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("Once upon a time"))
        params = types.SamplingParams(max_tokens=8)
        futures = [sampler.sample(prompt, 1, params) for _ in range(20)]
        tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
        print(f"{len(futures)} samples, {tokens} tokens\n")
    print(metrics.table())


if __name__ == "__main__":
    main()
