"""
The loop: one command an idea, and a ledger that is true in the morning.

    python3 experiment.py begin nov29                # a new series: the branch autoresearch/nov29 and its baseline
    python3 experiment.py try "what train.py tries"  # run the working train.py; judge, record, and keep it or not
    python3 experiment.py wait                       # go on waiting for it (exit code 75 says that it is still running)
    python3 experiment.py noise 3                    # the best again with 3 other seeds: what is luck?
    python3 experiment.py status                     # where the series stands; --json for programs
    python3 experiment.py show 12                    # one run: diff, summary, end of the log
    python3 experiment.py stop                       # no new run after the current one; --now, --undo

A turn: the working train.py becomes a commit under refs/autoresearch/TAG/N; a detached supervisor runs it from a worktree at exactly that
commit and leaves runs/N/outcome.json; that and the best give the verdict; the verdict becomes one row of results.tsv; for a keep the branch
moves. All state is in runs/ and in git. Finishing a turn and recovering from a crash are the same function, `recover`, which every command
calls first: each of its steps is there already or is done now. Nothing is ever reset.

Exit codes: 0 a verdict, 1 the experiment crashed, 2 refused, 3 the machine or the data is at fault (end the loop), 4 stopped, 75 running.
AUTORESEARCH_LIMITS changes LIMITS of loop/files.py: "silence=60 evaluation=900". The rest of the environment is what run.sh reads.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import re
import signal
import statistics
import sys
import time

from harness.common.settings import seed as asked_seed
from loop import cluster
from loop.files import (
    CRASHED,
    ENVIRONMENT,
    LEDGER,
    LIMITS,
    REFUSED,
    ROOT,
    RUNNING,
    RUNS,
    STOPPED,
    TRAIN,
    Refusal,
    last_number,
    last_words,
    log_tail,
    now_text,
    read_bytes,
    read_json,
    read_turn,
    run_file,
    seconds_text,
    tried,
    write_file,
    write_json,
)
from loop.ledger import Series, is_noise, read_rows, score, set_ledger_aside
from loop.processes import check_disk, is_supervised, processes, state_lock
from loop.proposal import check_program, clean, code_size, digest_of, parse
from loop.repository import branch_of, check_files, check_repository, commit_tree, current_tag, git, git_file, resolve
from loop.run import STEP
from loop.supervisor import supervise
from loop.turns import (
    NO_SERIES,
    SETTINGS,
    check_untried,
    give_back,
    patched,
    propose,
    ready_series,
    recover,
    start_noise,
    start_turn,
    starting_point,
    stop_requested,
    unfinished,
)
from loop.verdict import UNEVEN, compared


def command_begin(arguments):
    tag = arguments.tag
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag) or git("check-ref-format", f"refs/heads/{branch_of(tag)}", check=False) is None:
        raise Refusal(f"{tag!r} is no tag: use letters, digits, - and _, such as nov29")
    try:
        seed = asked_seed()
    except ValueError as e:
        raise Refusal(str(e)) from None
    place = place_of(arguments)
    with state_lock():
        if running := recover():
            raise Refusal(f"run {running[0]['number']} is still running: wait for it")
        if not os.path.exists(TRAIN):
            raise Refusal("there is no train.py here")
        head = resolve("HEAD")
        if head is None:
            raise Refusal("the branch has no commit yet: commit the project first")
        check_files(exceptions=())
        source = git_file(head)
        digest = digest_of(parse(source))
        check_disk()
        exists, aside = resolve(f"refs/heads/{branch_of(tag)}"), None
        if exists and current_tag() != tag:
            raise Refusal(f"{branch_of(tag)} exists: git switch {branch_of(tag)} goes on with it; a new series needs another tag")
        owners = {line["commit"]: line["tag"] for line in tried()}
        tags = [owners.get(row["commit"]) for row in read_rows()]
        if exists and tags and tags[-1] == tag:
            if any(row["status"] == "keep" for row in read_rows()):
                raise Refusal(f"{branch_of(tag)} has begun: go on with try, or begin another tag")
        elif exists and not tags and any((read_json(run_file(t["number"], "verdict.json")) or {}).get("status") for t in Series(tag).tried):
            raise Refusal(f"{branch_of(tag)} has begun and results.tsv is missing: bring it back, or begin another tag")
        else:
            aside = set_ledger_aside(next(filter(None, reversed(tags)), "earlier"))
        if not exists:
            try:
                git("switch", "--quiet", "--create", branch_of(tag))
            except Refusal:  # then nothing has happened
                if aside:
                    os.rename(aside, LEDGER)
                raise
        if aside:
            print(f"results.tsv of an earlier series is now {os.path.relpath(aside, ROOT)}")
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(RUNS, "stop"))
        settings = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
        begun = {"tag": tag, "seed": seed, "environment": settings, "cores": place["cores"] or os.cpu_count(), "begun": now_text()}
        write_json(os.path.join(RUNS, f"{tag}.json"), begun)
        # A commit of its own, so that a commit names one run of one series.
        commit = commit_tree(resolve(f"{head}^{{tree}}"), f"baseline\n\nRun {last_number() + 1} of {branch_of(tag)}.\n", head)
        number = start_turn(Series(tag), "baseline", "baseline", commit, head, source, int(seed),
                            digest=digest, changed=[], **place)  # fmt: skip
    print(f"run {number}: the baseline of {branch_of(tag)}" + ("" if exists else f" (from {head[:7]})"))
    return wait_for(arguments.wait)


def place_in_series(arguments):
    """`place_of` a run of the series that is checked out. Not with the state lock, which others need: a cluster may take a minute."""
    series = None
    if arguments.on is not None:
        with state_lock():
            series, _ = ready_series(arguments.on)
    return place_of(arguments, series)


def place_of(arguments, series=None):
    """What a turn holds of where it runs: on, the cluster's address or None for this machine; cores, where a run there takes no GPU."""
    if arguments.on is None:
        if arguments.cores is not None:
            raise Refusal("--cores is for a cluster: --on ADDRESS")
        return {"on": None, "cores": None}
    if arguments.cores is not None and arguments.cores < 1:
        raise Refusal(f"--cores {arguments.cores}: use 1 or more")
    cores = arguments.cores
    if cores is None and series and series.outcome(series.baseline).get("device") == "CPU":
        cores = series.settings.get("cores")  # as many as the baseline had
    address = cluster.find(arguments.on)
    cluster.say_if_none_could(address, cores)
    return {"on": address, "cores": cores}


