"""A trainer as one replica group of a DiLoCo run, whatever the trainer.

This package may import ``data``, the coordinator's client, ``replica`` and ``diloco``, and knows no
trainer: those are Composer's callback in ``callback``, and others.
"""
