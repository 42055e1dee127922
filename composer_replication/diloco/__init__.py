"""DiLoCo and Streaming DiLoCo on torchft's schedule and commit votes.

Read ``algorithm.py`` first: its ``DiLoCo`` is the algorithm. (The one for loops of one's own, in
``group/plain_loop.py``, adds reports.) This package knows torch and torchft: no Composer, no YAML,
no HTTP. Of ours it imports ``settings``, ``options`` and ``util``.
"""
