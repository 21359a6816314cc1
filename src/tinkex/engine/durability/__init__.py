"""Durability: commits, savepoints, replay, recovery at start, and retention."""
