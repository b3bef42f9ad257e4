"""
Runs on a Ray cluster. A turn becomes one of its jobs: the files of the commit as working directory, one GPU or some cores, and node.py.

Jobs are sent by Ray's own client (`ray[default]` in venv/) and watched through its REST API, by HTTP to the dashboard's port. A job goes on
without whoever sent it, so a supervisor that was killed is replaced by one that takes up the job where it is. What is known of the place
of a turn is in runs/N/cluster.json: address, attempts, nodes that were passed over.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse

from harness.common.text import visible

from ..files import ENVIRONMENT, LIMITS, ROOT, Refusal, now_text, read_bytes, read_json, run_file, seconds_text, write_file, write_json
from ..ledger import settings_of
from ..processes import cache_folder
from ..repository import git_bytes
from ..run import die_with_parent, interrupted
from .node import ANSWER

PORT = 8265  # of Ray's dashboard
MOST_BYTES = 2**26  # of an answer
LOCAL = f"http://127.0.0.1:{PORT}"
PYTHON = os.path.join(ROOT, "venv", "bin", "python")
# Of the files that are sent: they change no run. The last two would have Ray leave out files that are in the commit.
EXCLUDED = ("docs", "tests", "sample", "benchmarks", "*.md", "*.ipynb", "*.png", ".ci", "*.gitignore", "*.rayignore")
# Of the series' settings; the others are a node's own.
VARIABLES = ("AUTORESEARCH_DATASET", "AUTORESEARCH_TIME_BUDGET", "GPU_BF16_PEAK_FLOPS")


class Unreachable(Exception):
    """No answer, or none that Ray gives."""


class Unknown(Exception):
    """The cluster does not know what it is asked for."""


class Denied(Refusal):
    """The cluster wants another token."""


# ---------------------------------------------------------------------------
# The cluster
# ---------------------------------------------------------------------------


def token():
    """Ray's token, where it asks for one (RAY_AUTH_MODE=token): found where Ray's own client finds it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    found = (os.environ.get("RAY_AUTH_TOKEN") or (read_bytes(path) or b"").decode("utf-8", "replace")).strip()
    if not re.fullmatch("[!-~]*", found):  # said here, without it: an error of the header would show it
        raise Refusal("Ray's token (RAY_AUTH_TOKEN, ~/.ray/auth_token) has spaces or line breaks in it: it is one word", ENVIRONMENT)
    return found


def ask(address, path, method="GET", timeout=20):
    """What the REST API answers."""
    # Here and not above: every command of experiment.py imports this module, and few ask.
    import http.client
    import urllib.error
    import urllib.request

    known = token()
    headers = {"Authorization": f"Bearer {known}"} if known else {}
    request = urllib.request.Request(f"{address}{path}", method=method, headers=headers)
    stays = urllib.request.HTTPRedirectHandler()
    stays.redirect_request = lambda *_: None  # a redirect would carry the token to whoever it names
    direct = [urllib.request.ProxyHandler({})] if is_near(address) else []
    until = time.monotonic() + timeout
    try:
        with urllib.request.build_opener(stays, *direct).open(request, timeout=timeout) as response:
            content = b""
            while chunk := response.read1(2**16):
                content += chunk
                if len(content) > MOST_BYTES or time.monotonic() > until:
                    raise Unreachable(f"Ray at {address} answers without end")
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("its answer is no object")
        return answer
    except urllib.error.HTTPError as e:
        if e.code == 404:
            raise Unknown(path) from None
        said = visible(" ".join(e.read(300).decode("utf-8", "replace").split()))
        if e.code in (401, 403):
            raise Denied(f"Ray at {address} wants its token ({said}): the same ~/.ray/auth_token on every machine", ENVIRONMENT) from None
        raise Unreachable(f"Ray at {address} answers {e.code}: {said}") from None
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise Unreachable(visible(f"no Ray answers at {address} ({getattr(e, 'reason', e)})")) from None


def is_near(address):
    """Whether no proxy of the environment (http_proxy) leads there: a dashboard by plain HTTP is in one's own network."""
    return address.startswith("http:")


