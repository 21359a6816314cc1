"""What passes cost, in tokens: those they have, and those that their custom losses are worth."""

from __future__ import annotations

from collections import OrderedDict

from tinkex.engine.operation import Operation

FIRST_COST = 4096
"""What a custom loss is assumed to cost before it has run: its pass has a turn of its own."""
MIN_COST = 512
"""What a custom loss is assumed to cost at least: it may cost more on other data, so only a few of them share a turn."""
MAX_LOSSES = 10_000
"""How many losses are remembered."""


class LossCosts:
    """Estimates the cost of a pass by what its custom loss has cost before, per datum.

    The estimate decides which passes share a turn. What is charged in the end is what was measured, in units that are the
    same on every machine.

    >>> from tinkex.engine.operation import Kind
    >>> operation = Operation("a", "ada", "base", "run", 1, Kind.FORWARD, 10, loss="digest", num_datums=2)
    >>> costs = LossCosts()
    >>> before = costs.estimate(operation)
    >>> costs.record(operation, 900)
    >>> before, costs.estimate(operation)
    (4106, 910)
    """

    def __init__(self) -> None:
        self._per_datum: OrderedDict[str, float] = OrderedDict()

    def estimate(self, operation: Operation) -> int:
        """What an operation will cost."""
        if operation.loss is None:
            return operation.tokens_computed
        per_datum = self._per_datum.get(operation.loss)
        if per_datum is None:
            return operation.tokens_computed + FIRST_COST
        return operation.tokens_computed + max(MIN_COST, round(per_datum * operation.num_datums))

    def record(self, operation: Operation, loss_tokens: int) -> None:
        """Remember what the loss of an operation has cost."""
        if operation.loss is None or not loss_tokens:
            return  # it did not run
        known = self._per_datum.pop(operation.loss, 0.0)
        self._per_datum[operation.loss] = max(known, loss_tokens / max(operation.num_datums, 1))
        while len(self._per_datum) > MAX_LOSSES:
            self._per_datum.popitem(last=False)
