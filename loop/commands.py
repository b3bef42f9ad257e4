"""What the commands do: begin, try, noise, wait, stop, show."""

import contextlib
import math
import os
import re
import signal
import time

from harness.common.settings import seed as asked_seed

from .branch import give_back, starting_point
from .files import (
    LEDGER,
    LIMITS,
    ROOT,
    RUNNING,
    RUNS,
    STOPPED,
    TRAIN,
    Refusal,
    last_number,
    log_tail,
    now_text,
    read_bytes,
    read_outcome,
    read_turn,
    read_verdict,
    run_file,
    stop_requested,
    tried,
    write_file,
    write_json,
)
from .ledger import Series, read_rows, set_ledger_aside
from .patches import patched, read_patches
from .processes import check_disk, is_supervised, processes, state_lock
from .proposal import check_program, clean, code_size, digest_of, parse
from .ready import SETTINGS, ready_series
from .recovery import recover
from .remote import cluster
from .repository import branch_of, check_files, commit_tree, current_tag, git, git_file, resolve
from .turns import check_untried, propose, start_noise, start_turn
from .waiting import progress_of, wait_for


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
        elif exists and any((read_verdict(t["number"]) or {}).get("status") == "keep" for t in Series(tag).tried):
            raise Refusal(f"{branch_of(tag)} has begun, and results.tsv is another series': move it away, and `status` makes it again")
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


def command_stop(arguments):
    path = os.path.join(RUNS, "stop")
    with state_lock():
        running = recover(lenient=True)
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
        code = wait_for(LIMITS["grace"] + LIMITS["kill"] + 10, numbers)
        if code != RUNNING:
            return code
        for number in numbers:  # a supervisor that hangs; what it has started ends with it, or is ended by who finishes its turn
            if is_supervised(number):
                end_supervisor(number, signal.SIGKILL)
        return wait_for(10, numbers)
    after = f" after run {', '.join(map(str, numbers))}" if numbers else ""
    print(f"no new run{after} (stop --undo allows them again)")
    return 0


def end_supervisor(number, how=signal.SIGTERM):
    """Tell the run's supervisor to end it: the one that lives, or one that is being started."""
    write_file(run_file(number, "stop"), b"")
    command = f"{os.path.join(ROOT, 'experiment.py')}\0_supervise\0{number}\0".encode()
    for process in processes():
        if command in (read_bytes(f"/proc/{process['pid']}/cmdline") or b""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process["pid"], how)
                os.kill(process["pid"], signal.SIGCONT)  # one that was stopped hears nothing


def command_show(arguments):
    number = arguments.number or last_number()
    turn = read_turn(number)
    if turn is None:
        raise Refusal(f"there is no run {number}: runs go from 1 to {last_number()}" if last_number() else "nothing has been run yet")
    outcome, said = read_outcome(number), read_verdict(number)
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
