"""Sampling: continuous batching over many requests, adapters and prompts on one base model.

``sampler`` runs the loop; ``job`` is what it takes, within the ``limits``; ``prefill``, ``kv_cache`` and
``prompt_cache`` bring prompts
into memory and keep them there; ``compute`` is where the numbers come from, torch or the ``compiled`` core; ``logits``
draws tokens; ``stopping`` ends sequences; ``prompt_scores`` answers what was asked about a prompt.
"""
