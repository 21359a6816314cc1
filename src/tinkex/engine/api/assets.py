"""Assets: taking in images, listing and deleting them."""

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


async def upload_assets(call: Call) -> Reply:
    """Take in the files of a form: images, all of them or none."""
    assert call.incoming is not None
    if call.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
        raise Unsupported("images are compressed already; send them without Content-Encoding.")
    largest, size = call.engine.config.max_body_bytes, 0
    announced = call.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > largest:
        raise _too_large(largest)
    upload = AssetUpload(call.engine.config, call.engine.store, call.owner)
    try:
        reader = FormReader(call.headers.get("content-type", ""), upload)
        async for piece in call.incoming:
            size += len(piece)
            if size > largest:
                raise _too_large(largest)
            # Parsing, hashing and writing take time that other callers should not wait for.
            await asyncio.to_thread(reader.write, piece)
        reader.finish()
        ttl = _ttl(reader.fields, call.engine.config.asset_retention_s)
        rows = await asyncio.to_thread(upload.keep, ttl)
    finally:
        await asyncio.to_thread(upload.discard)
    await call.engine.flushed()
    call.about.update(assets=[row.asset_id for row in rows], size_bytes=sum(row.size_bytes for row in rows))
    return AssetsResponse(assets=[_asset(row) for row in rows])


async def list_assets(call: Call) -> Reply:
    """The caller's images, newest first."""
    limit, offset = page(call.query, default_limit=100)
    store, now = call.engine.store, time.time()
    return AssetsListResponse(
        assets=[_asset(row) for row in store.assets.of_owner(call.owner, now, limit, offset)],
        cursor=Cursor(offset=offset, limit=limit, total_count=store.assets.count(call.owner, now)),
    )


async def get_asset(call: Call) -> Reply:
    """What is known about one image of the caller."""
    return _asset(find_asset(call.engine.store, call.owner, call.parameters["asset_id"]))


async def delete_asset(call: Call) -> Reply:
    """Delete an image."""
    row = find_asset(call.engine.store, call.owner, call.parameters["asset_id"])
    if call.engine.store.assets.delete(row):
        await asyncio.to_thread(call.engine.store.directories.remove_asset, row.file)
    return None


def _ttl(fields: Mapping[str, str], longest: float) -> float | None:
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise InvalidInput(
            f"the form has a field {unknown[0]!r} that means nothing here; a file needs a filename."
        )
    text = fields.get("ttl_seconds")
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= longest:
        raise InvalidInput(
            f"ttl_seconds is {text[:40]!r}; give 1 to {int(longest)} seconds, as long as this server keeps images."
        )
    return float(int(text))


def _too_large(largest: int) -> TooLarge:
    return TooLarge(
        f"this upload is larger than {largest} bytes, which is this server's limit; send less at once."
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
