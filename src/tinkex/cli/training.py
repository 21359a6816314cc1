"""What ``tinkex train`` does: check, train, resume, repeat."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.training_display import TrainingDisplay
from tinkex.cli.training_tasks import TrainingTasks
from tinkex.errors import ConfigError
from tinkex.train import TrainingReport, read_data, resume, run
from tinkex.train.examples import OtherRecipeError
from tinkex.train.html_report import FILE as HTML_FILE
from tinkex.train.html_report import write_html
from tinkex.train.run_directory import RunDirectory, read_config
from tinkex.train.settings import RECIPES, Settings

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation
    from tinkex.train import TrainingData

__all__ = ["resume_run", "train_from_config", "train_on_file", "write_report"]


def train_on_file(
    invocation: Invocation, recipe: str, data: Path, options: Mapping[str, Any], *, check: bool
) -> None:
    """Trains with the options of a command line; with ``check`` only says what it would do."""
    values = {**options, "data": data, "start_from": options["model_path"]}
    del values["model_path"]
    if values["model"] is not None and values["start_from"] is not None:
        raise click.UsageError("give --model or --model-path, not both")
    values["output"] = values["output"] or _new_directory(recipe)
    try:
        settings = RECIPES[recipe](**values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    _train(invocation, settings, check=check)


def train_from_config(invocation: Invocation, file: Path, output: Path | None, *, check: bool) -> None:
    """Trains with the settings in a file, in a new directory; where its run ran, unless the command line names a server."""
    invocation.status(f"Reading {file}")
    settings, server = read_config(file, output or Path())
    if invocation.base_url is None:
        invocation.base_url = server
    _train(invocation, replace(settings, output=output or _new_directory(settings.recipe)), check=check)


def resume_run(invocation: Invocation, recipe: str, directory: Path) -> None:
    """Resumes a run, on the server where it ran unless the command line names another."""
    stored = RunDirectory.read(directory)
    if invocation.base_url is None:
        invocation.base_url = stored.server
    if stored.settings.recipe != recipe:
        command = f"tinkex train {stored.settings.recipe} --resume {shlex.quote(str(directory))}"
        raise ConfigError(
            f"{directory} is a run of {stored.settings.recipe}; resume it with: {command}{invocation.server_options}"
        )
    tasks = TrainingTasks(invocation, stored.settings)
    display = TrainingDisplay(invocation, recipe)
    display.advise_resuming(directory)
    _show_connecting(invocation, display)
    with invocation.service(f"train {recipe}") as service:
        report = resume(service, directory, display, recipe=recipe)
        tasks.evaluate_result(service, report)
    _print_report(invocation, display, report, tasks)


def write_report(invocation: Invocation, directory: Path) -> None:
    """Writes the report of a complete run as one HTML file."""
    settings = RunDirectory.read(directory).settings
    report = TrainingReport.read(directory)
    if report is None:
        command = f"tinkex train {settings.recipe} --resume {shlex.quote(str(directory))}"
        raise ConfigError(f"the run in {directory} is not complete; resume it with: {command}")
    file = write_html(report, settings)
    invocation.result(f"Wrote {file}", {"report": str(file)})


def _train(invocation: Invocation, settings: Settings, *, check: bool) -> None:
    """Checks files, columns, reward and output first, then opens the model, and only then starts a run."""
    if not check:
        RunDirectory.check_unused(settings.output)
    tasks = TrainingTasks(invocation, settings)
    data = _read_data(invocation, settings)
    display = TrainingDisplay(invocation, settings.recipe)
    display.data_read(data.description)
    _show_connecting(invocation, display)
    from tinkex.cli.base_model import choose_base_model

    with invocation.service(f"train {settings.recipe}") as service:
        if settings.start_from is None and settings.model is None:
            settings = replace(settings, model=choose_base_model(service, None))
        if check:
            from tinkex.train.plan import make_plan

            plan = make_plan(service, settings, data, display.working)
            display.close()
            invocation.result(plan.text, plan.as_json())
            return
        tasks.evaluate_start(service, settings.model)
        report = run(service, settings, display, data=data)
        tasks.evaluate_result(service, report)
    _print_report(invocation, display, report, tasks)


def _read_data(invocation: Invocation, settings: Settings) -> TrainingData[Any]:
    if invocation.quiet or invocation.as_json:
        invocation.silence()  # a dataset may be downloaded
    try:
        return read_data(settings)
    except OtherRecipeError as error:
        command = f"tinkex train {error.recipe} {shlex.quote(str(settings.data))}"
        if settings.columns:
            named = ",".join(f"{name}={column}" for name, column in settings.columns.items())
            command += f" --columns {shlex.quote(named)}"
        if error.recipe == "grpo":
            command += " --reward FILE.PY:FUNCTION"
        command += invocation.server_options
        raise ConfigError(f"{error}\nTrain on it with: {command}") from error


def _print_report(
    invocation: Invocation, display: TrainingDisplay, report: TrainingReport, tasks: TrainingTasks
) -> None:
    display.close()
    if invocation.as_json:
        invocation.json({**report.as_json(), **tasks.as_json()})
        return
    from tinkex.cli.streams import printable

    click.echo(printable(report.text))
    page = report.output / HTML_FILE
    click.echo(f"Report              {page if page.exists() else report.output}")
    if not (report.output / "curve.png").exists():
        invocation.status("(to save the curve as PNG: pip install 'tinkex[plots]')")
    tasks.print_table()
    click.echo(
        f'\nTry it: tinkex sample "…" --model-path {report.sampler_checkpoint}{invocation.server_options}'
    )


def _show_connecting(invocation: Invocation, display: TrainingDisplay) -> None:
    if not invocation.is_local:  # else the start of the engine is announced
        display.working(f"connecting to {invocation.base_url or 'the server'}", 0, 1)


def _new_directory(recipe: str) -> Path:
    """Returns a directory that does not exist yet: runs may start in the same second."""
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (Path("tinkex-runs") / name for name in names) if not path.exists())
