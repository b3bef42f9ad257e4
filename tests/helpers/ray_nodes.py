"""A Ray cluster on this machine, a loopback address a node: for tests/loop/test_cluster.py and benchmarks/cluster.py."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from checkout import NO_GPU

TOKEN = uuid.uuid4().hex


def is_free(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


class Nodes:
    """Nodes that are started and lost one by one. Each has its own address, cache and environment, as separate machines have.

    The third number of the addresses, 127.0.NETWORK.x, keeps the ports of several clusters apart: one that nobody has taken.
    """

    def __init__(self, folder):
        self.folder, self.mark = Path(folder), uuid.uuid4().hex
        self.network = next(n for n in random.sample(range(20, 250), 230) if all(map(is_free, (6390 + n, 8265 + n, 21001 + n))))
        self.sessions = tempfile.mkdtemp(prefix="ray-")  # short: the names of sockets in it may have 107 characters
        self.address = f"http://{self.ip(0)}:{8265 + self.network}"

    def ip(self, n):
        return f"127.0.{self.network}.{2 + n}"

    def cache(self, n):
        return self.folder / f"node{n}"

    def start(self, n, cores=1, gpus=0, **environment):
        """Node `n`; 0 is the head, and first."""
        search = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
        environment = (
            os.environ
            | {
                "PATH": search,
                "AUTORESEARCH_CACHE": str(self.cache(n)),
                "AUTORESEARCH_HARDWARE": "none",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": TOKEN,
                "RAY_health_check_period_ms": "1000",  # a lost node is noticed in seconds, not in half a minute
                "RAY_health_check_failure_threshold": "3",
                "NODE": f"{self.mark}-{n}",
            }
            | ({} if gpus else NO_GPU)
            | environment
        )
        environment.pop("AUTORESEARCH_DATASET", None)
        port = 6390 + self.network
        place = ["--head", f"--port={port}", f"--dashboard-host={self.ip(0)}", f"--dashboard-port={8265 + self.network}",
                 f"--ray-client-server-port={21001 + self.network}"] if n == 0 else [f"--address={self.ip(0)}:{port}"]  # fmt: skip
        ray = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={self.ip(n)}"]
        ray += [f"--num-cpus={cores}", f"--num-gpus={gpus}", "--object-store-memory=80000000", "--disable-usage-stats"]
        ray += [f"--dashboard-agent-listen-port={52400 + 10 * self.network + n}", *[f"--temp-dir={self.sessions}"] * (n == 0)]
        done = subprocess.run(ray, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        if n == 0:
            self.wait_for_dashboard()

    def wait_for_dashboard(self):
        request = urllib.request.Request(f"{self.address}/api/version", headers={"Authorization": f"Bearer {TOKEN}"})
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                return
            time.sleep(0.25)
        raise TimeoutError(f"no dashboard at {self.address}")

    def processes(self, n=None):
        """What runs on node `n`, or on all of them."""
        mark = f"NODE={self.mark}-{'' if n is None else n}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as f:
                    if any(v == mark if n is not None else v.startswith(mark) for v in f.read().split(b"\0")):
                        yield int(entry)

    def lose(self, n=None):
        """The power fails."""
        while pids := list(self.processes(n)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def end(self):
        self.lose()
        shutil.rmtree(self.sessions, ignore_errors=True)
