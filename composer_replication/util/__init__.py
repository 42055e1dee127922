"""What belongs to no other package: files, fences, connections. Imports nothing of ours.

Read ``fence.py`` first.
"""
