"""Runs replica groups on this machine: starts, watches and restarts them, and writes a report.

Read ``launcher.py`` first. This package may import ``training``, the coordinator's server, the
packages below them, and the plan. ``doctor`` looks for what is wrong before a run.
"""
