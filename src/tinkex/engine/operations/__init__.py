"""The life of an operation, from its acceptance to its result.

``checks`` and ``admission`` accept it (``access``: whose is it, ``fingerprint``: was it sent before), ``backlog`` holds
it until its turn, ``execution`` and ``decoding`` carry it out on the models that are ``served`` and their
``snapshots``, ``outcomes`` words the result, ``recording`` writes it down, ``waiting`` wakes whoever polls for it.
``savepoints``, ``recovery`` and ``replay`` bring runs through a crash (``bodies``: requests in the journal), ``health``
says what does not work, ``maintenance`` looks after what is left.
"""
