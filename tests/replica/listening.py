"""Where this process listens."""

import psutil


def listening_addresses():
    """Addresses and ports."""
    found = psutil.Process().net_connections()
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}
