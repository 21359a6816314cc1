"""Base models: architecture, weights, tokenizer and adapters, and how they are found.

``catalog`` finds, downloads or converts a model directory, ``loader`` reads it into a ``transformer``, ``lora`` has the
trainable adapters, ``adapter_files`` reads and writes them as PEFT directories.
"""
