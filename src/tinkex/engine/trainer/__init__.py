"""Training: datums in, gradients and optimizer steps out.

``examples`` checks what a caller sent, ``batch`` packs it into passes, ``head`` turns hidden states into
logprobs and gradients, ``losses`` holds the formulas, ``loss_graph`` runs those that users upload (read by
``loss_parsing`` against the allow-list of ``loss_operations``, bounded by ``loss_sizes``), ``optim`` takes the AdamW
step, ``checkpoint`` writes the files; ``trainer`` puts them together.
"""
