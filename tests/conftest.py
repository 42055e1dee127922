"""The environment of all tests, and the order in which they run."""

import gc
import itertools
import os

import pytest

# A lighthouse says that it is at the machine's own name, on many machines no loopback address.
os.environ.setdefault("COMPOSER_REPLICATION_NO_TOKEN", "1")
# torch looks up the name of every peer it connects to (SocketImpl, for its messages). Where the
# name server does not answer, that is 20 s a connection. No test needs one: glibc asks it 0 times.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Models here are tiny: more threads in each of many processes only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pyarrow, which transformers imports, would start a thread, and the fork server may have none.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
gc.disable()  # until all tests are imported: it would look at all that they import


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says where other groups are, or the run's folder."""
    of_a_run = "REPLICA_GROUP_ID NUM_REPLICA_GROUPS TORCHFT_LIGHTHOUSE COMPOSER_REPLICATION_RUN_DIR"
    for name in of_a_run.split():
        monkeypatch.delenv(name, raising=False)


@pytest.hookimpl(trylast=True)  # after -m has left some out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that xdist's workers end at about the same time.

    ``--dist worksteal`` cuts the list into one share for each worker. A share begins with some of
    the longest tests, because all workers would wait for a long test that starts late. After that,
    half of the workers run tests that start processes and mostly wait, while the others compute.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    computing = [item for item in items if item.get_closest_marker("integration") is None]
    waiting = [item for item in items if item.get_closest_marker("integration") is not None]
    longest = [item for item in waiting if _is_first(item)]
    longest_of = _deal(longest, workers)
    waiting_of = _deal([item for item in waiting if not _is_first(item)], workers)
    ordered: list[pytest.Item] = []
    for worker, (own, processes) in enumerate(zip(longest_of, waiting_of, strict=True)):
        end = (worker + 1) * len(items) // workers
        number = max(0, end - len(ordered) - len(own) - len(processes))
        computes, computing = computing[:number], computing[number:]
        ordered += own + (computes + processes if worker % 2 else processes + computes)
    items[:] = ordered + computing


def _is_first(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("slow", "together"))


def _deal(items: list[pytest.Item], workers: int) -> list[list[pytest.Item]]:
    """Divide tests between workers; those of a module marked ``together`` go to the same one."""
    hands: list[list[pytest.Item]] = [[] for _ in range(workers)]
    hand_of: dict[str, list[pytest.Item]] = {}
    turns = itertools.cycle(hands)
    for item in items:
        is_together = item.get_closest_marker("together") is not None
        key = item.nodeid.partition("::")[0] if is_together else item.nodeid
        if key not in hand_of:
            hand_of[key] = next(turns)
        hand_of[key].append(item)
    return hands


def pytest_collection_finish() -> None:
    """Keep the garbage collector from checking a million objects that are never freed."""
    gc.collect()
    gc.freeze()
    gc.enable()
