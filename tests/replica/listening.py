"""The sockets on which this process listens."""

import psutil


def listening_addresses():
    """The address and the port of each of them."""
    found = psutil.Process().net_connections()
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}
