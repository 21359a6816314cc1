from __future__ import annotations

import pytest

from tinkex.engine.operation import REQUEST_TYPES, TRANSITIONS, Kind, Operation, State


def operation(state: State) -> Operation:
    return Operation("req-1", "ada", "tiny", "run", 1, Kind.OPTIM_STEP, 0, state=state)


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("end", State)
def test_only_the_transitions_of_the_table_are_possible(start: State, end: State) -> None:
    moved = operation(start)
    if end in TRANSITIONS[start]:
        moved.move(end)
        assert moved.state is end
    else:
        with pytest.raises(AssertionError, match=f"from {start} to {end}"):
            moved.move(end)
        assert moved.state is start


def test_every_operation_can_end_and_only_through_computed() -> None:
    assert [state for state in State if State.ENDED in TRANSITIONS[state]] == [State.COMPUTED]
    for state in set(State) - {State.COMPUTED, State.ENDED}:
        assert State.COMPUTED in TRANSITIONS[state]


def test_every_kind_has_a_request_type() -> None:
    assert REQUEST_TYPES.keys() == set(Kind)
