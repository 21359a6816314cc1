"""What the contract calls its model."""

BASE_MODEL = "tiny/llama"
