"""Behaviour that programs for the official client rely on when they train and sample, end to end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.engine_fields.rig import TOKENS, Rig, assert_rejected, datum
from tinkex.types import TensorData

NUM_TARGETS = len(TOKENS) - 1


def test_sampled_logprobs_are_of_the_scaled_distribution_and_those_of_prompts_at_temperature_one(
    rig: Rig,
) -> None:
    cold, warm = (rig.sample({"temperature": t, "seed": 3}, prompt_logprobs=True) for t in (0.25, 1.0))
    assert cold.prompt_logprobs is not None
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert [number is None for number in cold.prompt_logprobs] == [True] + [False] * NUM_TARGETS
    # The same tokens, scored as a prompt, give the logprobs they were drawn with at temperature 1, and only there.
    for response, scaled in ((cold, True), (warm, False)):
        [sequence] = response.sequences
        both = {"chunks": [{"type": "encoded_text", "tokens": TOKENS + sequence.tokens}]}
        scored = rig.sample(prompt=both, prompt_logprobs=True).prompt_logprobs
        assert scored is not None
        assert np.allclose(scored[len(TOKENS) :], sequence.logprobs, atol=1e-4) is not scaled


@pytest.mark.slow
def test_the_output_includes_the_stop_sequence_and_eos_stops_in_addition_to_stop_sequences(rig: Rig) -> None:
    tokenizer = rig.engine.models.all[0].tokenizer
    [eos] = tokenizer.eos_token_ids
    [free] = rig.tokens({"max_tokens": 40})
    at = next(
        place for place, token in enumerate(free) if place > 2 and tokenizer.decode_bytes([token]).isalpha()
    )
    text = tokenizer.decode_bytes([free[at]]).decode()
    stopped = rig.sample({"max_tokens": 40, "stop": text}).sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free[: len(stopped.tokens)]
    assert text.encode() in tokenizer.decode_bytes(stopped.tokens)
    # Without a stop, with stop strings and with stop tokens, the end token ends a sequence; with stop=[] it does not.
    long = {"max_tokens": 300, "temperature": 3.0}
    seed, everything = next(
        (seed, tokens) for seed in range(100) if eos in (tokens := rig.tokens({**long, "seed": seed})[0])
    )
    assert len(everything) == 300
    until_eos = everything[: everything.index(eos) + 1]
    never_said = next(token for token in range(3, 512) if token not in until_eos)
    for stop in (None, ["\u2603\u2603\u2603"], [never_said]):
        assert rig.tokens({**long, "seed": seed, "stop": stop}) == [until_eos]


def test_samples_of_one_seed_are_different_and_the_same_set_again(rig: Rig) -> None:
    first, again = (rig.tokens({"seed": 2**63 + 5}, num_samples=8) for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 8


def test_cross_entropy_takes_any_real_weights_and_answers_in_the_shape_of_its_targets(rig: Rig) -> None:
    run = rig.run()
    logprobs = np.array(run.output(forward_only=True).loss_fn_outputs[0]["logprobs"].data)
    weights = np.linspace(-2.0, 3.0, NUM_TARGETS, dtype=np.float32)
    assert run.loss([datum(weights=weights)]) == pytest.approx(-float(weights @ logprobs), rel=1e-4)
    assert run.loss() == pytest.approx(-logprobs.sum(), rel=1e-5)  # no weights are ones
    wide = np.stack([TOKENS[1:], [3] * NUM_TARGETS, [4] * NUM_TARGETS], axis=1)
    output = run.output(
        [
            datum(
                target_tokens=TensorData.from_numpy(wide), weights=TensorData.from_numpy(np.ones(wide.shape))
            )
        ],
        forward_only=True,
    )
    answered = output.loss_fn_outputs[0]["logprobs"]
    assert (answered.dtype, answered.shape) == ("float32", [NUM_TARGETS, 3])
    np.testing.assert_allclose(answered.to_numpy()[:, 0], logprobs, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-answered.to_numpy().sum(), rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_from_its_weights_info_and_adam_restarts_without_its_state(rig: Rig) -> None:
    source = rig.run(rank=3, train_mlp=False)
    source.train()
    path = source.save()
    info = rig.ada.post("weights_info", {"tinker_path": path}).json
    assert (info["is_lora"], info["lora_rank"], info["train_mlp"], info["train_attn"]) == (
        True,
        3,
        False,
        True,
    )
    flags = {name: info[name] for name in ("train_mlp", "train_attn", "train_unembed")}
    losses = {}
    for optimizer in (True, False):
        run = rig.run(rank=info["lora_rank"], **flags)
        rig.ada.result(run.submit("load_weights", path=path, optimizer=optimizer))
        losses[optimizer] = (run.loss(), run.train(2))
    assert losses[True][0] == losses[False][0] == source.loss()
    assert losses[True][1] == source.train(2) != losses[False][1]


def test_a_checkpoint_of_another_shape_is_rejected_when_it_is_loaded(rig: Rig) -> None:
    path = rig.run(rank=3).save()
    run = rig.run(rank=4)
    failed = rig.ada.result(run.submit("load_weights", path=path)).json
    assert "rank=3" in failed["error"]
    assert failed["category"] == "user"
    assert run.loss() > 0


@pytest.mark.slow
def test_unnamed_snapshots_of_unchanged_weights_share_their_files(rig: Rig) -> None:
    session = rig.ada.session()
    run = rig.run()
    run.run_id = rig.ada.create(session)
    snapshots = rig.engine.store.root / "snapshots"
    before = set(snapshots.iterdir()) if snapshots.exists() else set()
    for number in range(6):
        if number % 3 == 0:
            run.output()
            run.step()
        rig.ada.result(run.submit("save_weights_for_sampler", sampling_session_seq_id=number))
    made = set(snapshots.iterdir()) - before
    assert len(made) == 2
    tokens = {
        tuple(rig.tokens({"temperature": 2.0}, sampling_session_id=f"{session}:sample:{number}")[0])
        for number in range(6)
    }
    assert 1 <= len(tokens) <= 2


@pytest.mark.slow
def test_rollouts_of_one_sample_each_share_their_decode_steps(rig: Rig) -> None:
    submitted = [rig.submit_sample({"max_tokens": 200, "seed": seed}) for seed in range(24)]
    most = 0
    for answer in submitted:
        most = max(most, *(model.batch.num_sequences for model in rig.engine.stats().models), 0)
        rig.ada.result(answer)
    assert most > 4  # one after the other there would never be more than one


def test_a_prompt_of_hundreds_of_one_token_chunks_is_the_prompt_of_one_chunk(rig: Rig) -> None:
    tokens = np.random.default_rng(1).integers(3, 500, 300).tolist()
    whole = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    pieces = {"chunks": [{"type": "encoded_text", "tokens": [token]} for token in tokens]}
    one, many = (rig.sample(prompt=prompt, prompt_logprobs=True) for prompt in (whole, pieces))
    assert one.sequences[0].tokens == many.sequences[0].tokens
    assert one.prompt_logprobs is not None
    assert many.prompt_logprobs is not None
    assert all(
        a is b is None or (a is not None and b is not None and math.isclose(a, b, abs_tol=1e-5))
        for a, b in zip(one.prompt_logprobs, many.prompt_logprobs, strict=True)
    )


def test_an_unsupported_sampling_option_is_rejected_with_an_error_that_names_it(rig: Rig) -> None:
    for option, value in (("typical_p", 0.9), ("mirostat", 1), ("n", 2)):
        assert_rejected(rig.submit_sample({option: value}), option)
