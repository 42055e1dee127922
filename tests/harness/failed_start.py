"""A fit that fails before its group has joined, in whatever Trainer."""

from contextlib import contextmanager

import pytest

of_each_place = pytest.mark.parametrize(
    "where", ["group.replica_group.connect", "diloco.algorithm.join"], ids=["connect", "wait"]
)
"""Gives a test ``where``: what fails, the group's connection or its wait for the others."""


@contextmanager
def failed_start(where="group.replica_group.connect"):
    """The fit in this context has to fail, in the function ``where`` of the package."""

    def fail(*arguments):
        raise TimeoutError("nobody is there")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TimeoutError, match="nobody is there"),
    ):
        patch.setattr(f"composer_replication.{where}", fail)
        yield
