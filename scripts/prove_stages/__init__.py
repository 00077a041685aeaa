"""The stages of `scripts/prove_on_device.py`: what is measured on the day a GPU or TPU is there.

1. `stages.py` lists them, the most valuable first, each with its share of the time.
2. `children.py` runs one process a stage (`worker.py`), ends it at its limit, and goes on with the next.
3. A stage's module yields `Program`s, which compile for devices that are not here, too, and `Measurement`s, which run them.
4. `journal.py` keeps a line of JSON for each figure, on disk before the next one is measured; `delivery.py` copies it away.
5. `tables.py` writes the lines as tables; `plan.py` says beforehand how long each stage takes.

Modules that the parent process imports load no jax, which would take the device away from the stages.
"""
