"""Put an image into a prompt.

You will see the chunks of a prompt with a small image and their lengths, and the model's answer. A text-only
model rejects the prompt with an error; choose a vision model with TINKER_BASE_MODEL.
"""

from __future__ import annotations

import os
import struct
import zlib

import tinkex
from tinkex import types

SIZE, NUM_IMAGE_TOKENS = 32, 16


def red_disc() -> bytes:
    """Returns a PNG of a red disc on white."""
    rows = []
    for y in range(SIZE):
        inside = [(x - SIZE / 2) ** 2 + (y - SIZE / 2) ** 2 < (SIZE / 3) ** 2 for x in range(SIZE)]
        rows.append(b"\0" + b"".join(b"\xd0\x20\x20" if red else b"\xff\xff\xff" for red in inside))

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    image = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + image


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()
        picture = red_disc()
        # expected_tokens gives the client the prompt's length; the server rejects a wrong number.
        prompt = (
            types.ModelInput.from_ints(tokenizer.encode("Look at this picture:"))
            .append(types.ImageChunk(data=picture, format="png", expected_tokens=NUM_IMAGE_TOKENS))
            .append(types.EncodedTextChunk(tokens=tokenizer.encode("What colour is the disc?")))
        )
        for part in prompt.chunks:
            print(f"  {part.type:14} {part.length:3} tokens")
        print(f"a prompt of {prompt.length} tokens, with an image of {len(picture)} bytes")
        try:
            answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16)).result().sequences[0]
            print(f"answer of {model}: {tokenizer.decode(answer.tokens, skip_special_tokens=True)!r}")
        except tinkex.TinkexError as error:
            print(f"{model} does not support images: {error}")


if __name__ == "__main__":
    main()
