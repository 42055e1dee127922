"""DiLoCo and Streaming DiLoCo, exact, on torchft's schedule and commit votes.

``algorithm.DiLoCo`` is the way in, and the file to read first. This package knows torch and
torchft, and imports nothing else of ours: no Composer, no YAML, no HTTP.
"""
