"""One sync's messages in a wire format: to whom they go, and who sums them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.utils import get_stream_context

from composer_replication.diloco.averaging.quantized_buckets import EncodedBucket
from composer_replication.diloco.torchft_api import DiLoCoManager


class _PeerFailed(Exception):
    """A message has not come; the manager knows why."""


class Exchange:
    """The messages of one sync, started; a Work to be waited for.

    What there is to do between the first and the second message of a bucket is done on a thread, so
    that training goes on meanwhile. The groups' collectives have to be in the same order: the
    caller starts no other before this one has been waited for.

    Args:
        manager: The torchft manager, or its simulated double.
        buckets: In the order that all groups share.
        contribution: Of this group. With 0 its values are zeros.
        keeps_error: Whether the buckets are to tell what has been rounded away.
        memory: uint8, of the ``memory_bytes`` of all buckets.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        buckets: Sequence[EncodedBucket],
        contribution: float,
        keeps_error: bool,
        memory: Tensor,
    ) -> None:
        self.buckets = buckets
        self._manager = manager
        self._keeps_error = keeps_error and contribution > 0
        available = torch.accelerator.is_available()
        self._stream = torch.accelerator.current_stream() if available else None
        with torch.no_grad():
            places = memory.split([bucket.memory_bytes for bucket in buckets])
            self._works = [
                bucket.start(manager, contribution, place)
                for bucket, place in zip(buckets, places, strict=True)
            ]
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), get_stream_context(self._stream):
                following = [
                    self._follow(bucket, work)
                    for bucket, work in zip(self.buckets, self._works, strict=True)
                ]
                for work in filter(None, following):
                    work.wait()
        except _PeerFailed:
            pass
        except Exception as error:
            self._manager.report_error(error)
        finally:
            # A gloo connection stays open while there is a Work of it, and peers that wait for the
            # messages of a group that has given up are freed by its end.
            self._works.clear()

    def _follow(self, bucket: EncodedBucket, work: Any) -> Any:
        work.wait()
        if self._manager.errored():
            raise _PeerFailed
        return bucket.follow(self._manager, self._keeps_error)

    @property
    def total(self) -> float:
        """The sum of all contributions. With 0 there is no mean."""
        return self.buckets[0].total

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the last message. Errors have gone to the manager."""
        del timeout  # the manager's
        self._thread.join()
        return True
