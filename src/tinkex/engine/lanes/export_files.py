"""Exported weights: a PEFT directory; each file is encrypted if there are recipients."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from tinkex.engine.model.lora import Adapter

ENCRYPTED_SUFFIX = ".age"


def check_recipients(recipients: Sequence[str] | None) -> None:
    """Raise ``InvalidInput`` for invalid recipients."""
    if recipients is not None:
        _parse(recipients)


def write_export(
    directory: Path, adapter: Adapter, base_model: str, recipients: Sequence[str] | None
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, as ``.age`` files if there are recipients.

    The tensors have the names of the service's exports, which existing tools expect.
    """
    from tinkex.engine.model.adapter_files import TINKER_UNEMBED_PATH, save_adapter

    save_adapter(directory, adapter, base_model, unembed_path=TINKER_UNEMBED_PATH)
    if recipients is not None:
        pyrage, keys = _pyrage(), _parse(recipients)
        for file in sorted(directory.iterdir()):
            pyrage.encrypt_file(str(file), f"{file}{ENCRYPTED_SUFFIX}", keys)
            file.unlink()


def _parse(recipients: Sequence[str]) -> list[Any]:
    pyrage = _pyrage()
    if not recipients:
        raise InvalidInput("age_encryption_recipients is empty; add a recipient, or omit it.")
    parsed: list[Any] = []
    for recipient in recipients:
        kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
        try:
            parsed.append(kind.Recipient.from_str(recipient))
        except pyrage.RecipientError as error:
            raise InvalidInput(
                f"{recipient!r} is not an age recipient ({error}); recipients look like age1… or ssh-ed25519 …; create one with age-keygen."
            ) from error
    return parsed


def _pyrage() -> Any:
    """Returns the age library, which has no type annotations."""
    try:
        return import_module("pyrage")
    except ModuleNotFoundError:
        raise Unsupported(
            "age_encryption_recipients needs pyrage, which is not installed on the server: pip install pyrage. "
            "Without recipients the export is not encrypted."
        ) from None