def address_of(text):
    """The dashboard's address, as http://HOST:PORT, of what --on was given."""
    if text == "local":
        return LOCAL
    parts = urllib.parse.urlsplit(text if "//" in text else f"http://{text}")
    try:
        # No name and password: what is given here is written down, and shown in Ray's dashboard.
        good = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.:%-]+", parts.hostname or "") and (parts.port or PORT) != 6379
        good = good and "@" not in parts.netloc
    except ValueError:
        good = False
    if not good:
        raise Refusal(f"--on {text}: use `local`, or the address of Ray's dashboard, such as 10.0.0.5 or http://10.0.0.5:{PORT}")
    if parts.scheme == "http" and parts.port is None:
        return f"http://{parts.netloc}:{PORT}"
    return f"{parts.scheme}://{parts.netloc}"


def find(text):
    """The address of a cluster that answers; `local` is started where it is not running. Refusal says what is missing."""
    address = address_of(text)
    probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('ray') and u.find_spec('aiohttp')))"
    if not os.path.exists(PYTHON) or subprocess.run([PYTHON, "-c", probe], cwd=ROOT).returncode:
        raise Refusal("--on needs Ray in venv/: . ./env.sh && pip install 'ray[default]'", ENVIRONMENT)
    try:
        ask(address, "/api/version", timeout=10)
    except (Unreachable, Unknown) as e:
        if text != "local":
            raise Refusal(f"{e}: is it the dashboard's address, and does a firewall let it through?", ENVIRONMENT) from None
        start_local()
    return address


