"""The model name in the contract tests."""

BASE_MODEL = "tiny/llama"
