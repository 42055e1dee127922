"""A real Slurm of two nodes on this machine, from Debian's packages, without installing them."""

import contextlib
import getpass
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil
from debian import unpacked
from waiting import wait_until

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15"
NODES = ("site0", "site1")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
# A requeued job may start again when its credential has expired. Slurm's default is 120 s.
AuthInfo=cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=10
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=3 State=UNKNOWN\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def fetch_slurm(folder: Path) -> Path:
    """Download and unpack Slurm into a folder, once.

    Raises:
        MissingProgram: This is no Debian, or its packages cannot be downloaded.
    """
    return unpacked(folder, *PACKAGES.split(), program="usr/sbin/slurmctld-wlm")


class SlurmCluster:
    """A controller and two nodes, each a slurmd. Leaving the context ends them and all jobs.

    Args:
        root: Where Slurm is unpacked.
        folder: For its state and logs. Commands are run in it.
        environ: The environment of jobs.
    """

    def __init__(self, root: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._sbin = root / "usr/sbin"
        libraries = root / f"usr/lib/{platform.machine()}-linux-gnu"
        plugins = libraries / "slurm-wlm"
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname()
        conf = CONF.format(
            host=host, user=getpass.getuser(), port=ports[0], plugins=plugins, folder=folder
        )
        for name, port in zip(NODES, ports[1:], strict=True):
            conf += NODE.format(name=name, host=host, port=port)
        (folder / "slurm.conf").write_text(conf + PARTITION)
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "state").mkdir()
        inherited = {name: v for name, v in environ.items() if not name.startswith("SLURM_")}
        self.environ = inherited | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{root / 'usr/bin'}:{environ['PATH']}",
            "LD_LIBRARY_PATH": f"{plugins}:{libraries}",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        self._start("slurmctld", "slurmctld-wlm", "-D", "-c")
        for name in NODES:
            self.start_node(name)
        try:
            wait_until(lambda: self.nodes() == {name: "idle" for name in NODES}, 60, self.logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill_daemon("slurmctld")  # first, or it would start jobs again
        for name in NODES:
            self.kill_node(name)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, also after it was killed."""
        stepd = self._sbin / "slurmstepd-wlm"
        self._start(name, "slurmd-wlm", "-D", "-N", name, "-d", str(stepd))

    def kill_daemon(self, name: str) -> None:
        """Kill the slurmd of a node, or ``slurmctld``; jobs go on."""
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node and everything that Slurm has started there, as a reboot does.

        Its spool is emptied, as that of a node without a disk is.
        """
        self.kill_daemon(name)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._is_on(name, process):
                    process.kill()
        shutil.rmtree(self.folder / f"spool-{name}", ignore_errors=True)

    def _is_on(self, name: str, process: psutil.Process) -> bool:
        # A daemon of a step writes its title over its environment. Its folder is its slurmd's.
        if process.name().startswith("slurmstepd"):
            return process.cwd() == str(self.folder / name)
        environ = process.environ()
        own = self.environ["SLURM_CONF"], name
        return (environ.get("SLURM_CONF"), environ.get("SLURMD_NODENAME")) == own

    def nodes(self) -> dict[str, str]:
        """The state of each node, in Slurm's words."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").split("\n")
        return dict(line.split() for line in lines if line)

    def jobs(self) -> dict[str, str]:
        """The state of each job or array task that has not ended, by its name and its task."""
        lines = self.run("squeue", "-h", "-r", "-o", "%j_%K %T").split("\n")
        return dict(line.replace("_N/A", "").split() for line in lines if line)

    def run(self, *command: str) -> str:
        """Run a command of Slurm's, and return what it has printed."""
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout.strip()

    def _start(self, name: str, program: str, *arguments: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [self._sbin / program, *arguments],
                env=self.environ,
                cwd=self.folder / name,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def logs(self) -> str:
        """The end of what Slurm and its jobs have said."""
        said = ""
        for path in [*self.folder.glob("*.out"), *self.folder.glob("*.txt")]:
            lines = re.split(r"[\r\n]+", path.read_text(errors="replace"))
            last = [line for line in lines if line.strip() and "%|" not in line][-20:]
            said += "\n".join(["", f"--- {path.name}", *last])
        return said


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
