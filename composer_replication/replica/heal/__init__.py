"""How a joiner gets the global state from a donor: authenticated, checked by hash, without pickles.

``transport.py`` is what torchft calls; read it first. ``donor.py`` is what a donor offers, and the
copy that it makes. ``client.py`` and ``server.py`` are the two ends of a download, ``protocol.py``
is what both say: the offer, and the proofs of the token. ``state_bytes.py`` is the format, and
``prefetch.py`` the download before the first quorum.
"""
