"""The command line and the settings agree on their defaults."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest

from tinkex.cli.train import train
from tinkex.train.settings import RECIPES

NAMES = {"start_from": "model_path"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_is_an_option_with_the_same_default(recipe: str) -> None:
    options = {option.name: option for option in train.commands[recipe].params}
    for setting in fields(RECIPES[recipe]):
        option = options[NAMES.get(setting.name, setting.name)]
        if setting.name not in {"data", "output"}:
            default = option.get_default(click.Context(train.commands[recipe]))
            assert default == setting.default or (not default and not setting.default), setting.name
