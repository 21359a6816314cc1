"""No option is accepted and ignored: every field of every request has a proof, and the proofs are run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine_fields import checkpoints, loop_records, sampling, service, training
from tests.engine_fields.rig import TOKENS, Rig, Run, assert_rejected
from tests.engine_fields.table import INFORMATION, PROOFS, Proof, fields_of, requests, tags
from tinkex._wire import json as wire_json
from tinkex.types import Datum, ModelInput, PromptProvenanceSpan

__all__ = ["checkpoints", "loop_records", "sampling", "service", "training"]

FIELDS = set[str]().union(*map(fields_of, requests()))
TAGGED = sorted(set[Any]().union(*map(tags, requests())), key=lambda kind: kind.__name__)
RUNNABLE: dict[str, Proof] = {proof.__name__: proof for _, proof in sorted(PROOFS.items())}


def test_every_field_of_every_request_has_a_proof() -> None:
    without = FIELDS - PROOFS.keys() - INFORMATION.keys()
    assert not without, f"register a proof for each of these with @proves: {sorted(without)}"


def test_every_proof_is_of_a_field_that_exists() -> None:
    assert (PROOFS.keys() | INFORMATION.keys()) <= FIELDS
    assert not PROOFS.keys() & INFORMATION.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_field_changes_the_outcome_or_is_rejected(rig: Rig, name: str) -> None:
    RUNNABLE[name](rig)


@pytest.mark.parametrize("kind", TAGGED, ids=lambda kind: kind.__name__)
def test_a_request_with_the_wrong_type_tag_is_rejected(kind: Any) -> None:
    with pytest.raises(wire_json.Malformed, match="type"):
        wire_json.decode(json.dumps({"type": "something else"}).encode(), kind)


OPERATIONS = [
    "create_model",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "create_custom_loss",
    "load_weights",
    "unload_model",
    "weights_info",
    "create_sampling_session",
    "asample",
    "create_session",
    "join_sampling_session",
    "copy_weights",
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_unknown_field_is_rejected_with_an_error_that_names_it(rig: Rig, name: str) -> None:
    assert_rejected(rig.ada.post(name, {"quantum_mode": True}), "quantum_mode")


def test_where_tokens_came_from_changes_no_number(rig: Rig) -> None:
    run = rig.run()
    spans = [PromptProvenanceSpan(sequence_id="seq-1", offset=0, length=len(TOKENS) - 1)]
    datum = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]}, spans, spans)
    assert run.loss([datum]) == run.loss()


def test_client_metadata_is_accepted(rig: Rig) -> None:
    assert rig.ada.post("client/config", {"sdk_version": "9.9"}).json == (
        rig.ada.post("client/config", {"sdk_version": "0.1"}).json
    )
    events = {"events": [], "platform": "x", "sdk_version": "1", "session_id": "s", "process_uuid": "p"}
    assert rig.ada.post("telemetry", events).json == {"status": "accepted"}


def test_valid_requests_are_accepted(rig: Rig) -> None:
    """The proofs would be meaningless if the rig's own requests were rejected."""
    run = Run(rig.ada, rig.ada.create())
    assert run.output().metrics["loss:sum"] > 0
    assert run.step()
    assert len(rig.tokens()[0]) == 6
