"""Experiments an hour on a Ray cluster, and what would limit a large one. Both with a stand-in training that sleeps.

    python benchmarks/cluster.py                        # 1, 2 and 4 workers; --workers, --seconds (of training), --rounds
    python benchmarks/cluster.py --machines 100         # so many runs at once on one node that declares so many cores; --seconds 240

The cluster is real, each node a loopback address of this machine. With --machines, 5 % of the runs are killed once, as by a lost node, and
the processor time of Ray's head, of the clients' supervisors and the ledger's rows are counted.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "helpers")]
from checkout import Checkout
from ray_nodes import TOKEN, Nodes

from loop.files import read_bytes


def client(folder, nodes, count):
    """The stand-in's project, and its data on each node; a series of it is begun."""
    checkout = Checkout(folder / "client" / "project", {"RAY_AUTH_TOKEN": TOKEN}).make()
    shutil.rmtree(checkout.folder / "venv")
    (checkout.folder / "venv").symlink_to(sys.prefix)
    for n in range(count):
        shutil.copytree(checkout.folder.parent / "cache", nodes.cache(n))
    checkout.call("begin", "series", "--on", nodes.address, "--cores", 1, "--wait", 100, limit=120)
    return checkout


def patches(checkout, count, seconds):
    """`count` ideas, none of which is better."""
    best, paths = checkout.train.read_text(), []
    for i in range(count):
        checkout.edit(VALUE=3.0 + i / 1000, SECONDS=float(seconds))
        paths.append(checkout.folder.parent / f"idea {i}.patch")
        paths[-1].write_text(checkout.git("diff", "train.py") + "\n")
    checkout.train.write_text(best)
    return paths


def wait(checkout):
    while "is still running" in checkout.call("wait", "--wait", 50, code=None):
        pass


def hourly(workers, seconds, rounds):
    """Experiments an hour of `workers` nodes with one core each, with enough of them for `rounds` on each."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    nodes = Nodes(folder)
    try:
        for n in range(workers):
            nodes.start(n)
        checkout = client(folder, nodes, workers)
        ideas = patches(checkout, workers * rounds, seconds)
        start = time.perf_counter()
        checkout.call("try", "--on", nodes.address, "--wait", 0, "--patches", *ideas, code=75)
        wait(checkout)
        elapsed = time.perf_counter() - start
        assert len(checkout.rows) == 1 + len(ideas)
        return 3600 * len(ideas) / elapsed
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


def usage(pids):
    """(processor seconds, resident bytes) of processes."""
    ticks = pages = 0
    for pid in pids:
        fields = (read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
        if fields:
            ticks += int(fields[11]) + int(fields[12])
            pages += int((read_bytes(f"/proc/{pid}/statm") or b"0 0").split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE")


def command_of(pid):
    return (read_bytes(f"/proc/{pid}/cmdline") or b"").replace(b"\0", b" ")


def head_of(nodes):
    """What only a head has: the store of the cluster's state, the dashboard with its parts, the autoscaler."""
    parts = (b"gcs_server", b"dashboard.py", b"ray-dashboard", b"monitor.py")
    return [pid for pid in nodes.processes(0) if any(part in command_of(pid) for part in parts)]


def supervisors(checkout):
    mark = f"{checkout.folder / 'experiment.py'} _supervise".encode()
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and mark in command_of(pid)]


def many(machines, seconds):
    """One round of `machines` runs at once; prints what it costs the head and the client."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    nodes = Nodes(folder)
    try:
        nodes.start(0, cores=machines)
        checkout = client(folder, nodes, 1)
        ideas = patches(checkout, machines, seconds)
        head_before, (start, begun) = usage(head_of(nodes))[0], (time.perf_counter(), time.perf_counter())
        checkout.call("try", "--on", nodes.address, "--wait", 0, "--patches", *ideas, code=75, limit=600)
        print(f"{machines} runs sent: the command returned after {time.perf_counter() - begun:.0f} s", flush=True)

        def running():
            return [pid for pid in nodes.processes(0) if command_of(pid).rstrip().endswith(b"train.py")]

        peak, since = 0, time.perf_counter()
        while peak < machines and time.perf_counter() < since + 60:
            if (now := len(running())) > peak:
                peak, since = now, time.perf_counter()
            time.sleep(2)
        print(f"at once in training: {peak}, {time.perf_counter() - start:.0f} s after the start", flush=True)
        quiet_head, quiet_client, since = usage(head_of(nodes))[0], usage(supervisors(checkout)), time.perf_counter()
        time.sleep(30)
        span = time.perf_counter() - since
        head_share = (usage(head_of(nodes))[0] - quiet_head) / span
        client_share = (usage(supervisors(checkout))[0] - quiet_client[0]) / span
        count = max(1, len(supervisors(checkout)))
        print(
            f"while all train, of one core: head {100 * head_share:.1f} %, {count} supervisors together {100 * client_share:.1f} %"
            f" ({quiet_client[1] / count / 2**20:.0f} MiB each)",
            flush=True,
        )
        killed = random.Random(0).sample(running(), max(1, machines // 20))
        for pid in killed:
            parent = int((read_bytes(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)  # loop.remote.node: its run dies with it, and the job fails
        wait(checkout)
        elapsed = time.perf_counter() - start
        head = usage(head_of(nodes))
        ends = sorted(path.stat().st_mtime for path in (checkout.folder / "runs").glob("*/verdict.json"))[1:]
        gaps = [b - a for a, b in zip(ends, ends[1:])]
        retried = sum(path.read_text().count('"counts": true') for path in (checkout.folder / "runs").glob("*/cluster.json"))
        assert len(checkout.rows) == machines + 1 and len({row[4] for row in checkout.rows}) == machines + 1
        fastest = min(b - a for a, b in zip(ends, ends[9:]))
        print(f"{machines} rows after {elapsed:.0f} s, each once; {len(killed)} runs killed, {retried} sent again")
        print(f"head: {(head[0] - head_before) / machines:.2f} processor seconds a run, {head[1] / 2**20:.0f} MiB")
        print(f"ledger: rows {statistics.median(gaps):.2f} s apart (median), ten of them within {fastest:.1f} s")
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--seconds", type=float, default=30, help="of stand-in training (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="experiments for each worker (default: 3)")
    parser.add_argument("--machines", type=int, metavar="N", help="one round of N runs at once instead")
    arguments = parser.parse_args()
    if arguments.machines:
        return many(arguments.machines, arguments.seconds)
    writer = csv.writer(sys.stdout)
    writer.writerow(("workers", "seconds", "experiments_an_hour", "of_linear", "overhead_s"))
    one = None
    for workers in arguments.workers:
        rate = hourly(workers, arguments.seconds, arguments.rounds)
        one = one or rate / workers
        overhead = 3600 * workers / rate - arguments.seconds
        writer.writerow((workers, arguments.seconds, f"{rate:.1f}", f"{rate / workers / one:.3f}", f"{overhead:.1f}"))
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    sys.exit(main())