def check_idea(series, head, parent, source, simpler):
    """Refuse a train.py that can't be tried, or need not be. parent: the commit whose train.py was edited into it."""
    best, tree = git_file(parent), parse(source)
    check_untried(series, digest_of(tree), best)
    check_program(tree, parse(best), head)
    more = code_size(source) - code_size(best) if simpler else -1
    if more >= 0:
        raise Refusal(f"--simpler: this train.py has {more} more words of code than the best, so it is not simpler")


def command_try(arguments):
    if bool(arguments.patches) == bool(arguments.description):
        raise Refusal('say what train.py tries (experiment.py try "lower embedding rate"), or give --patches with --on')
    if arguments.patches and arguments.on is None:
        raise Refusal("--patches runs them at once, so it needs a cluster: --on ADDRESS, or --on local")
    if not 0 <= arguments.margin < math.inf:
        raise Refusal(f"--margin {arguments.margin}: use a number of noise floors, such as 1")
    patches = [patch for path in arguments.patches or () for patch in read_patches(path)]
    description = None if patches else clean(arguments.description)
    place = place_in_series(arguments)
    with state_lock():
        series, head = ready_series(arguments.on)
        if arguments.margin and not series.noise:
            raise Refusal("--margin is in noise floors, and the noise is not measured yet: experiment.py noise 3")
        how = place | {"margin": arguments.margin, "simpler": arguments.simpler, "prune": arguments.prune}
        mark = "simpler: " if arguments.simpler else ""
        if patches:
            ideas = ideas_of(series, head, patches, arguments.simpler)
        else:
            source = read_bytes(TRAIN)
            if source is None:
                raise Refusal("train.py is missing: git restore train.py")
            parent = starting_point(series.tag, head, source)
            check_idea(series, head, parent, source, arguments.simpler)
            numbers = [propose(series, parent, source, mark + description, file=TRAIN, **how)]
            if place["on"] and give_back(read_turn(numbers[0])):
                print(f"run {numbers[0]} has its own copy: train.py is as git has it, for the next idea")
    if patches:
        numbers = []
        for source, description in ideas:
            with state_lock():  # one by one: hundreds take minutes, and other commands and the runs that end have their turn between
                if stop_requested():
                    raise Refusal(f"the human has asked to stop: {len(numbers)} of {len(ideas)} were started", STOPPED)
                numbers.append(propose(Series(series.tag), head, source, mark + description, **how))
            time.sleep(0.15 * (len(numbers) % 10 == 0))  # longer than they pause before they ask again
    return wait_for(arguments.wait, numbers)


