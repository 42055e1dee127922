"""How a joiner gets the global state from a peer: authenticated, checked, without pickles.

Read ``transport.py`` first.
"""
