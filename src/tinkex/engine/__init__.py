"""The engine: a Tinker-compatible server that trains and samples on this machine.

``core`` takes accepted work, ``scheduler`` plans batches of it, ``trainer`` and ``sampler`` run them on a
``model``, ``store`` remembers everything, and ``api`` is the door. Importing this package costs nothing.
"""
