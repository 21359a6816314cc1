"""What users hold: service, training, sampling and REST clients."""
