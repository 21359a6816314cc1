from __future__ import annotations

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.scheduler import SampleRouter
from tinkex.types import ModelInput, SampleRequest, SamplingParams

LANES = ["s0", "s1", "s2"]


def sample(name: str, prompt: list[int], number: int = 1, sampler: str = "a") -> Operation:
    request = SampleRequest(
        prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(), num_samples=number
    )
    return Operation(name, "ada", "tiny", sampler, 0, Kind.SAMPLE, 10, request)


def test_samples_of_different_prompts_go_to_the_least_loaded() -> None:
    router = SampleRouter(LANES)
    assert router.assign(sample("large", [1], number=5)) == "s0"
    assert [router.assign(sample(f"r{n}", [2, n])) for n in range(4)] == ["s1", "s2", "s1", "s2"]


def test_a_prompt_goes_where_its_beginning_is_in_memory() -> None:
    router = SampleRouter(LANES)
    prompt = list(range(40))
    first = sample("r1", prompt)
    assert router.assign(first) == "s0"
    router.end([first])
    other = sample("r2", [7])
    router.assign(other)
    assert router.assign(sample("r3", [*prompt, 99])) == "s0"
    assert router.assign(sample("r4", prompt, sampler="b")) != "s0", "of other weights"


def test_a_prefix_does_not_overload_its_sampler() -> None:
    router = SampleRouter(LANES)
    lanes = [router.assign(sample(f"r{n}", [1, 2, 3])) for n in range(12)]
    assert {lanes.count(lane) for lane in LANES} <= {3, 4, 5}


def test_a_sample_keeps_its_sampler_until_that_is_lost() -> None:
    router = SampleRouter(LANES)
    waiting = sample("r1", [1])
    assert router.assign(waiting) == router.assign(waiting) == "s0"
    router.set_available(["s1", "s2"])
    assert router.assign(waiting) == "s1"
    router.set_available([])
    assert router.assign(waiting) is None
    router.set_available(LANES)
    assert router.assign(waiting) == "s1"


def test_an_idle_sampler_takes_what_another_cannot_take_soon() -> None:
    router = SampleRouter(LANES)
    waiting = sample("r1", [1])
    assert router.assign(waiting) == "s0"
    assert not router.may_take(waiting, max_load=4)
    router.set_available(LANES, occupied=["s0"])
    assert router.may_take(waiting, max_load=4)
    router.set_available(LANES)
    router.move(sample("r2", [2], number=4), "s0")
    assert router.may_take(waiting, max_load=4), "it is full"


def test_a_sampler_that_lost_its_memory_is_not_preferred() -> None:
    router = SampleRouter(LANES)
    first = sample("r1", [1, 2])
    assert router.assign(first) == "s0"
    router.end([first])
    router.forget("s0")
    router.assign(sample("r2", [9]))
    assert router.assign(sample("r3", [1, 2])) == "s1"


def test_a_request_that_is_only_on_disk_goes_to_the_least_loaded() -> None:
    router = SampleRouter(LANES)
    assert router.assign(Operation("r1", "ada", "tiny", "a", 0, Kind.SAMPLE, 10)) == "s0"
    assert router.assign(Operation("r2", "ada", "tiny", "a", 0, Kind.SAMPLE, 10)) == "s1"


def test_a_sampler_that_is_removed_leaves_its_samples_to_others_and_one_that_is_added_gets_some() -> None:
    router = SampleRouter(["s0", "s1"], can_grow=True)
    first, second = sample("r1", [1]), sample("r2", [2])
    assert [router.assign(first), router.assign(second)] == ["s0", "s1"]
    router.remove("s0")
    assert router.set_available(["s1"]), "its samples have to be assigned again"
    assert not router.set_available(["s1"])
    assert router.assign(first) == "s1"
    router.add("s2")
    router.set_available(["s1", "s2"])
    assert router.assign(sample("r3", [3])) == "s2"
    router.end([first, second])
    assert router.has_choice
    router.remove("s1")
    router.remove("s2")
    assert router.assign(sample("r4", [4])) is None


def test_samples_are_assigned_again_when_other_samplers_run() -> None:
    router = SampleRouter(LANES)
    assert not router.set_available(LANES)
    assert router.set_available(["s1", "s2"])
    assert not router.set_available(["s2", "s1"], occupied=["s1"])
    assert router.may_take_any(max_load=4)
    assert router.set_available(LANES)
    assert not router.may_take_any(max_load=4)
    router.assign(sample("r1", [1], number=5))
    assert router.may_take_any(max_load=4)


def test_a_sampler_that_returns_counts_what_it_has() -> None:
    router = SampleRouter(LANES)
    router.move(sample("large", [1], number=3), "s0")
    router.set_available(["s1", "s2"])
    assert [router.assign(sample(f"r{n}", [2, n])) for n in range(2)] == ["s1", "s2"]
    router.set_available(LANES)
    assert [router.assign(sample(f"q{n}", [3, n])) for n in range(4)] == ["s1", "s2", "s1", "s2"]
    assert router.assign(sample("last", [4])) == "s0"