def ideas_of(series, head, patches, simpler):
    """[(train.py, description)] of each (path, description, patch) on the best: of all of them, or, where one can't be tried, a Refusal."""
    ideas = {}
    for path, description, patch in patches:
        try:
            source = patched(head, patch)
            check_idea(series, head, head, source, simpler)
            digest = digest_of(parse(source))
            if digest in ideas:
                raise Refusal(f"it is the same change as {ideas[digest][0]}")
            ideas[digest] = path, source, clean(description)
        except Refusal as e:
            raise Refusal(f"{path}: {e}; nothing was started", e.code) from None
    return [(source, description) for _, source, description in ideas.values()]


def read_patches(path):
    """[(path, description, patch)]: one, described by its first line of text or its name; or each mail of `git format-patch --stdout`."""
    content = read_bytes(path)
    if content is None:
        raise Refusal(f"--patches {path}: there is no such file")
    mails = re.split(rb"^(?=From [0-9a-f]{40} )", content.removeprefix(b"\xef\xbb\xbf"), flags=re.M)
    found = []
    for mail in filter(bytes.strip, mails):
        text = re.split(rb"^(?:diff --git |--- )", mail, maxsplit=1, flags=re.M)[0].decode("utf-8", "replace")
        subject = re.search(r"^Subject: (?:\[PATCH[^\]]*\] )?(.+(?:\n .+)*)", text, re.M)
        first = next(filter(str.strip, text.splitlines()), None)
        name = os.path.splitext(os.path.basename(path))[0]
        found.append((path, decoded(subject[1]) if subject else first or name, mail))
    if not found:
        raise Refusal(f"--patches {path}: it is empty")
    return found


def decoded(subject):
    """A mail's subject without the encoding that it has where it is not ASCII."""
    import email.errors  # here, so that only patches wait for it
    import email.header

    with contextlib.suppress(LookupError, ValueError, email.errors.MessageError):
        return str(email.header.make_header(email.header.decode_header(subject)))
    return subject


def command_noise(arguments):
    if not 1 <= arguments.count <= 100:
        raise Refusal(f"noise {arguments.count}: use 1 to 100 repeats")
    place = place_in_series(arguments)
    with state_lock():
        series, _ = ready_series(arguments.on)
        if place["on"]:  # all at once
            numbers = [start_noise(Series(series.tag), 1, **place) for _ in range(arguments.count)]
        else:
            numbers = [start_noise(series, arguments.count)]
    return wait_for(arguments.wait, numbers)


def command_wait(arguments):
    return wait_for(arguments.wait, first=arguments.any)


def wait_for(seconds, numbers=None, first=False):
    """Wait for these runs (default: all that are under way or whose verdict nobody was told, or the last one); print each verdict.

    first: return at the first verdict. Returns the last verdict's exit code, of several the one that most asks to be looked at, or 75.
    """
    until, pause, codes = time.monotonic() + seconds, 0.02, []
    if not last_number():
        raise Refusal("nothing has been run yet")
    pending = list(numbers or sorted({*untold(), *(turn["number"] for turn in unfinished())}) or [last_number()])
    several = len(pending) > 1
    while pending:
        for number in list(pending):
            said = read_json(run_file(number, "verdict.json"))
            if said:
                print("\n".join(said["lines"]), flush=True)
                write_file(run_file(number, "told"), b"")
                codes.append(said["code"])
                pending.remove(number)
                pending += filter(None, [said.get("next") or next_repeat(number)])
            elif not is_supervised(number):
                with state_lock():
                    recover()
                if read_turn(number) is None:
                    raise Refusal(f"runs/{number} was removed: nothing is known of that run")
        if codes and first:
            return codes[-1]
        if pending and not time.monotonic() < until:
            for number in pending:
                print(f"run {number} is still running ({progress_of(number)}): python3 experiment.py wait")
            return RUNNING
        time.sleep(min(pause, max(0.0, until - time.monotonic())) if pending else 0)
        pause = min(pause * 1.2, 1.0)
    return next(code for code in (ENVIRONMENT, STOPPED, 0, CRASHED) if code in codes) if several else codes[-1]


