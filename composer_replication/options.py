"""A replica group's own options, and the environment that fills them. Imports no torch."""

import functools
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypedDict, Unpack

from composer_replication.arguments import (
    check_integer,
    check_names,
    check_seconds,
    check_types,
    closest,
    defaults_of,
    shows,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PREFIX = "COMPOSER_REPLICATION_"
COORDINATOR = f"{PREFIX}COORDINATOR"
HOSTNAME = f"{PREFIX}HOSTNAME"
BACKEND = f"{PREFIX}BACKEND"
RUN_DIR = f"{PREFIX}RUN_DIR"
HANG_TIMEOUT = f"{PREFIX}HANG_TIMEOUT_S"
TOKEN = f"{PREFIX}TOKEN"
NO_TOKEN = f"{PREFIX}NO_TOKEN"
SHARED_VARIABLES = ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE")
"""Those without our prefix: torchft, engines and the scripts of users read or set them too."""
OWN_VARIABLES = (COORDINATOR, HOSTNAME, BACKEND, RUN_DIR, HANG_TIMEOUT, TOKEN, NO_TOKEN)

START = "Start the groups with `composer-replication launch --replicas 2 -- python train.py`"
"""The fix if a job of several groups was started as a plain program."""


class DuplicateIdError(ValueError):
    """Another replica group has this one's ``replica_id``. The name may be free the next time."""


OnStartTimeout = Literal["error", "start"]
"""What a cold start does if too few replica groups are connected after ``start_timeout_s``."""

Backend = Literal["gloo", "nccl", None]
EvalWeights = Literal["global", "local"]


class WaitKeywords(TypedDict, total=False):
    """For how many other replica groups a group waits, and for how long."""

    num_replicas: Annotated[int | None, None]
    """How many groups a cold start waits for, this one included. A group that finds others in
    training joins them, whatever their number. None: ``NUM_REPLICA_GROUPS``, else 1.
    """

    give_up_after_s: Annotated[float | None, None]
    """How long to wait for a quorum, or for ``min_replica_size`` groups, before an error is raised,
    in seconds. None: without a limit. The log says what is missing.
    """


class SyncKeywords(WaitKeywords, total=False):
    """One replica group's own options of ``DiLoCo``."""

    start_timeout_s: Annotated[float, 600.0]
    """How long a cold start waits for the other groups, in seconds. It is looked at between two
    quorums: for how long it waits for the first one, ``give_up_after_s`` says.
    """

    on_start_timeout: Annotated[OnStartTimeout, "error"]
    """What happens after that: ``error``, or ``start`` with those connected."""

    hang_timeout_s: Annotated[float | None, None]
    """How long this group may go without a completed step, sync, save or evaluation batch, in
    seconds. After that its process counts as hung and ends, with a traceback of every thread in its
    log. A process that is busy gets five times as long, and one that waits for other groups gets an
    hour and ``timeout`` in addition; how long it asks for a quorum is ``give_up_after_s``, and no
    hang. ``math.inf``, in YAML ``.inf``: no limit. None:
    ``COMPOSER_REPLICATION_HANG_TIMEOUT_S``, else 1800.
    """

    backup_device: Annotated["torch.device | str | None", None]
    """Where global parameters and outer momentum rest between syncs, 8 bytes a parameter. ``cpu``
    for a model that leaves no room for them on its accelerator: a sync then brings them there in
    parts. None: where the model is.
    """

    digest_every: Annotated[int, 0]
    """Every how many outer steps the groups compare digests of their global parameters, and reports
    contain the ``global_digest``; 0: never.
    """

    same_samples: Annotated[bool, False]
    """Whether this group is meant to train on the same samples as others. If it is not, a warning
    at the first sync names the groups that do.
    """


class ManagerKeywords(WaitKeywords, total=False):
    """How a replica group reaches the others: the options of ``make_manager``."""

    replica_id: Annotated[str | int | None, None]
    """Name of this replica group, different in each (``check_replica_id``). None:
    ``REPLICA_GROUP_ID``; a group that trains alone is ``0`` without it.
    """

    lighthouse_addr: Annotated[str | None, None]
    """``http://host:port`` of the lighthouse. None: ``TORCHFT_LIGHTHOUSE``, else that of the
    coordinator. Without either of them ``num_replicas`` has to be 1, and the group trains alone,
    without a network.
    """

    min_replica_size: Annotated[int, 1]
    """Fewest groups in a quorum that may commit; equal in all groups."""

    timeout: Annotated[float, 60.0]
    """Limit of a collective and of a vote, in seconds. A heal's download has a second more for each
    megabyte.
    """

    hostname: Annotated[str | None, None]
    """How peers reach this machine. Its store, manager, process group and peer server listen on
    that address, if it is an address of this machine. None: ``COMPOSER_REPLICATION_HOSTNAME``, else
    the address from which this machine reaches the lighthouse; if that is a loopback address, its
    host name and every interface.
    """

    backend: Annotated[Backend, None]
    """How groups average, equal in all of them: ``gloo``, through host memory, or ``nccl`` between
    GPUs. Over NCCL nobody can say who has died, and what hangs ends only after ``timeout``. None:
    ``COMPOSER_REPLICATION_BACKEND``, else gloo.
    """


class OptionKeywords(SyncKeywords, ManagerKeywords, total=False):
    """All options of one replica group, those of a trainer's callback: :class:`ReplicaOptions`."""

    coordinator_addr: Annotated[str | None, None]
    """``http://host:port`` of the coordinator, whose settings this group takes. None:
    ``COMPOSER_REPLICATION_COORDINATOR``, else the run has no coordinator.
    """

    final_sync: Annotated[bool, True]
    """Whether training ends with a sync of the steps since the last one. After it the model holds
    the global parameters.
    """

    eval_weights: Annotated[EvalWeights, "global"]
    """Which parameters evaluators see: the ``global`` ones, or this group's ``local`` ones."""

    run_dir: Annotated[str | None, None]
    """The run's folder. None: ``COMPOSER_REPLICATION_RUN_DIR``, else nothing is written."""


@dataclass(frozen=True, init=False)
class ReplicaOptions:
    """The options of one replica group, checked.

    An option that is None comes from the environment if ``ReplicaEnv`` has a variable for it.

    Raises:
        TypeError: A keyword is no option; the message has the closest one.
        ValueError: A value is out of range; the message has the value and the fix.
    """

    num_replicas: int | None
    give_up_after_s: float | None
    start_timeout_s: float
    on_start_timeout: OnStartTimeout
    hang_timeout_s: float | None
    backup_device: "torch.device | str | None"
    digest_every: int
    same_samples: bool
    replica_id: str | int | None
    lighthouse_addr: str | None
    min_replica_size: int
    timeout: float
    hostname: str | None
    backend: Backend
    coordinator_addr: str | None
    final_sync: bool
    eval_weights: EvalWeights
    run_dir: str | None

    @shows(OptionKeywords)
    def __init__(self, **named: Unpack[OptionKeywords]) -> None:
        check_names(named, OptionKeywords, "ReplicaOptions")
        vars(self).update(defaults_of(OptionKeywords) | named)  # though the class is frozen
        check_types(self)
        if self.lighthouse_addr is not None:
            vars(self)["lighthouse_addr"] = self.lighthouse_addr.rstrip("/")  # a path follows it
        if self.replica_id is not None:
            check_replica_id(self.replica_id)
        check_integer("min_replica_size", self.min_replica_size, at_least=1)
        if self.num_replicas is not None:
            check_integer("num_replicas", self.num_replicas, at_least=1)
        check_integer("digest_every", self.digest_every, at_least=0)
        check_seconds("timeout", self.timeout)
        check_seconds("start_timeout_s", self.start_timeout_s)
        if self.give_up_after_s is not None:
            check_seconds("give_up_after_s", self.give_up_after_s)
        if self.hang_timeout_s is not None and self.hang_timeout_s != math.inf:
            check_seconds("hang_timeout_s", self.hang_timeout_s, alternative="inf for never")
        if self.num_replicas is not None and self.min_replica_size > self.num_replicas:
            raise ValueError(
                f"min_replica_size={self.min_replica_size} is above num_replicas="
                f"{self.num_replicas}: no sync could ever commit. Use at most that"
            )

    @property
    def num_awaited(self) -> int:
        """How many groups a cold start waits for, this one included."""
        return self.num_replicas or 1

    @property
    def is_alone(self) -> bool:
        """Whether this group trains without a network: it is the only one of its run."""
        names_no_other = self.lighthouse_addr is None and self.coordinator_addr is None
        return self.num_replicas == 1 and names_no_other

    def with_environment(self, environ: Mapping[str, str] | None = None) -> Self:
        """Fill the options that are None from the environment; an argument beats a variable."""
        filled = vars(ReplicaEnv.from_env(environ)).items()
        own = replace(self, **{k: v for k, v in filled if getattr(self, k, "") is None})
        is_nameless = own.is_alone and own.replica_id is None
        return replace(own, replica_id="0") if is_nameless else own


@dataclass(frozen=True)
class ReplicaEnv:
    """The environment variables of this process. No other class reads them.

    Of another variable whose name begins with ``COMPOSER_REPL`` a warning says that nothing reads
    it. It is no error: Kubernetes sets such ones where a Service has that name.

    | variable | meaning |
    |---|---|
    | ``REPLICA_GROUP_ID`` | which replica group this is, from 0 (torchft's name) |
    | ``NUM_REPLICA_GROUPS`` | how many a cold start waits for (torchft's name) |
    | ``TORCHFT_LIGHTHOUSE`` | address of the lighthouse, ``http://host:port`` |
    | ``COMPOSER_REPLICATION_COORDINATOR`` | address of the coordinator, if there is one |
    | ``COMPOSER_REPLICATION_HOSTNAME`` | how the other groups reach this machine |
    | ``COMPOSER_REPLICATION_BACKEND`` | ``gloo`` or ``nccl``, see ``backend`` |
    | ``COMPOSER_REPLICATION_RUN_DIR`` | the run's folder |
    | ``COMPOSER_REPLICATION_HANG_TIMEOUT_S`` | after how long without progress a group ends |
    | ``COMPOSER_REPLICATION_TOKEN`` | the secret that all groups of a run share; while it is being
      replaced two, with a comma between them: all are accepted, the first one signs |
    | ``COMPOSER_REPLICATION_NO_TOKEN`` | ``1`` allows a run without a token beyond this machine |

    ``tokens`` has all accepted tokens; ``token`` is the first one, with which this process signs.
    """

    replica_id: str | None
    num_replicas: int | None
    lighthouse_addr: str | None
    run_dir: str | None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    coordinator_addr: str | None = None
    hang_timeout_s: float | None = None
    hostname: str | None = None
    backend: str | None = None
    no_token: bool = False

    @property
    def token(self) -> str | None:
        return self.tokens[0] if self.tokens else None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables.

        Args:
            environ: The environment. None: that of this process.

        Raises:
            ValueError: ``NUM_REPLICA_GROUPS`` is not a positive integer, a token is malformed, or
                the time until a hang is not a number.
        """
        environ = os.environ if environ is None else environ
        for name in unread_variables(environ):
            _warn_of(name)
        count = environ.get("NUM_REPLICA_GROUPS")
        if count is not None and (not count.isdecimal() or int(count) < 1):
            raise ValueError(f"NUM_REPLICA_GROUPS={count!r}: use the number of replica groups")
        return cls(
            replica_id=environ.get("REPLICA_GROUP_ID"),
            num_replicas=None if count is None else int(count),
            lighthouse_addr=environ.get("TORCHFT_LIGHTHOUSE") or None,
            run_dir=environ.get(RUN_DIR) or None,
            tokens=read_tokens(environ.get(TOKEN, "")),
            coordinator_addr=environ.get(COORDINATOR) or None,
            hang_timeout_s=_seconds(environ, HANG_TIMEOUT),
            hostname=environ.get(HOSTNAME) or None,
            backend=environ.get(BACKEND) or None,
            no_token=environ.get(NO_TOKEN) == "1",
        )


def unread_variables(environ: Iterable[str]) -> list[str]:
    """The names that look like ours, also with a misspelt prefix, and that nothing reads."""
    return [
        name for name in environ if name.startswith("COMPOSER_REPL") and name not in OWN_VARIABLES
    ]


@functools.cache
def _warn_of(name: str) -> None:  # the environment is read several times
    # They are compared without the prefix, since with it all are similar.
    known = [each.removeprefix(PREFIX) for each in OWN_VARIABLES]
    close = closest(name.split("_", 2)[-1], known)
    hint = f"did you mean {PREFIX}{close}?"
    is_of_a_service = name.startswith(tuple(f"{each}_" for each in OWN_VARIABLES))  # Kubernetes'
    if close is None or is_of_a_service:
        hint = f"those of groups are {', '.join((*SHARED_VARIABLES, *OWN_VARIABLES))}"
    log.warning("Nothing reads the variable %s: %s", name, hint)


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: use a number of seconds, or inf") from None


def replica_id_of(options: ReplicaOptions) -> str:
    """The name of this group.

    Raises:
        ValueError: It has none.
    """
    if options.replica_id is None:
        raise ValueError(
            f"replica_id=None: this replica group has no name. {START}, or set REPLICA_GROUP_ID "
            "(replica_id=...) to 0, 1, ..., different in each group. To train alone, set "
            "num_replicas=1, and name no lighthouse"
        )
    return str(options.replica_id)


def lighthouse_of(options: ReplicaOptions) -> str:
    """The address of this group's lighthouse.

    Raises:
        ValueError: None is named.
    """
    if options.lighthouse_addr is None:
        raise ValueError(
            f"lighthouse_addr=None: no lighthouse is named. {START}, or set TORCHFT_LIGHTHOUSE "
            "(lighthouse_addr=...) to http://host:port. To train alone, without a network, set "
            "num_replicas=1"
        )
    return options.lighthouse_addr


def read_tokens(text: str, source: str = TOKEN) -> tuple[str, ...]:
    """Split the text of a token variable or file into the run's accepted tokens.

    The first token signs; all are accepted. There are two while a token is being replaced. For that
    every process is started again three times: with ``old,new``, with ``new,old``, and with
    ``new``. At each stage all processes accept the token with which the others sign.

    Args:
        text: One token, or two with a comma or a line break between them. Surrounding whitespace
            is dropped, since files and secret stores append a line break.
        source: What the text was read from, for the error.

    Returns:
        None, one or two tokens.

    Raises:
        ValueError: A token is not printable ASCII, which an HTTP header needs, or there are more
            than two. The message does not contain the token.
    """
    tokens = tuple(filter(None, (part.strip() for part in text.replace("\n", ",").split(","))))
    for token in tokens:
        for position, character in enumerate(token, start=1):
            if not " " <= character <= "~":
                raise ValueError(
                    f"{source}: character {position} of the token is U+{ord(character):04X}, which "
                    "is not printable ASCII: make one with `openssl rand -hex 16`"
                )
    if len(tokens) > 2:
        raise ValueError(
            f"{source} has {len(tokens)} tokens, separated by commas or line breaks: use one, or "
            "the new and the old one while it is being replaced"
        )
    return tokens


_REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_replica_id(replica_id: str | int) -> None:
    """Check the name of a replica group.

    The name becomes part of URLs, of a folder's name, and of torchft's name for the group
    (``name:uuid``).

    Raises:
        ValueError: The name has a character that would be misread there, or is too long.
    """
    is_name = not isinstance(replica_id, bool) and _REPLICA_ID.fullmatch(str(replica_id))
    if not is_name:
        raise ValueError(
            f"replica_id={replica_id!r}: give each replica group a name of its own, of at most 64 "
            "letters, digits, '.', '_' and '-', with a letter or a digit in front"
        )
