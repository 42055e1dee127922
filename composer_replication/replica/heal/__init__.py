"""How a joiner gets the global state from a donor: authenticated, checked by hash, without pickles.

``transport.py`` is what torchft calls; read it first. ``donor.py`` is what a donor offers, and the
copy that it makes. ``client.py`` and ``server.py`` are the two ends of a download, ``offer.py`` is
what a donor says before one, ``proof.py`` the proofs of the token that both check,
``state_bytes.py`` the format, and ``prefetch.py`` the download before the first quorum.
"""
