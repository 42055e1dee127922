"""A laboratory for slow links: two replica groups in network namespaces, with a link between them.

* ``bandwidth``: rounds of DiLoCo and DDP over links of several rates and delays.
* ``messages``: in how many messages gloo should send the bytes of a sync.

Both run from the root of the repository, as ``python -m benchmarks.slow_links.bandwidth``. They
need root, iproute2 and a kernel with network namespaces, veth, tbf and TUN.

``links`` makes namespaces and links, ``relay`` delays packets, ``link_probe`` measures a link.
``visits`` drives the two groups (``shaped_group``) by ``group_commands``. ``shaped_bench`` takes
the measurements of ``bandwidth`` in turns, and ``shaped_tables`` prints them.
"""
