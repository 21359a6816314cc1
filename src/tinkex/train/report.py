"""What a run did: curves, samples before and after, and where the result lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.terminal import text_plot

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """The end of a run. ``text`` is for people, ``as_json()`` for programs."""

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
    def text(self) -> str:
        """The report as plain text."""
        curve = self.curve
        done = f"{len(curve)} steps on {self.num_examples} examples in {self.seconds:.0f} s"
        lines = [
            f"Trained {self.base_model} by {self.recipe}: {done}",
            "",
            text_plot(curve, label=f"{self.headline} per step"),
        ]
        if self.evaluations:
            shown = ", ".join(f"{value:.3f} after step {step}" for step, value in self.evaluations)
            lines += ["", f"{self.headline} on examples not trained on: {shown}"]
        for sample in self.samples:
            lines += ["", f"Prompt   {_one_line(sample['prompt'])}"]
            lines += [f"Before   {_one_line(sample['before'])}", f"After    {_one_line(sample['after'])}"]
        lines += [
            "",
            f"Checkpoint          {self.checkpoint}",
            f"Sampler checkpoint  {self.sampler_checkpoint}",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "recipe": self.recipe,
            "base_model": self.base_model,
            "num_examples": self.num_examples,
            "num_steps": len(self.curve),
            "seconds": round(self.seconds, 3),
            "headline": self.headline,
            "metrics": [dict(line) for line in self.metrics],
            "samples": [dict(sample) for sample in self.samples],
            "checkpoint": self.checkpoint,
            "sampler_checkpoint": self.sampler_checkpoint,
            "output": str(self.output),
        }

    def write(self) -> None:
        """Writes ``report.txt`` and ``report.json``, and ``curve.png`` where matplotlib is installed."""
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


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else words[:199] + "…"
