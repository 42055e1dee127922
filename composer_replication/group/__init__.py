"""A trainer as one replica group of a DiLoCo run, whatever the trainer.

``ReplicaGroup`` is what a trainer calls, and ``Host`` what the group asks of it. Read
``replica_group.py`` first. This package may import ``data``, the coordinator's client, ``replica``
and ``diloco``, and knows no trainer.
"""