def untold():
    """Runs in a cluster that ended while nobody waited for them: their verdict was not printed yet."""
    for number in range(1, last_number() + 1):
        ended, told = (os.path.exists(run_file(number, name)) for name in ("verdict.json", "told"))
        if ended and not told and (read_turn(number) or {}).get("on"):
            yield number


def next_repeat(number):
    """The run that goes on with the repeats which this one belongs to; None where it was the last."""
    turn = read_turn(number)
    while turn["remaining"]:
        alive = is_supervised(number)  # asked first: it starts the next one and ends
        for line in tried():
            if line["number"] > number and line["kind"] == "noise" and line["commit"] == turn["short"]:
                return line["number"]
        if not alive:
            break
        time.sleep(0.05)
    return None


def progress_of(number):
    """How far a run is, and in a cluster where, in words."""
    on = read_turn(number)["on"]
    place = cluster.where(number) if on else None
    return place if place == "queued" else ", ".join(filter(None, [place, progress_in_log(number)]))


def progress_in_log(number):
    for line in reversed(log_tail(number, 60)):
        if line.startswith("Evaluating"):
            return "evaluating"
        if match := STEP.match(line):
            left = re.search(r"remaining: (\d+)s", line)
            return f"{match[2]} %, loss {match[3]}" + (f", {left[1]} s of training left" if left else "")
    return f"starting; {last_words(number)[:100] or 'no output yet'}"


def command_stop(arguments):
    path = os.path.join(RUNS, "stop")
    with state_lock():
        running = recover()
        if arguments.undo:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            print("runs are allowed again")
            return 0
        write_file(path, b"")
        numbers = [turn["number"] for turn in running]
        for number in numbers if arguments.now else ():
            end_supervisor(number)
    if numbers and arguments.now:
        return wait_for(LIMITS["grace"] + LIMITS["kill"] + 10, numbers)
    after = f" after run {', '.join(map(str, numbers))}" if numbers else ""
    print(f"no new run{after} (stop --undo allows them again)")
    return 0


def end_supervisor(number):
    """Tell the run's supervisor to end it: the one that lives, or one that is being started."""
    write_file(run_file(number, "stop"), b"")
    command = f"{os.path.join(ROOT, 'experiment.py')}\0_supervise\0{number}\0".encode()
    for process in processes():
        if command in (read_bytes(f"/proc/{process['pid']}/cmdline") or b""):
            os.kill(process["pid"], signal.SIGTERM)


def command_show(arguments):
    number = arguments.number or last_number()
    turn = read_turn(number)
    if turn is None:
        raise Refusal(f"there is no run {number}: runs go from 1 to {last_number()}" if last_number() else "nothing has been run yet")
    outcome, said = read_json(run_file(number, "outcome.json")) or {}, read_json(run_file(number, "verdict.json"))
    print("\n".join(said["lines"] if said else [f"run {number} is running ({progress_of(number)}): {turn['description']}"]))
    node = f", {cluster.where(number)}" if outcome.get("node") else ""
    print(f"{turn['kind']}, commit {turn['commit'][:10]} on {turn['parent'][:10]}, seed {turn['seed']}, started {turn['started']}{node}")
    if outcome.get("summary"):
        print("summary: " + ", ".join(f"{key} {value}" for key, value in outcome["summary"].items() if key != "run")[:1000])
    diff = (read_bytes(run_file(number, "change.diff")) or b"").decode("utf-8", "replace").splitlines()[2:]
    print(
        "\n".join(line[:200] for line in diff[:80])
        + (f"\n… {len(diff) - 80} more lines in runs/{number}/change.diff" if len(diff) > 80 else "")
    )
    print("end of the log:\n" + "\n".join(log_tail(number, 8)))
    return 0


