"""Training: datums in, gradients and optimizer steps out.

``trainer`` runs jobs: ``examples`` validates datums, ``batch`` packs them, ``backbone`` runs the layers (``nodes`` with
``lora_kernels``), ``head`` computes logprobs and gradients, ``losses`` has the formulas, ``loss_graph`` runs custom losses
(parsed by ``loss_parsing`` against the allow-list of ``loss_ops``, bounded by ``loss_sizes``), ``running_job`` collects
results, ``optim`` takes the AdamW step, ``checkpoint`` writes the files.
"""
