"""Tinkex: the Tinker API in Python, everywhere."""

from __future__ import annotations

from tinkex._version import __version__ as __version__
