"""Upload files as forms: images for prompts, and nested fields beside a file.

You will see the same image uploaded from a path, bytes, an open file and a pipe, stored once on the server; how
names that would break a header are escaped; the response to a prompt that refers to the image; and a form with nested
fields and a file, as a server of the example's own received it.
"""

from __future__ import annotations

import email
import os
import struct
import tempfile
import zlib
from pathlib import Path

import tinkex
from tinkex import types
from tinkex.testing import MockTransport, reply

NOTE = {"title": "squares", "tags": ["grey", "small"], "size": {"width": 64, "height": None}, "draft": True}


def grey_square(size: int) -> bytes:
    """Returns a grey PNG."""
    rows = zlib.compress(b"".join(b"\0" + bytes([128]) * size for _ in range(size)))
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    picture = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        picture += struct.pack(">I", len(content)) + kind + content + checksum
    return picture


def upload_images(service: tinkex.ServiceClient, folder: Path) -> None:
    """Uploads an image in every form, refers to it in a prompt, and deletes it."""
    rest, picture, path = service.create_rest_client(), grey_square(64), folder / "square.png"
    path.write_bytes(picture)
    reading, writing = os.pipe()
    os.write(writing, picture)
    os.close(writing)
    with path.open("rb") as file, os.fdopen(reading, "rb") as pipe:
        forms = {"path": path, "bytes": ("square.png", picture), "file": file, "pipe": ("piped", pipe)}
        for kind, form in forms.items():
            asset = rest.upload_asset(form, ttl_seconds=3600).result()
            print(f"{kind:5} {asset.size_bytes} bytes {asset.format} {asset.location}")
    odd, large = rest.upload_assets([('a"b\r\nX: 1.png', picture), ("large", grey_square(512))]).result()
    asset_ids = {asset.asset_id, odd.asset_id, large.asset_id}
    print(f"names: {odd.name} and {large.name}; {len(asset_ids)} different images on the server")
    try:
        rest.upload_asset("square.png")  # type: ignore[arg-type]
    except tinkex.UploadError as error:
        print(f"rejected: {error}")
    model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
    sampler = service.create_sampling_client(base_model=model)
    prompt = types.ModelInput(chunks=[asset.chunk(expected_tokens=16)])
    try:
        answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8)).result().sequences[0]
        print(f"answer: {sampler.get_tokenizer().decode(answer.tokens)!r}")
    except tinkex.TinkexError as error:
        print(f"images are not supported: {error}")
    for asset_id in asset_ids:
        rest.delete_asset(asset_id).result()


def receive(request):
    """Prints the parts of a form."""
    kind = request.headers["content-type"].encode()
    for part in email.message_from_bytes(b"content-type: " + kind + b"\r\n\r\n" + request.body).get_payload():
        name = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        print(f"  {name:20} {f'a file of {len(value)} bytes' if part.get_filename() else value.decode()}")
    return reply({"status": "stored"})


def main() -> None:
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with tempfile.TemporaryDirectory() as folder, tinkex.ServiceClient(base_url=base_url) as service:
        upload_images(service, Path(folder))
    print("a form with nested fields:")
    rest = tinkex.RestClient(base_url="http://127.0.0.1", transport=MockTransport(receive))
    print(rest.post("/api/v1/notes", {"note": NOTE}, files={"image": ("a.png", grey_square(4))}).result())


if __name__ == "__main__":
    main()
