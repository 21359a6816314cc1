"""Where the numbers are computed: the seam between the engine that decides and the models that compute.

``seam`` says what can be asked; ``local`` does it in this process; ``remote`` has it done by a worker process over a
``channel``, and ``child`` is what runs in there. Weights never cross the seam: they are read and written by
whoever holds them, in files that the engine names.
"""
