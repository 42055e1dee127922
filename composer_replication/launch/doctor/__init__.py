"""The commands ``doctor`` and ``env``: what is wrong on a machine or in a config, before it costs.

Read ``examination.py`` first: it has the list of checks. A check is a function that takes what it
judges as arguments and returns results; the other modules have one subject each.
"""
