"""A stand-in for the head of a Ray cluster: the part of its REST API that loop/remote/cluster.py uses, for tests of what a client does."""

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# venv/bin/python of a checkout: itself, but that it has Ray, and hands jobs to the head below.
PYTHON = """#!/bin/sh
case "$*" in
*find_spec*) exit 0 ;;
*submit.py) exec {python} -c '
import json, os, sys, urllib.request
job = json.load(sys.stdin)
with open(os.path.join(job["folder"], "train.py")) as f:
    job["train"] = f.read()
urllib.request.urlopen(job["address"] + "/submit", data=json.dumps(job).encode())
' ;;
esac
exec {python} "$@"
"""


class Head:
    """Each job ends at once with the value that its train.py states; where that has a text in it which is in `held`, it goes on."""

    def __init__(self):
        self.jobs, self.held, self.stopped, self.asked = {}, set(), [], []
        self.about = {}  # what else is said of each job
        self.nodes = [{"node_id": "a", "node_ip": "127.0.0.1", "state": "ALIVE", "resources_total": {"CPU": 64.0}}]
        head = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                head.asked.append(self.path)
                found = head.answer(self.path.partition("?")[0])
                content = json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path == "/submit":
                    job = json.loads(content)
                    head.jobs[job["id"]] = job
                else:
                    head.stopped.append(self.path.split("/")[3])
                self.do_GET()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def end(self):
        self.server.shutdown()
        self.server.server_close()

    def serve(self, checkout):
        """Let a checkout's venv hand its jobs to this head."""
        python = checkout.folder / "venv/bin/python"
        python.unlink()
        python.write_text(PYTHON.format(python=os.path.realpath(sys.executable)))
        python.chmod(0o755)

    def answer(self, path):
        kind, _, rest = path.removeprefix("/api/").partition("/")
        if kind != "jobs":
            return {"data": {"result": {"result": self.nodes}}} if kind == "v0" else {}
        name, _, what = rest.partition("/")
        job = self.jobs.get(name)
        if job is None:
            return None
        if what == "logs":
            log = "Running entrypoint for job x: y\nstep 00000 (0.0%) | loss: 8.0\n"
            return {"logs": log if self.holds(job) else f"{log}\nautoresearch answers: {json.dumps({'outcome': outcome(job)})}\n"}
        status = "RUNNING" if self.holds(job) else "SUCCEEDED"
        return {"status": status, "driver_node_id": "a", "driver_agent_http_address": "http://127.0.0.1:1"} | self.about

    def holds(self, job):
        return any(word in job["train"] for word in self.held)


def outcome(job):
    """What a run of the stand-in's train.py leaves."""
    value, bonus = (float(re.search(rf"^{name} = (.*)", job["train"], re.M)[1]) for name in ("VALUE", "BONUS"))
    seed = json.loads(job["environment"]["AUTORESEARCH_TURN"])["seed"]
    summary = {"val_bpb": round(value - bonus + (seed - 42) * 0.001, 6), "num_steps": 120, "device": "CPU", "fingerprint": "0123456789ab"}
    seconds = dict.fromkeys(("startup", "training", "evaluation", "total"), 1.0)
    return {"state": "valid", "reason": None, "summary": summary, "seconds": seconds, "losses": [], "device": "CPU", "other_cpu": 0.0}
