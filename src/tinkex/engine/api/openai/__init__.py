"""The OpenAI protocol: models, completions and chat completions."""
