"""Put an image into a prompt, train and resume with the optimizer, and clean up.

You will see the chunks of a prompt with a small image and their lengths, and the answer of the server's vision model;
a server without one rejects the image with an error. Then a run trains a step, is saved, resumed as a new run with its
optimizer, and everything is unloaded and deleted.
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
    image = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        image += struct.pack(">I", len(content)) + kind + content + checksum
    return image


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        names = service.get_server_capabilities().model_names()
        vision = next((name for name in names if "-VL-" in name), None)
        model = os.environ.get("TINKER_BASE_MODEL") or vision or names[0]
        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()
        picture = red_disc()
        # expected_tokens gives the client the prompt's length; the server rejects a wrong number.
        prompt = (
            types.ModelInput.from_text("Look at this picture:", tokenizer)
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

        training = service.create_lora_training_client(model, rank=4, seed=0)
        tokens = tokenizer.encode("The disc is red.")
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]

        def step(run: tinkex.TrainingClient) -> float:
            backward = run.forward_backward(batch, "cross_entropy")
            run.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            return backward.result().loss

        first = step(training)
        path = training.save_state("disc").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path)
        second, third = step(training), step(resumed)
        print(f"loss {first:.4f}, after a step {second:.4f}; resumed as {resumed.model_id[-7:]}: {third:.4f}")

        for run in (training, resumed):
            print("unloaded", run.unload().result().model_id)
        rest = service.create_rest_client()
        rest.delete_checkpoint_from_tinker_path(path).result()
        left = len(rest.list_checkpoints(training.model_id).result().checkpoints)
        print(f"deleted {path}, {left} checkpoints left")


if __name__ == "__main__":
    main()
