"""Put an image between the words of a prompt.

You will see a small picture drawn, the prompt around it chunk by chunk with its length, and what the model
says to it. A model that only reads text refuses, and says so; name one that sees with TINKER_BASE_MODEL.
"""

from __future__ import annotations

import os
import struct
import zlib

import tinkex
from tinkex import types

SIZE, TOKENS_OF_IMAGE = 32, 16


def red_disc() -> bytes:
    """A PNG of a red disc on white, drawn here, so that no file is needed."""
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
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()
        picture = red_disc()
        # expected_tokens lets a client know the length of the prompt; a server that counts otherwise refuses.
        prompt = (
            types.ModelInput.from_ints(tokenizer.encode("Look at this picture:"))
            .append(types.ImageChunk(data=picture, format="png", expected_tokens=TOKENS_OF_IMAGE))
            .append(types.EncodedTextChunk(tokens=tokenizer.encode("What colour is the disc?")))
        )
        for part in prompt.chunks:
            print(f"  {part.type:14} {part.length:3} tokens")
        print(f"a prompt of {prompt.length} tokens, with an image of {len(picture)} bytes")
        try:
            answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16)).result().sequences[0]
            print(f"{model} says {tokenizer.decode(answer.tokens, skip_special_tokens=True)!r}")
        except tinkex.TinkexError as error:
            print(f"{model} cannot see: {error}")


if __name__ == "__main__":
    main()
