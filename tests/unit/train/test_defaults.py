"""The command line and the settings agree on their defaults."""

from __future__ import annotations

from dataclasses import MISSING, fields

import click
import pytest

from tinkex.cli.train import train
from tinkex.train.settings import RECIPES

NAMES = {"start_from": "model_path"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_is_an_option_with_the_same_default(recipe: str) -> None:
    command = train.commands[recipe]
    options = {option.name: option for option in command.params}
    shown = {
        entry["name"]
        for entry in command.to_info_dict(click.Context(command))["params"]
        if entry.get("default")
    }
    for setting in fields(RECIPES[recipe]):
        option = options[NAMES.get(setting.name, setting.name)]
        if setting.name not in {"data", "output"}:
            given = option.get_default(click.Context(train.commands[recipe]))
            has_none = setting.default in {None, (), MISSING}
            assert option.name not in shown if has_none else given == setting.default, setting.name
