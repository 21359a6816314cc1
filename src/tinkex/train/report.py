"""The report of a run: curves, samples before and after, and the path of the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.observability.terminal import text_plot
from tinkex.train.notes import notes
from tinkex.train.packing import Packing, describe, from_metrics

__all__ = ["TrainingReport"]

NUM_SHOWN_EVALUATIONS = 6


@dataclass(frozen=True)
class TrainingReport:
    """The report of a run: ``text`` for people, ``as_json()`` for programs; :func:`tinkex.train.run` returns it.

    - ``recipe``: ``sft``, ``dpo`` or ``grpo``; ``base_model``: the model that was trained
    - ``headline``: the name of the main metric; ``metrics``: those of every step and evaluation
    - ``samples``: prompts with the answers before and after training
    - ``checkpoint``, ``sampler_checkpoint``: the paths of the results, to train on from and to sample from
    - ``num_examples``, ``num_held_out``: the examples used for training, and for evaluation only
    - ``seconds``: the time of the run; ``output``: its directory
    - ``best_step``: the step of the checkpoints with ``keep_best``, or None for the last one
    - ``stopped_early``: whether ``early_stop`` ended the run
    - ``resumed_after``: the steps before the run was resumed, which ``seconds`` does not include

    >>> report = TrainingReport(
    ...     recipe="sft", base_model="tiny", headline="loss", metrics=[{"step": 1, "loss": 0.5}], samples=[],
    ...     checkpoint="tinker://run-7/weights/final", sampler_checkpoint="tinker://run-7/sampler_weights/final",
    ...     num_examples=14, seconds=3.0, output=Path("run-1"),
    ... )
    >>> report.curve, report.summary
    ([0.5], '1 step on 14 examples in 3 s')
    """

    recipe: str
    base_model: str
    headline: str
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, str]]
    checkpoint: str
    sampler_checkpoint: str
    num_examples: int
    seconds: float
    output: Path
    num_held_out: int = 0
    """The number of examples that were used for evaluation only."""
    best_step: int | None = None
    """The step of the checkpoints with ``keep_best``; None: the last one."""
    stopped_early: bool = False
    resumed_after: int = 0
    """The steps before the run was resumed, which ``seconds`` does not include."""

    @property
    def curve(self) -> list[float]:
        """The headline metric of every step."""
        return [float(line[self.headline]) for line in self.metrics if self.headline in line]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The headline metric of every evaluation, with its step."""
        name = f"eval_{self.headline}"
        return [(int(line["step"]), float(line[name])) for line in self.metrics if name in line]

    @property
    def notes(self) -> list[str]:
        """Warnings from the metrics and samples, each with advice."""
        found = notes(self.headline, self.metrics, self.samples, self.num_held_out)
        return [note for note in found if self.best_step is None or "--keep-best" not in note]

    @property
    def packing(self) -> list[Packing]:
        """The packing of every pass."""
        return from_metrics(self.metrics)

    @property
    def summary(self) -> str:
        """The number of steps and examples, and the time."""
        part = f", those after step {self.resumed_after}" if self.resumed_after else ""
        done = f"{_count(len(self.curve), 'step')} on {_count(self.num_examples, 'example')}{part} in {self.seconds:.0f} s"
        return done + (", stopped early" if self.stopped_early else "")

    @property
    def text(self) -> str:
        """The report as plain text."""
        lines = [
            f"Fine-tuned {self.base_model} ({self.recipe.upper()}): {self.summary}",
            "",
            text_plot(self.curve, label=f"{self.headline} per step"),
        ]
        if self.evaluations:
            shown = ", ".join(f"{value:.3f} after step {step}" for step, value in _some(self.evaluations))
            lines += ["", f"eval {self.headline}: {shown}"]
        changes = self._changes()
        if changes:
            lines += ["", f"first and last step: {changes}"]
        for sample in self.samples:
            lines += ["", f"Prompt   {_one_line(sample['prompt'])}"]
            lines += [f"Before   {_one_line(sample['before'])}", f"After    {_one_line(sample['after'])}"]
        for note in self.notes:
            lines += ["", f"Note     {note}"]
        lines += [
            "",
            *(
                [f"The checkpoints are those after step {self.best_step}, the best evaluation of a step."]
                if self.best_step
                else []
            ),
            *([f"Packing             {describe(self.packing)}"] if self.packing else []),
            f"Checkpoint          {self.checkpoint}",
            f"Sampler checkpoint  {self.sampler_checkpoint}",
        ]
        return "\n".join(lines)

    def _changes(self) -> str:
        """Returns each of several rewards and the KL divergence of the first and the last step."""
        names = dict.fromkeys(
            name for line in self.metrics for name in line if name == "kl" or name.startswith("reward_")
        )
        found = {name: [float(line[name]) for line in self.metrics if name in line] for name in names}
        return ", ".join(
            f"{name} {round(values[0], 3) + 0.0:.3f} → {round(values[-1], 3) + 0.0:.3f}"  # + 0.0: not -0.000
            for name, values in found.items()
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON.

        Example::

            print(json.dumps(report.as_json()))
        """
        return {
            "recipe": self.recipe,
            "base_model": self.base_model,
            "num_examples": self.num_examples,
            "num_held_out": self.num_held_out,
            "best_step": self.best_step,
            "stopped_early": self.stopped_early,
            "resumed_after": self.resumed_after,
            "num_steps": len(self.curve),
            "seconds": round(self.seconds, 3),
            "headline": self.headline,
            "metrics": [dict(line) for line in self.metrics],
            "samples": [dict(sample) for sample in self.samples],
            "notes": self.notes,
            "checkpoint": self.checkpoint,
            "sampler_checkpoint": self.sampler_checkpoint,
            "output": str(self.output),
        }

    @classmethod
    def read(cls, directory: Path) -> TrainingReport | None:
        """Reads the report of the complete run in ``directory``; returns None if there is none.

        >>> TrainingReport.read(Path("no-such-run")) is None
        True
        """
        try:
            kept = json.loads((directory / "report.json").read_text(encoding="utf-8"))
            named = {
                field.name: kept[field.name]
                for field in fields(cls)
                if field.name != "output" and (field.name in kept or field.default is MISSING)
            }
        except (OSError, ValueError, KeyError):
            return None
        return cls(**named, output=directory)

    def write(self) -> None:
        """Writes ``report.txt`` and ``report.json`` to ``output``, and ``curve.png`` if matplotlib is installed.

        Example::

            report.write()
        """
        (self.output / "report.txt").write_text(self.text + "\n", encoding="utf-8")
        content = json.dumps(self.as_json(), indent=2, ensure_ascii=False)
        (self.output / "report.json").write_text(content + "\n", encoding="utf-8")
        self._draw(self.output / "curve.png")

    def _draw(self, file: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            return
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        steps = [int(line["step"]) for line in self.metrics if self.headline in line]
        axes.plot(steps, self.curve, label="training", linewidth=1.2)
        if self.evaluations:
            axes.plot(*zip(*self.evaluations, strict=True), "o-", label="evaluation")
        axes.set(xlabel="step", ylabel=self.headline, title=f"{self.recipe} of {self.base_model}")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(file)


def _some(evaluations: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Returns as many as fit on a line: the first, some in between, and the last.

    >>> [step for step, _ in _some([(step, 0.0) for step in range(0, 101, 10)])]
    [0, 20, 40, 60, 80, 100]
    """
    if len(evaluations) <= NUM_SHOWN_EVALUATIONS:
        return evaluations
    places = [
        round(place * (len(evaluations) - 1) / (NUM_SHOWN_EVALUATIONS - 1))
        for place in range(NUM_SHOWN_EVALUATIONS)
    ]
    return [evaluations[place] for place in places]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else words[:199] + "…"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
