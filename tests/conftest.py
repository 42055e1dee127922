"""For all tests."""

import os

# A lighthouse says that it is at the machine's own name, on many machines no loopback address.
os.environ.setdefault("COMPOSER_REPLICATION_NO_TOKEN", "1")
# torch looks up the name of every peer it connects to (SocketImpl, for its messages). Where the
# name server does not answer, that is 20 s a connection. No test needs one: glibc asks it 0 times.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
