"""Sampling: continuous batching over many requests, adapters and prompts on one base model.

``sampler`` runs the loop over ``job``s, within the ``limits``; ``prefill`` and ``prompt_cache`` compute and keep the keys
and values of prompts; ``decode_cache`` holds those of decoding sequences, in the slots of ``kv_cache`` or the blocks of
``block_table``; ``compute`` runs the passes, by torch or by the ``compiled`` core; ``adjustments`` apply penalties, biases and
the ``grammar`` of a structured output; ``logits`` draws tokens; ``stopping`` ends sequences; ``prompt_scores`` collects prompt logprobs.
"""
