"""Training: datums in, gradients and optimizer steps out.

``examples`` checks what a caller sent, ``batch`` packs it into passes, ``head`` turns hidden states into
logprobs and gradients, ``losses`` holds the formulas, ``optim`` the AdamW step, ``checkpoint`` the files;
``trainer`` puts them together.
"""
