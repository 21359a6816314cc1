"""The Anthropic protocol: messages, and counting their tokens."""
