"""How a joiner gets the global state from a donor: authenticated, checked by hash, without pickles.

``transport.py`` is what torchft calls; read it first. ``donor.py`` is what a donor gives to peers
through the rank's ``PeerServer``, and the copy that it makes. ``state_bytes.py`` is the format.
"""
