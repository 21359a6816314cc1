"""Upload images as files, and refer to them in a prompt.

You will see the same image uploaded from a path, bytes, an open file and a pipe, stored once on the server; how
names that would break a header are escaped; and the response to a prompt that refers to the image.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from pathlib import Path

import tinkex
from tinkex import types


def grey_square(size: int) -> bytes:
    """Returns a grey PNG."""
    rows = zlib.compress(b"".join(b"\0" + bytes([128]) * size for _ in range(size)))
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    picture = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        picture += struct.pack(">I", len(content)) + kind + content + checksum
    return picture


def main() -> None:
    picture = grey_square(64)
    with (
        tempfile.TemporaryDirectory() as folder,
        tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service,
    ):
        rest = service.create_rest_client()
        path = Path(folder) / "square.png"
        path.write_bytes(picture)
        reading, writing = os.pipe()
        os.write(writing, picture)
        os.close(writing)
        with path.open("rb") as file, os.fdopen(reading, "rb") as pipe:
            uploads = [
                rest.upload_asset(path, ttl_seconds=3600),
                rest.upload_asset(("square.png", picture)),
                rest.upload_asset(file),
                rest.upload_asset(("piped", pipe, "image/png")),
            ]
            for kind, upload in zip(("path", "bytes", "file", "pipe"), uploads, strict=True):
                asset = upload.result()
                print(f"{kind:5} {asset.size_bytes} bytes {asset.format} {asset.location}")
        odd, large = rest.upload_assets([('a"b\r\nX: 1.png', picture), ("large", grey_square(512))]).result()
        print(f"names: {odd.name} and {large.name}")
        asset_ids = {asset.asset_id, odd.asset_id, large.asset_id}
        print(f"{len(asset_ids)} different images on the server")
        try:
            rest.upload_asset("square.png")  # type: ignore[arg-type]
        except tinkex.UploadError as error:
            print(f"rejected: {error}")

        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        prompt = types.ModelInput(chunks=[asset.chunk(expected_tokens=16)])
        try:
            answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8)).result().sequences[0]
            print(f"answer: {sampler.get_tokenizer().decode(answer.tokens)!r}")
        except tinkex.TinkexError as error:
            print(f"images are not supported: {error}")
        for asset_id in asset_ids:
            rest.delete_asset(asset_id).result()


if __name__ == "__main__":
    main()
