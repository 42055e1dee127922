"""A fit that fails before its group has joined, in whatever Trainer."""

from contextlib import contextmanager

import pytest

of_each_place = pytest.mark.parametrize(
    "where", ["group.replica_group.connect", "diloco.algorithm.join"], ids=["connect", "wait"]
)
"""Where a start may fail."""


@contextmanager
def failed_start(where="group.replica_group.connect"):
    """The context of a fit that fails there."""

    def fail(*arguments):
        raise TimeoutError("nobody is there")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(f"composer_replication.{where}", fail)
        yield
