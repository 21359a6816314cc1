"""Benchmarks decoding against llama.cpp: the same GGUF file, in one run.

    pip install -c constraints.txt -e '.[engine,bench]'
    python benchmarks/bench_llama_cpp.py MODEL.gguf [--quantised] [--rounds N] [--threads N]

llama.cpp loads the weights dequantised to an fp32 file, as our engine does in memory; with ``--quantised`` it loads the file as
it is, and computes with fewer bits than we do. Its server decodes the sequences in one batch; the cost of prompts and HTTP calls
is measured with one token and subtracted. With ``--threads 1`` times are CPU seconds, which other load changes least.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engine_cases import decode_seconds
from engine_sides import Ours, clock, random_tokens

CONTEXT, STEPS = 80, 32
BATCHES = {1: 0.9, 8: 1.1, 32: 1.1, 64: 1.1}
"""Batch size → target ratio to llama.cpp's speed."""
QUANTISED = {1: 1.0, 8: 1.7, 32: 1.5, 64: 1.6}
"""The same, with llama.cpp on the quantised weights."""


class LlamaCpp:
    """llama.cpp's server with a number of parallel sequences."""

    def __init__(self, model: Path, num_sequences: int, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = num_sequences
        params.n_ctx = num_sequences * 256
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = False
        params.endpoint_metrics = False
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(num_sequences)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Returns the duration of the steps after the first one."""
        return self._generate(prompts, steps + 1) - self._generate(prompts, 1)

    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        start = clock()
        responses = list(self._pool.map(lambda prompt: self._complete(prompt, new_tokens), prompts))
        elapsed = clock() - start
        for response in responses:
            if response["tokens_predicted"] != new_tokens:
                raise SystemExit(f"llama.cpp sampled {response['tokens_predicted']} of {new_tokens} tokens")
        return elapsed

    def _complete(self, prompt: Sequence[int], new_tokens: int) -> Any:
        body = {"prompt": list(prompt), "n_predict": new_tokens, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)


def as_fp32(source: Path, target: Path) -> None:
    """Writes a GGUF file with the same contents and all tensors in fp32."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(skipped):
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1])
    writer.add_file_type(0)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path, nargs="?", help="model file; without it nothing is measured")
    parser.add_argument(
        "--quantised", action="store_true", help="llama.cpp computes with the quantised weights"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.gguf is None:
        print(
            "llama.cpp: not measured; run pip install -c constraints.txt -e '.[bench]', and give a GGUF file"
        )
        return
    torch.set_num_threads(options.threads)
    ours = Ours(str(options.gguf))
    print(
        f"| decode, llama.cpp in {'the format of the file' if options.quantised else 'fp32'} | ours | llama.cpp | ratio | aim | |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = options.gguf if options.quantised else Path(directory) / "fp32.gguf"
        if not options.quantised:
            as_fp32(options.gguf, model)
        for batch, aim in (QUANTISED if options.quantised else BATCHES).items():
            theirs = LlamaCpp(model, batch, options.threads)
            mine, other = [], []
            for number in range(options.rounds):
                prompts = [random_tokens(CONTEXT, 1000 * number + 100 * batch + i) for i in range(batch)]
                mine.append(batch * STEPS / decode_seconds(ours, prompts, STEPS))
                other.append(batch * STEPS / theirs.decode(prompts, STEPS))
            ratio = max(mine) / max(other)
            print(
                f"| batch of {batch} | {max(mine):,.0f} tokens/s | {max(other):,.0f} tokens/s | {ratio:.2f} × | ≥ {aim} × | "
                f"{'met' if ratio >= aim else 'missed'} |",
                flush=True,
            )
            del theirs


if __name__ == "__main__":
    main()
