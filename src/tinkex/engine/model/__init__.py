"""The base model: its shape, weights, tokenizer and adapters, and where they come from.

``catalog`` finds or makes a model directory, ``loader`` reads it into a ``transformer``, ``lora`` holds the
trainable part, ``adapter_files`` moves that part to and from PEFT directories.
"""
