"""Work units in a database: which group has leased which samples, and which are in the model.

Read ``work_units.py`` first.
"""
