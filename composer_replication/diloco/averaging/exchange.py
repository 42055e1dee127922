"""The messages of one sync in a quantized wire format."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.utils import get_stream_context

from composer_replication.diloco.averaging.quantized_buckets import QuantizedBucket
from composer_replication.diloco.torchft_api import DiLoCoManager


class _PeerFailed(Exception):
    """A message has not arrived. The manager already has the reason."""


class Exchange:
    """Sends the buckets of one sync. It is a Work: ``wait`` returns after the last message.

    Each bucket takes two messages. A thread computes what goes into the second one, so that
    training continues meanwhile. All groups must start their collectives in the same order,
    therefore the caller starts no other collective before ``wait`` has returned.

    Args:
        manager: The torchft manager, or its simulated double.
        buckets: The buckets, in the same order in all groups.
        contribution: This group's weight. With 0 its values are zeros.
        memory: uint8, as large as the ``memory_bytes`` of all buckets together.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        buckets: Sequence[QuantizedBucket],
        contribution: float,
        memory: Tensor,
    ) -> None:
        self.buckets = buckets
        self._manager = manager
        self._keeps_error = contribution > 0
        available = torch.accelerator.is_available()
        self._stream = torch.accelerator.current_stream() if available else None
        with torch.no_grad():
            parts = memory.split([bucket.memory_bytes for bucket in buckets])
            self._works = [
                bucket.start_first(manager, contribution, part)
                for bucket, part in zip(buckets, parts, strict=True)
            ]
        self._following: list[Any] = []
        # Without a thread the second messages would start only when training next waits, and the
        # sync would not overlap with it.
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._start_all_second()
        self._wait_for_second()

    def _start_all_second(self) -> None:
        try:
            with torch.no_grad(), get_stream_context(self._stream):
                for bucket, work in zip(self.buckets, self._works, strict=True):
                    self._following.append(self._start_second(bucket, work))
        except _PeerFailed:
            pass
        except Exception as error:
            self._manager.report_error(error)
        finally:
            # A gloo connection stays open while one of its Works exists. If this group has given
            # up, its peers would wait for its messages until their timeout.
            self._works.clear()

    def _wait_for_second(self) -> None:
        try:
            with torch.no_grad(), get_stream_context(self._stream):
                for work in filter(None, self._following):
                    work.wait()
        except Exception as error:
            self._manager.report_error(error)
        finally:
            self._following.clear()

    def _start_second(self, bucket: QuantizedBucket, work: Any) -> Any:
        work.wait()
        if self._manager.errored():
            raise _PeerFailed
        return bucket.start_second(self._manager, self._keeps_error)

    @property
    def total(self) -> float:
        """The sum of all contributions. If it is 0, there is no mean."""
        return self.buckets[0].total

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the last message. Errors are reported to the manager, not raised."""
        del timeout  # the manager's timeout bounds each message
        self._thread.join()
        return True