def describe(series, running):
    """Everything that `status` says, as data."""
    rows = series.rows
    trials = [row for row in rows if not is_noise(row)]
    since = next((i for i, row in enumerate(reversed(trials)) if row["status"] == "keep"), len(trials))
    groups = collections.defaultdict(lambda: {"tries": 0, "keeps": 0, "crashes": 0, "best": None})
    changed = {line["number"]: line["changed"] for line in series.tried}
    bar = None
    for row in trials:
        for name in changed.get(series.number(row)) or []:
            group = groups[name]
            group["tries"] += 1
            group["keeps"] += row["status"] == "keep"
            group["crashes"] += row["status"] == "crash"
            if score(row) and bar:
                group["best"] = min(score(row) - bar, group["best"] if group["best"] is not None else math.inf)
        if row["status"] == "keep" and score(row):
            bar = min(score(row), bar or math.inf)
    recent = [{"run": series.number(row)} | row for row in rows[-10:]]
    took = [t for t in ((series.outcome(row).get("seconds") or {}).get("total") for row in rows[-20:]) if t]
    baselines = {line["number"] for line in series.tried if line["kind"] == "baseline"}
    attempts = [row for row in trials if row is not series.baseline and series.number(row) not in baselines]
    crashes = sum(row["status"] == "crash" for row in attempts)
    under_way = [{"number": t["number"], "description": t["description"], "progress": progress_of(t["number"])} for t in running]
    last = read_turn(last_number())
    address = next((turn["on"] for turn in [*running, last] if turn and turn.get("on")), None)
    noise = series.noise and dict(zip(("mean", "floor", "seeds"), series.noise)) | {"uneven": series.uneven_noise()}
    return {
        "tag": series.tag,
        "running": under_way,
        "cluster": cluster.describe(address, [turn for turn in running if turn["on"] == address]) if address else None,
        "finished_last_hour": finished_lately(series),
        "stop_requested": stop_requested(),
        "best": series.best and {"run": series.number(series.best)} | series.best,
        "bar": series.bar,
        "baseline": series.baseline,
        "noise": noise,
        "best_runs": (mean := series.best_mean()) and dict(zip(("mean", "runs"), mean)),
        "experiments": len(attempts),  # the baseline is none
        "keeps": sum(row["status"] == "keep" for row in attempts),
        "crashes": crashes,
        "since_last_keep": since,
        "seconds_per_experiment": statistics.median(took) if took else None,
        "tried": dict(sorted(groups.items(), key=lambda item: -item[1]["tries"])),
        "recent": recent,
    }


def finished_lately(series):
    """How many runs of the series ended in the last hour with a row: neither stopped nor the machine's fault."""
    recorded = {series.number(row) for row in series.rows}
    count, now = 0, time.time()
    for line in reversed(series.tried):
        with contextlib.suppress(FileNotFoundError):  # it is under way
            if now - os.stat(run_file(line["number"], "outcome.json")).st_mtime > 3600:
                break
            count += line["number"] in recorded
    return count


def command_status(arguments):
    with state_lock():
        running = recover()
    tag = current_tag()
    if tag is None:
        print(json.dumps({"tag": None}) if arguments.json else NO_SERIES)
        return 0
    status = describe(Series(tag), running)
    if arguments.json:
        print(json.dumps(status, indent=1))
        return 0
    best, baseline, noise = status["best"], status["baseline"], status["noise"]
    count = status["experiments"]
    print(f"series {tag}: the baseline and {count} experiment{'s' * (count != 1)}: {status['keeps']} kept, {status['crashes']} crashed")
    for turn in status["running"][:8]:
        print(f"running: run {turn['number']} ({turn['progress']}): {turn['description']}")
    if len(running) > 8:
        print(f"running: and {len(running) - 8} more (--json)")
    if status["cluster"]:
        print("\n".join(cluster.lines(status["cluster"])))
    if not running:
        print("running: nothing" + ("; the human has asked to stop: end the loop" if status["stop_requested"] else ""))
    if best:
        difference = round(best["val_bpb"] - baseline["val_bpb"], 6)
        gain = f", {compared(difference)} the baseline {baseline['val_bpb']:.6f}" if best["commit"] != baseline["commit"] else ""
        print(f"best: {best['val_bpb']:.6f} {best['commit']} run {best['run']}: {best['description'][:80]}{gain}")
        if status["best_runs"]:
            print(f"the best's {status['best_runs']['runs']} runs: mean {status['best_runs']['mean']:.6f}")
        if status["bar"] < best["val_bpb"]:
            print(f"to beat: {status['bar']:.6f}, the lowest so far (the best is a simplification of it)")
    if noise:
        print(f"noise floor: {noise['floor']:.6f} ({noise['seeds']} seeds, mean {noise['mean']:.6f})")
        if noise["uneven"]:
            print(f"warning: {UNEVEN.format(100 * noise['uneven'])}")
    elif best:
        print("noise floor: not measured; experiment.py noise 3")
    took = status["seconds_per_experiment"]
    each = f"; {seconds_text(took)} each, {status['finished_last_hour']} in the last hour" if took else ""
    print(f"experiments since the last keep: {status['since_last_keep']}{each}")
    if status["tried"]:
        print("tried, by what changed (tries, kept, gain of the best one over the best of then):")
        for name, group in list(status["tried"].items())[:12]:
            difference = f"{-group['best']:+.6f}" if group["best"] is not None else "no result"
            print(
                f"  {name[:40]}: {group['tries']}, {group['keeps']} kept, {difference}"
                + (f", {group['crashes']} crashed" * bool(group["crashes"]))
            )
        if len(status["tried"]) > 12:
            print(f"  and {len(status['tried']) - 12} more (--json)")
    print("last ten (run, val_bpb, status):")
    for row in status["recent"]:
        print(f"  {row['run']} {row['val_bpb']:.6f} {row['status']} {row['description'][:100]}")
    return 0


