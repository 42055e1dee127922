"""Persisted work units: which group has leased which part of a dataset, and what is trained.

Read ``work_units.py`` first.
"""
