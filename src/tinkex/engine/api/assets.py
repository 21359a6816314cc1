"""Assets: uploading, listing and deleting images."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.limits import page
from tinkex.engine.api.multipart import FormReader
from tinkex.engine.intake.assets import AssetUpload, find_asset, location_of
from tinkex.engine.store import AssetRow
from tinkex.errors import InvalidInput, TooLarge, Unsupported
from tinkex.types import Asset, AssetsListResponse, AssetsResponse, Cursor

FIELDS = frozenset({"ttl_seconds"})
IMAGES_PER_UPLOAD = 4
"""How many images of the largest size fit into one form; it is written to disk while it arrives."""


async def upload_assets(call: Call) -> Reply:
    """Store the images of a multipart form: all of them or none."""
    assert call.body_stream is not None
    if call.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
        raise Unsupported("images are already compressed; send them without Content-Encoding.")
    max_bytes, size = IMAGES_PER_UPLOAD * call.engine.config.max_asset_bytes, 0
    content_length = call.headers.get("content-length", "")
    if content_length.isdigit() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    upload = AssetUpload(call.engine.config, call.engine.store, call.owner)
    try:
        reader = FormReader(call.headers.get("content-type", ""), upload)
        async for chunk in call.body_stream:
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            # On a thread: parsing, hashing and writing would block the event loop.
            await asyncio.to_thread(reader.write, chunk)
        reader.finish()
        ttl = _ttl(reader.fields, call.engine.config.asset_retention_s)
        rows = await asyncio.to_thread(upload.commit, ttl)
    finally:
        await asyncio.to_thread(upload.discard)
    await call.engine.flushed()
    call.audit_details.update(
        assets=[row.asset_id for row in rows], size_bytes=sum(row.size_bytes for row in rows)
    )
    return AssetsResponse(assets=[_asset(row) for row in rows])


async def list_assets(call: Call) -> Reply:
    """Returns a page of the user's images, newest first."""
    limit, offset = page(call.query, default_limit=100)
    store, now = call.engine.store, time.time()
    return AssetsListResponse(
        assets=[_asset(row) for row in store.assets.of_owner(call.owner, now, limit, offset)],
        cursor=Cursor(offset=offset, limit=limit, total_count=store.assets.count(call.owner, now)),
    )


async def get_asset(call: Call) -> Reply:
    """Returns one image of the user."""
    return _asset(find_asset(call.engine.store, call.owner, call.parameters["asset_id"]))


async def delete_asset(call: Call) -> Reply:
    """Delete an image."""
    row = find_asset(call.engine.store, call.owner, call.parameters["asset_id"])
    if call.engine.store.assets.delete(row):
        await asyncio.to_thread(call.engine.store.directories.remove_asset, row.file)
    return None


def _ttl(fields: Mapping[str, str], max_seconds: float) -> float | None:
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise InvalidInput(f"the form has an unknown field {unknown[0]!r}; a file needs a filename.")
    text = fields.get("ttl_seconds")
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= max_seconds:
        raise InvalidInput(
            f"ttl_seconds is {text[:40]!r}; this server accepts 1 to {int(max_seconds)} seconds."
        )
    return float(int(text))


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(
        f"this upload is larger than this server's limit of {max_bytes} bytes; send fewer images per request."
    )


def _asset(row: AssetRow) -> Asset:
    return Asset(
        asset_id=row.asset_id,
        location=location_of(row.asset_id),
        name=row.name,
        format="png" if row.format == "png" else "jpeg",
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        created_at=datetime.fromtimestamp(row.created_at, UTC),
        expires_at=datetime.fromtimestamp(row.expires_at, UTC),
    )


HANDLERS: Mapping[str, Handler] = {
    "upload_assets": upload_assets,
    "list_assets": list_assets,
    "get_asset": get_asset,
    "delete_asset": delete_asset,
}
