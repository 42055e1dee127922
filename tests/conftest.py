"""For all tests."""

import os

# A lighthouse says that it is at the machine's own name, on many machines no loopback address.
os.environ.setdefault("COMPOSER_REPLICATION_NO_TOKEN", "1")