def start_local():
    """A cluster of this machine alone, with all its GPUs, for whoever has its token. It stays until `ray stop`."""
    python = os.path.join(venv_without_spaces(), "bin", "python")
    ray = [python, "-W", "ignore", "-m", "ray.scripts.scripts"]
    quiet = dict(cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    gpus = subprocess.run([PYTHON, "-c", "import torch; print(torch.cuda.device_count())"], **quiet)
    count = int(gpus.stdout.strip() or 0)
    if not token():  # Ray listens on all of a machine's addresses
        subprocess.run([*ray, "get-auth-token", "--generate"], **quiet)
        for path, mode in ((os.path.expanduser("~/.ray"), 0o700), (os.path.expanduser("~/.ray/auth_token"), 0o600)):
            with contextlib.suppress(OSError):
                os.chmod(path, mode)  # it is made for everybody to read
    search = f"{os.path.dirname(python)}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"PATH": search, "RAY_USAGE_STATS_ENABLED": "0"} | secret()
    place = ["--head", "--port=0", "--disable-usage-stats", f"--num-gpus={count}", "--dashboard-host=127.0.0.1", f"--dashboard-port={PORT}"]
    done = subprocess.run([*ray, "start", *place], env=environment, **quiet)
    until = time.monotonic() + 60
    while True:
        try:
            ask(LOCAL, "/api/version", timeout=5)
            break
        except (Unreachable, Unknown):
            if done.returncode or time.monotonic() > until:
                said = [" ".join(line.split()) for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["no output"]
                named = [line for line in said if re.match(r"[\w.]*(Error|Exception): ", line)]  # Ray shows pages of its logs before it
                why = named[-1] if named else next((line for line in said if "Error" in line), said[-1])
                raise Refusal(f"`ray start --head` failed: {why[:200]}", ENVIRONMENT) from None
            time.sleep(0.5)
    print(f"started Ray on this machine, {counted(count, 'GPU')}; venv/bin/ray stop ends it")


def venv_without_spaces():
    """venv/ by a path that Ray can start its workers from: it quotes none."""
    venv = os.path.realpath(os.path.join(ROOT, "venv"))
    if " " not in venv:
        return venv
    link = os.path.join(cache_folder(), f"venv-{hashlib.sha256(venv.encode()).hexdigest()[:8]}")
    if " " in link:
        raise Refusal(f"Ray does not work from paths with spaces, and there are some in {venv} and {link}: set AUTORESEARCH_CACHE")
    os.makedirs(cache_folder(), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.symlink(venv, link)
    return link


def secret():
    """What makes Ray use its token, where there is one."""
    known = token()
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": known} if known else {}


def nodes(address, timeout=20):
    """[{"node_id", "node_ip", "state", "resources_total", …}]"""
    answer = ask(address, "/api/v0/nodes?limit=10000", timeout=timeout)  # 100 without it, those counted that are gone
    try:
        return [node for node in answer["data"]["result"]["result"] if {"node_id", "node_ip", "state", "resources_total"} <= node.keys()]
    except (KeyError, TypeError, AttributeError):
        raise Unreachable(f"Ray at {address} lists its nodes in another way than expected: is its version another?") from None


def counted(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say_if_none_could(address, cores):
    """One line where no node has what a run declares: it will wait, for one that is started or for nothing."""
    with contextlib.suppress(Unreachable, Unknown):
        if not any(could(node, cores) for node in nodes(address)):
            what = counted(cores, "core") if cores else "a GPU"
            mend = "" if cores else " (`ray start --num-gpus` says how many there are; `--cores N` is for nodes without)"
            print(f"no node at {address} has {what} now: the run waits for one, at most {seconds_text(LIMITS['queue'])}{mend}")


def could(node, cores):
    """Whether a node has what a run declares."""
    total = node["resources_total"]
    return node["state"] == "ALIVE" and (total.get("CPU", 0) >= cores if cores else total.get("GPU", 0) >= 1)


def files_of(commit, folder):
    """The files of a commit that a run needs, into an empty folder."""
    import tarfile  # as above

    pathspec = [".", *(f":(exclude){pattern}" for pattern in EXCLUDED)]
    with tarfile.open(fileobj=io.BytesIO(git_bytes("archive", "--format=tar", commit, "--", *pathspec))) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def send(job):
    """Send a job by Ray's client, which is no part of this process: it is large, and only venv/ has it."""
    command = [PYTHON, "-W", "ignore", os.path.join(ROOT, "loop", "remote", "submit.py")]
    # Without what Ray would take for the address, whatever it is given.
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")} | secret()
    environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "*") if is_near(job["address"]) else {}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=die_with_parent,  # the next supervisor sends the same job, from the same folder
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"Ray at {job['address']} took no job in 300 s") from None
    if done.returncode:
        raise Unreachable(visible((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]))


# ---------------------------------------------------------------------------
# One turn
# ---------------------------------------------------------------------------


def run(turn, expected):
    """Have a turn run on the cluster. Returns (state, reason), and more of its outcome, as a run on this machine does.

    A run whose node is lost, or turns out to be broken, is sent again, until LIMITS["attempts"]; a node that can't do it (other data,
    another device) is passed over, which does not count. Where this process is killed, the next one goes on with the job that was sent.
    """
    path = run_file(turn["number"], "cluster.json")
    place = place_of(turn["number"]) or {"address": turn["on"], "attempts": [], "passed_over": {}}
    begun, silent = time.monotonic(), None  # silent: since when nothing has been heard
    while True:
        attempts = place["attempts"]
        if interrupted:
            if attempts:
                with contextlib.suppress(Unreachable, Denied):
                    stop_job(place["address"], f"/api/jobs/{attempts[-1]['id']}")
            return ("stopped", interrupted[0]), {}
        if not attempts or attempts[-1].get("end"):
            lost = [a["end"] for a in attempts if a.get("counts")]
            if len(lost) >= LIMITS["attempts"]:
                return ("environment", f"given up after {len(lost)} attempts: {'; '.join(dict.fromkeys(lost))}"[:600]), {}
            job = f"autoresearch-{turn['tag']}-{turn['number']}-{len(attempts) + 1}-{turn['token'][:8]}"
            attempts.append({"id": job, "sent": now_text()})
            write_json(path, place)
        attempt = attempts[-1]
        try:
            end, what = watch(turn, expected, place, attempt, path)
            silent = None
        except (Unreachable, Denied) as e:
            if silent is None:
                print(f"{now_text()} {e}", flush=True)
            silent = silent or time.monotonic()
            if time.monotonic() - silent > LIMITS["lost"]:
                return ("environment", f"{e}, for {LIMITS['lost']:g} s"), {}
            nap(5)
            continue
        if end == "outcome" and what["state"] not in ("environment", "stopped"):
            return (what.pop("state"), what.pop("reason")), what | {"node": attempt.get("node")}
        if end == "interrupted":
            continue
        if end == "stopped":
            return ("stopped", what), {}
        if end in ("queued", "waits", "busy") and time.monotonic() - begun > LIMITS["queue"]:
            return ("environment", f"no node took it in {LIMITS['queue']:g} s{f': {what}' if end == 'busy' else ''}"), {}
        if end == "outcome":
            end, what = ("broken", what["reason"]) if what["state"] == "environment" else ("lost", what["reason"])
        where = attempt.get("node") or "a node"
        attempt |= {"end": what if end == "waits" else f"{where}: {what}", "counts": end in ("lost", "broken")}
        if end in ("unfit", "broken"):
            place["passed_over"][attempt["node_id"]] = f"{where}: {what}"
        print(f"{now_text()} {attempt['id']}: {end}: {attempt['end']}", flush=True)
        write_json(path, place)
        if end == "busy":
            nap(30)
        if end in ("unfit", "broken") and not candidates(place, turn["cores"]):
            return ("environment", f"no node can run it: {'; '.join(place['passed_over'].values())}"[:600]), {}


def nap(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not interrupted:
        time.sleep(0.2)


def candidates(place, cores):
    """The nodes that may still do it; True where the cluster does not say."""
    try:
        return [n for n in nodes(place["address"]) if could(n, cores) and n["node_id"] not in place["passed_over"]]
    except (Unreachable, Unknown, Denied):
        return True


def job_of(turn, expected, place, attempt, folder):
    """What is sent: see loop/remote/submit.py."""
    begun = settings_of(turn["tag"]).get("environment") or {}
    given = {name: begun[name] for name in VARIABLES if name in begun}
    given |= {"AUTORESEARCH_DATASET": expected["dataset"]} if expected["dataset"] else {}
    given |= {"AUTORESEARCH_HARDWARE": "none", "OMP_NUM_THREADS": str(turn["cores"])} if turn["cores"] else {}
    keys = ("number", "tag", "kind", "seed", "token", "cores")
    told = {key: turn[key] for key in keys} | {"expected": expected, "environment": given, "limits": LIMITS}
    return {
        "address": place["address"],
        "id": attempt["id"],
        "folder": folder,
        "environment": {"AUTORESEARCH_TURN": json.dumps(told)},
        "cores": turn["cores"],
        "not_on": list(place["passed_over"]),
        "metadata": {"autoresearch": f"{socket.gethostname()}:{ROOT}", "series": turn["tag"], "run": str(turn["number"])},
    }


def watch(turn, expected, place, attempt, path):
    """Send an attempt's job if the cluster does not know it, and wait for its end. Returns (how it ended, what there is to say of it):

    "outcome" (an object), "unfit", "busy", "lost", "stopped" (why), "waits" (why: Ray gave it up before a node was free), "queued" (None:
    as long as it may wait), "interrupted" (None: a signal to this process). Unreachable where the cluster does not answer.
    """
    address, job = place["address"], f"/api/jobs/{attempt['id']}"
    running, looked, begun = None, 0.0, time.monotonic()
    phases = ("training", "evaluation", "ending", "silence")
    limit = float(expected["budget"] or 600) + sum(LIMITS[phase] for phase in phases) + 300  # the node's own limits come first
    while not interrupted:
        try:
            about = ask(address, job)
        except Unknown:
            if attempt.get("known"):
                return "lost", "the cluster no longer knows the job: its head was restarted"
            folder = run_file(turn["number"], "files")
            shutil.rmtree(folder, ignore_errors=True)
            os.mkdir(folder)
            try:
                files_of(turn["commit"], folder)
                send(job_of(turn, expected, place, attempt, folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        status = about.get("status")
        if not isinstance(status, str):
            raise Unreachable(f"Ray at {address} says nothing of the state of {job}")
        known = {"known": True, "status": status, "node_id": about.get("driver_node_id")}
        known["node"] = urllib.parse.urlsplit(about.get("driver_agent_http_address") or "").hostname
        if any(attempt.get(key) != value for key, value in known.items()):
            attempt |= known
            write_json(path, place)
        now = time.monotonic()
        if status in ("SUCCEEDED", "FAILED", "STOPPED"):
            said = last_log(turn, address, job, LIMITS["ending"] if status == "SUCCEEDED" else 0)
            if status == "SUCCEEDED" and said:
                return said
            if about.get("error_type") == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":  # after 15 minutes, its RAY_JOB_START_TIMEOUT_SECONDS
                return "waits", "no node was free, and Ray gave it up: it is sent again"
            if status == "STOPPED":
                return "stopped", "it was stopped through Ray"
            return "lost", visible(" ".join((about.get("message") or "it ended without an answer").partition(":")[0].split()))
        if status == "RUNNING":
            running = running or now
            if now - running > limit:
                stop_job(address, job)
                return "lost", f"it had not ended {limit:.0f} s after its start"
            if now - looked > 15:
                last_log(turn, address, job, 0)
                looked = now
        elif now - begun > LIMITS["queue"]:
            stop_job(address, job)
            return "queued", None
        nap(1 if now - begun < 30 else 5)
    return "interrupted", None


def stop_job(address, job):
    with contextlib.suppress(Unknown):  # then there is nothing to stop
        ask(address, f"{job}/stop", method="POST")


def last_log(turn, address, job, wait):
    """`fetch_log`, tried for `wait` seconds more; None where the node that has the log does not give it."""
    until = time.monotonic() + wait
    while True:
        try:
            return fetch_log(turn, address, job)
        except (Unreachable, Unknown):
            if time.monotonic() >= until or interrupted:
                return None
            nap(2)


def fetch_log(turn, address, job):
    """The job's log so far into runs/N/run.log. Returns what its last line answers, as (word, what); None without an answer."""
    logs = ask(address, f"{job}/logs", timeout=60).get("logs")
    if not isinstance(logs, str):
        raise Unreachable(f"Ray at {address} has no log of {job}")
    text = logs.partition("Running entrypoint for job ")[2].partition("\n")[2]
    body, _, last = text.rstrip().rpartition("\n")
    answered = last.startswith(ANSWER)
    content = (body if answered else text).encode("utf-8", "replace")[-int(LIMITS["log"]) :]
    write_file(run_file(turn["number"], "run.log"), content)
    if answered:
        with contextlib.suppress(ValueError, AttributeError):  # while it runs: a part of it, or what train.py printed
            ((word, what),) = json.loads(last.removeprefix(ANSWER)).items()
            return word, what
    return None


def describe(address, running):
    """What `status` says of a cluster, as data. running: the turns that are under way there."""
    places = {turn["number"]: where(turn["number"]) for turn in running}
    about = {"address": address, "queued": [number for number, place in places.items() if place == "queued"]}
    try:
        alive = [node for node in nodes(address, timeout=5) if node["state"] == "ALIVE"]
    except (Unreachable, Unknown, Refusal) as e:
        return about | {"nodes": None, "error": str(e)}
    return about | {
        "nodes": [
            {
                "address": node["node_ip"],
                "gpus": int(node["resources_total"].get("GPU", 0)),
                "cores": int(node["resources_total"].get("CPU", 0)),
                "runs": [number for number, place in places.items() if place.split(",")[0] == f"on {node['node_ip']}"],
            }
            for node in sorted(alive, key=lambda node: node["node_ip"])
        ]
    }


def lines(about):
    """The same in at most three lines."""
    found = about["nodes"]
    if found is None:
        return [f"cluster {about['address']}: {about['error']}"]
    gpus, cores = (sum(node[key] for node in found) for key in ("gpus", "cores"))
    busy = [f"{node['address']} run {', '.join(map(str, node['runs']))}" for node in found if node["runs"]]
    free = [node["address"] for node in found if not node["runs"]]
    more = {word: f"; and {len(some) - 12} more" if len(some) > 12 else "" for word, some in (("busy", busy), ("free", free))}
    total = ", ".join((counted(len(found), "node"), counted(gpus, "GPU"), counted(cores, "core")))
    return [
        f"cluster {about['address']}: {total}; queued: {len(about['queued'])}",
        *[f"  at work: {'; '.join(busy[:12])}{more['busy']}"] * bool(busy),
        *[f"  idle: {'; '.join(free[:12])}{more['free']}"] * bool(free),
    ]


def place_of(number):
    """cluster.json of a run; None without one that is as it was written."""
    place = read_json(run_file(number, "cluster.json")) or {}
    attempts, passed = place.get("attempts"), place.get("passed_over")
    whole = isinstance(attempts, list) and all(isinstance(a, dict) and isinstance(a.get("id"), str) for a in attempts)
    return place if whole and isinstance(passed, dict) and isinstance(place.get("address"), str) else None


def where(number):
    """Where a run in a cluster is, in words."""
    attempts = (place_of(number) or {}).get("attempts")
    if not attempts or attempts[-1].get("status") in (None, "PENDING"):
        return "queued"
    return f"on {attempts[-1].get('node')}" + (f", attempt {len(attempts)}" if len(attempts) > 1 else "")
