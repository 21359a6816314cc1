"""The entry point of resilient training: validates the settings and creates the loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from tinkex.observability.events import guard
from tinkex.observability.process import bus_for
from tinkex.recovery.batches import Batches, Data
from tinkex.recovery.loop import ResilientTraining
from tinkex.recovery.policy import RecoveryPolicy
from tinkex.recovery.progress import TrainingProgress

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.observability.events import Sink

__all__ = ["resilient_training"]

B = TypeVar("B")

POLICY: Final = RecoveryPolicy(max_attempts=8)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def resilient_training(
    service: ServiceClient,
    data: Data[B],
    *,
    name: str,
    base_model: str | None = None,
    start_from: str | None = None,
    rank: int = 32,
    seed: int | None = None,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
    steps: int | None = None,
    checkpoint_every: int | None = 50,
    checkpoint_every_s: float | None = None,
    keep: int | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    policy: RecoveryPolicy | None = None,
    user_metadata: Mapping[str, str] | None = None,
    progress: bool = False,
    events: Sink | None = None,
) -> ResilientTraining[B]:
    """Returns a training loop that survives crashes of the server, of the run, and of this process.

    ::

        loop = tinkex.resilient_training(
            service, batches, name="captains-log", base_model=MODEL, rank=16, checkpoint_every=20
        )
        for step in loop:
            with step:
                passed = step.training.forward_backward(step.batch, "cross_entropy")
                step.training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
                step.report(loss=passed.result().metrics["loss:sum"])
        sampler = loop.training.save_weights_and_get_sampling_client()

    ``async for`` and ``async with`` do the same on an event loop. ``name`` identifies the training: a program that is
    started again with the same name resumes from the last checkpoint (``resume="never"`` starts over, ``"must"`` raises
    if there is nothing to resume). Pass the same data in the same order: a sequence of batches, an iterable, or a
    function of the position with ``steps``. Only one process at a time may use a name.

    A new run starts on ``base_model`` with the LoRA settings, or from the weights of ``start_from`` with a new
    optimizer. A checkpoint is saved every ``checkpoint_every`` steps or ``checkpoint_every_s`` seconds and at the end;
    ``keep`` deletes all but the last few. ``policy`` sets the number of restarts at the same position, the checkpoint to
    use, and callbacks (its polling intervals apply to a monitor only). ``progress`` shows a line with the reported
    ``loss``.
    """
    if (base_model is None) == (start_from is None):
        raise ValueError("set exactly one of base_model=… and start_from=… (saved weights)")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name must be 1–100 letters, digits, dots, dashes and underscores, got {name!r}")
    for setting, number in (
        ("checkpoint_every", checkpoint_every),
        ("checkpoint_every_s", checkpoint_every_s),
        ("keep", keep),
    ):
        if number is not None and not number > 0:
            raise ValueError(f"{setting} must be positive or None, got {number!r}")
    if checkpoint_every is None and checkpoint_every_s is None:
        raise ValueError(
            "a resilient training needs checkpoints to restart from; set checkpoint_every, in steps"
        )
    if resume not in {"auto", "never", "must"}:
        raise ValueError(f"resume must be 'auto', 'never' or 'must', got {resume!r}")
    batches = Batches(data, steps)
    if progress and batches.total is None:
        raise ValueError("progress needs the number of batches; set steps=…")
    metadata = dict(user_metadata or {})

    async def create(marked: Mapping[str, str]) -> TrainingClient:
        if start_from is not None:
            return await service.create_training_client_from_state_async(start_from, user_metadata=marked)
        assert base_model is not None
        return await service.create_lora_training_client_async(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata=marked
        )

    return ResilientTraining(
        service,
        batches,
        TrainingProgress(name),
        create,
        every_steps=checkpoint_every,
        every_s=checkpoint_every_s,
        keep=keep,
        resume=resume,
        policy=policy or POLICY,
        user_metadata=metadata,
        show_progress=progress,
        sink=bus_for(events, guard),
    )
