"""Values as people see them: suggestions for misspelt fields, short reprs, and tables in notebooks."""

from __future__ import annotations

import re
from concurrent.futures import Future

import numpy as np
import pytest

from tinkex import types
from tinkex.futures import AwaitableConcurrentFuture


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (types.AdamParams, "lr", "learning_rate"),
        (types.AdamParams, "learning_rat", "learning_rate"),
        (types.SamplingParams, "max_new_tokens", "max_tokens"),
        (types.SamplingParams, "temp", "temperature"),
        (types.AdamParams, "wd", "weight_decay"),
        (types.LoraConfig, "r", "rank"),
    ],
)
def test_a_misspelt_option_names_the_one_that_was_meant(kind: type, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no field '{name}'; did you mean '{meant}'"):
        kind(**{name: 1})


def test_an_unknown_option_without_a_similar_one_lists_all() -> None:
    with pytest.raises(TypeError, match="has no field 'colour'; it has learning_rate, beta1"):
        types.AdamParams(colour="red")  # type: ignore[call-arg]


def test_a_misspelt_loss_input_names_the_one_that_was_meant() -> None:
    with pytest.raises(KeyError, match="did you mean 'target_tokens'"):
        types.Datum(types.ModelInput.from_ints([1, 2]), {"targets": [2, 3]})


def test_a_forgotten_result_is_explained() -> None:
    future: AwaitableConcurrentFuture[types.HealthResponse] = AwaitableConcurrentFuture(Future())
    with pytest.raises(AttributeError, match=re.escape("future.result().metrics")):
        future.metrics  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(future, "_repr_mimebundle_")
    for read in (lambda: future[0], lambda: list(future)):  # type: ignore[index,call-overload]
        with pytest.raises(TypeError, match=re.escape("future.result()[0] or (await future)[0]")):
            read()


@pytest.mark.parametrize(
    "value",
    [
        types.ModelInput.from_ints(list(range(5000))),
        types.EncodedTextChunk(tokens=list(range(5000))),
        types.Datum(types.ModelInput.from_ints(list(range(5000))), {"target_tokens": list(range(5000))}),
        types.SampledSequence("stop", "s", np.arange(5000, dtype=np.int32), np.zeros(5000, np.float32)),
        types.SampleResponse([types.SampledSequence("stop", "s", np.arange(5000, dtype=np.int32))] * 50),
        types.ForwardBackwardOutput("x", [{"logprobs": types.TensorData.from_numpy(np.zeros(5000))}] * 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_long_values_have_short_reprs(value: object) -> None:
    assert len(repr(value)) < 1500
    assert "items" in repr(value)


def test_short_values_keep_their_repr() -> None:
    assert repr(types.HealthResponse(status="ok")) == "HealthResponse(status='ok')"
    assert eval(repr(types.SamplingParams(stop=["a"])), {"SamplingParams": types.SamplingParams}) == (
        types.SamplingParams(stop=["a"])
    )


def test_results_and_futures_are_tables_and_lines_in_notebooks() -> None:
    output = types.ForwardBackwardOutput("x", [], {"loss:sum": 2.5, "<b>": 1.0})
    shown = output._repr_html_()
    assert "<td>loss:sum</td><td>2.5</td>" in shown
    assert "&lt;b&gt;" in shown
    for number, said in ((1, "of 1 datum<"), (2, "of 2 datums<")):
        assert said in types.ForwardBackwardOutput("x", [{}] * number, {})._repr_html_()
    sequence = types.SampledSequence("stop", "s", np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32))
    assert "<td>1</td><td>stop</td><td>3</td><td>-0.5</td>" in types.SampleResponse([sequence])._repr_html_()
    failed: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture(Future())
    assert "pending" in repr(failed)
    assert "<code>.result()</code> waits for its result" in failed._repr_html_()
    failed.future().set_exception(ValueError("no"))
    assert "failed with ValueError" in repr(failed)
    assert "<code>.result()</code> returns its result, or raises its error" in failed._repr_html_()
