"""What a lighthouse's status page shows beyond what the package reads of it, for the tests."""

import re
from urllib.request import ProxyHandler, build_opener


def heard_of(lighthouse_addr: str) -> set[str]:
    """The names of all that have ever sent the lighthouse a heartbeat, dead ones included."""
    with build_opener(ProxyHandler({})).open(f"{lighthouse_addr}/status", timeout=30.0) as answer:
        page = answer.read().decode()
    return set(re.findall(r'class="heartbeat[^"]*">\s*(\S+): seen', page))