def main():
    parser = argparse.ArgumentParser(description="One experiment a command; what is better is kept, and everything is recorded.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, function, text, wait=False, on=False):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if wait:
            command.add_argument("--wait", type=float, default=540, metavar="S", help="seconds to wait for the run (default: 540)")
        if on:
            where = "run it in the Ray cluster whose dashboard is there (such as 10.0.0.5), or on all GPUs of this machine: local"
            command.add_argument("--on", metavar="ADDRESS", help=where)
            command.add_argument("--cores", type=int, metavar="N", help="with --on: take N cores of a node and no GPU (the demonstration)")
        return command

    begin = add("begin", command_begin, "Begin a new series: a branch, and the baseline.", wait=True, on=True)
    begin.add_argument("tag", help="for example nov29; the branch is autoresearch/TAG")
    attempt = add("try", command_try, "Run the working train.py, judge and record it, keep it if it is better.", wait=True, on=True)
    attempt.add_argument("description", nargs="?", help="what it tries, in a few words")
    attempt.add_argument("--patches", nargs="+", metavar="FILE", help="with --on: a run for each patch of the best's train.py, all at once")
    attempt.add_argument("--margin", type=float, default=0.0, metavar="F", help="keep only if better by F noise floors (default: 0)")
    attempt.add_argument("--simpler", action="store_true", help="less code: keep it at an equal score too (within a noise floor)")
    attempt.add_argument("--prune", action="store_true", help="stop it when its loss is clearly worse than the best's at the same progress")
    waiting = add("wait", command_wait, "Wait for what is under way and print each verdict.", wait=True)
    waiting.add_argument("--any", action="store_true", help="return at the first verdict, where several are under way")
    noise = add("noise", command_noise, "Run the best again with other seeds, to know what is luck.", wait=True, on=True)
    noise.add_argument("count", type=int, nargs="?", default=3, metavar="K", help="how many seeds (default: 3)")
    add("status", command_status, "Where the series stands.").add_argument("--json", action="store_true", help="for programs")
    show = add("show", command_show, "One run: verdict, summary, diff, end of the log.")
    show.add_argument("number", type=int, nargs="?", metavar="N", help="default: the last")
    stop = add("stop", command_stop, "No new run after the current one.")
    stop.add_argument("--now", action="store_true", help="end the current run too; it is not recorded")
    stop.add_argument("--undo", action="store_true", help="allow runs again")
    if sys.argv[1:2] == ["_supervise"]:
        return supervise(*map(int, sys.argv[2:]))
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # 0 to 2 may have been closed: no other file must get their numbers
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # descriptions and logs hold characters that not every locale has
        stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some launchers leave it ignored: no exit code would be kept, git's neither
    arguments = parser.parse_args()
    try:
        check_repository()
        return arguments.function(arguments)
    except Refusal as e:
        print(f"experiment.py: {e}", file=sys.stderr)
        return e.code
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        print(f"experiment.py: {e}", file=sys.stderr)
        return ENVIRONMENT
    except RecursionError:
        print("experiment.py: train.py is nested too deeply to be looked at", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\nexperiment.py: a run goes on without you; `wait` shows its verdict", file=sys.stderr)
        return 130


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        try:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
