"""What telemetry sends of a program's own data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinkex.observability.telemetry.redaction import MAX_FIELDS, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, redact

SECRET = "tml-canary-0123456789"


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("attempt", 1, 1),
        ("tokens_per_s", 12.5, 12.5),
        ("num_tokens", 7, 7),
        ("max_key", 3, 3),
        ("done", False, False),
        ("note", None, None),
        ("phase", "warm up, then train", "warm up, then train"),
        ("my.own-name", "x" * MAX_TEXT_LENGTH, "x" * MAX_TEXT_LENGTH),
        ("loss", np.float32(0.5), 0.5),
        ("loss", math.nan, "nan"),
        ("loss", -math.inf, "-inf"),
        ("text", "a\ud800b", "a?b"),
    ],
)
def test_scalars_and_short_strings_are_sent_under_the_program_s_names(
    name: str, value: Any, sent: Any
) -> None:
    assert redact({name: value}) == ({name: sent}, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "x" * (MAX_TEXT_LENGTH + 1)),
        ("batch", [1, 2]),
        ("nested", {"a": 1}),
        ("raw", b"bytes"),
        ("array", np.zeros(3)),
        ("object", object()),
        (7, 1),
        ("n" * (MAX_NAME_LENGTH + 1), 1),
    ],
)
def test_everything_else_is_dropped_and_named(name: Any, value: Any) -> None:
    fields, dropped = redact({name: value, "kept": 1})
    assert fields == {"kept": 1}
    assert dropped == (str(name)[:MAX_NAME_LENGTH],)


def test_there_are_not_too_many_fields() -> None:
    fields, dropped = redact({f"f{number}": number for number in range(MAX_FIELDS + 2)})
    assert (len(fields), dropped) == (MAX_FIELDS, (f"f{MAX_FIELDS}", f"f{MAX_FIELDS + 1}"))


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "HF_TOKEN", "token", "x-auth", "DB_PASSWORD", "clientSecret", "credentials", "jwt"],
)
def test_a_field_that_is_named_like_a_secret_is_masked(name: str) -> None:
    assert redact({name: "hunter2"}) == ({name: "…"}, ())


@pytest.mark.parametrize("name", ["password", "secret_number"])
def test_a_number_that_is_named_as_a_secret_is_masked(name: str) -> None:
    assert redact({name: 1234}) == ({name: "…"}, ())


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.abc",
        "sk-proj-0123456789abcdef",
        "hf_0123456789abcdef",
        "ghp_0123456789abcdef",
        "AKIA0123456789ABCDEF",
        "Bearer abcdef",
        "http://user:hunter2@host/",
        "the key hush-hush-hush",
    ],
)
def test_text_that_holds_a_secret_is_masked(text: str) -> None:
    fields, dropped = redact({"note": f"at {text} end"}, ["hush-hush-hush"])
    assert not dropped
    sent = fields["note"]
    assert "…" in sent
    for secret in ("canary", "eyJ", "0123456789", "abcdef", "hunter2", "hush"):
        assert secret not in sent
    assert (sent.startswith("at "), sent.endswith("end")) == (True, True)
    assert SECRET not in str(redact({SECRET: 1}))
