#!/usr/bin/env bash
# One experiment: sets up what is missing (venv/, torch, packages, data), then trains. Arguments go to train.py, whose exit code this is.
#
#   ./run.sh                   one experiment
#   ./run.sh --keep            the same; the trained model stays, as model.pt
#   ./run.sh --doctor          what is wrong with this machine and how to mend it (doctor.py, which takes the arguments after it)
#   ./run.sh --report          writes report.md, about this machine, to be pasted into an issue (minutes; it names nobody)
#   ./run.sh --setup           sets up what is missing, and trains nothing
#   ./run.sh --help            these lines, and where that is set up what train.py takes
#
# Environment, beside what env.sh reads (README.md, "Settings", has all):
#   AUTORESEARCH_TORCH_INDEX   the package index that torch comes from (a mirror, a nightly)
#   AUTORESEARCH_TORCH         the torch to install, as pip writes it: "torch==2.14.1"
#   AUTORESEARCH_DATASET, AUTORESEARCH_TIME_BUDGET, AUTORESEARCH_SEED, AUTORESEARCH_CACHE: see prepare.py
# Exit codes: train.py's, 0 after a summary; 3 if the machine or the data is at fault. What pip said is in venv/.autoresearch/install.log.
set -euo pipefail

ROOT=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
VENV=$ROOT/venv
STATE=$VENV/.autoresearch  # inside, so that it goes with the venv, and is shared by every checkout that links to it
PYTHON=$VENV/bin/python

say() { printf 'autoresearch: %s\n' "$*" >&2; }
fail() { say "$*"; exit 3; }  # as train.py: the machine or the data is at fault, not the experiment

# Runs a command to its end. SIGTERM reaches it at once (bash alone would hold it back), and the script stops after it.
child() {
    local pid status=0 stopped=0
    (
        trap - INT  # bash starts background jobs deaf to Ctrl-C
        if [[ $(type -t "$1") == function ]]; then "$@"; else exec "$@"; fi
    ) &
    pid=$!
    trap 'stopped=143; kill -TERM "$pid" 2>/dev/null || true' TERM
    trap 'stopped=130' INT  # the terminal has sent it to the command too
    while :; do
        if wait "$pid"; then status=0; else status=$?; fi
        kill -0 "$pid" 2>/dev/null || break
    done
    trap - TERM INT
    return $((stopped ? stopped : status))
}

# ---- torch ------------------------------------------------------------------------------------------------------------------

# Sets TORCH, INDEX (empty: pip's own), DOWNLOAD and SPACE (GB, roughly). Every index has 2.13.0, the version that is tested.
choose_torch() {
    local part extras=""
    case "$AUTORESEARCH_HARDWARE" in
        gfx1151)
            # AMD's multi-arch index of stable releases: host code for all parts, device code by extra; plain "torch" has none and
            # fails at its first kernel. It follows repo.amd.com/rocm/whl-multi-arch (ROCm 7.14, torch 2.12) since ROCm 10; nightlies are at
            # rocm.nightlies.amd.com/whl-multi-arch. (ROCm/TheRock: RELEASES.md, docs/rfcs/RFC0012-Repo-Structure.md)
            for part in ${AUTORESEARCH_GFX:-gfx1151}; do extras+=${extras:+,}device-$part; done
            TORCH="torch[$extras]==2.13.0" INDEX=https://stable.repo.amd.com/rocm/whl-next/ DOWNLOAD=2 SPACE=8
            # exact where that is known to exist
            [[ -n ${AUTORESEARCH_TORCH_INDEX:-} ]] || TORCH+=+rocm10.0.0 ;;
        amd) TORCH=torch==2.13.0 INDEX=https://download.pytorch.org/whl/rocm7.2 DOWNLOAD=5 SPACE=25 ;;
        nvidia) TORCH=torch==2.13.0 INDEX="" DOWNLOAD=3 SPACE=10 ;;
        none) TORCH=torch==2.13.0 INDEX=https://download.pytorch.org/whl/cpu DOWNLOAD=0.3 SPACE=2 ;;
    esac
    INDEX=${AUTORESEARCH_TORCH_INDEX:-$INDEX}
    TORCH=${AUTORESEARCH_TORCH:-$TORCH}
}

# One quick look, no retries: a download that breaks later must not turn into the CUDA build.
reaches_index() {
    timeout 10 "$PYTHON" - "$1" 2>/dev/null <<'PYTHON'
import os, ssl, sys, urllib.request

ca = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE") or None
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5, context=ssl.create_default_context(cafile=ca)).close()
PYTHON
}

torch_here() { sed -n 's/^torch==//p' "$STATE/constraints.txt"; }

# venv/.autoresearch/torch says which torch was put there by this script; any other is its owner's choice and stays.
install_torch() {
    local here ours
    here=$(torch_here) ours=$(cat "$STATE/torch" 2>/dev/null || true)
    if [[ -L $VENV ]]; then
        [[ -n $here ]] || fail "venv is a link to $(readlink -f "$VENV"), which has no torch: install yours there, or remove the link and a new venv/ is made"
        return
    fi
    if [[ -n $here ]]; then
        [[ $AUTORESEARCH_HARDWARE == none || $ours == "$TORCH $INDEX|$here" ]] && return
        if [[ ${ours##*|} != "$here" ]]; then say "venv/ holds torch $here of your own: left as it is"; return; fi
        say "torch $here was installed for something else: it is replaced"
        child "$PYTHON" -m pip uninstall -q -y torch triton triton-rocm pytorch-triton-rocm >&2 2>"$STATE/install.log" || explain_pip torch
    fi
    [[ $AUTORESEARCH_HARDWARE != gfx1151 && $AUTORESEARCH_HARDWARE != amd || $(uname -m) == x86_64 ]] ||
        fail "there are no ROCm builds of torch for $(uname -m): install your own in a virtual environment and link venv to it"
    if [[ $AUTORESEARCH_HARDWARE == none && -z ${AUTORESEARCH_TORCH_INDEX:-} ]] && ! reaches_index "$INDEX"; then
        say "PyTorch's CPU index cannot be reached: torch comes from pip's own index, where it can be the CUDA build, 3 GB instead of 0.3 (AUTORESEARCH_TORCH_INDEX names a mirror)"
        INDEX="" DOWNLOAD="0.3 to 3"
    fi
    need_space "$SPACE"
    local from=${INDEX:-"pip's own index"}
    say "installing $TORCH (hardware: $AUTORESEARCH_HARDWARE) from $from, about $DOWNLOAD GB to download"
    run_pip torch ${INDEX:+--index-url "$INDEX"} "$TORCH"
    _ar_write_constraints
    choose_torch  # what was asked for, not how it was met
    printf '%s %s|%s\n' "$TORCH" "$INDEX" "$(torch_here)" >"$STATE/torch"
}

# ---- packages ---------------------------------------------------------------------------------------------------------------

need_space() {  # GB
    local free
    free=$(df -Pk "$VENV/" | awk 'NR == 2 {print int($4 / 1000000)}')
    ((free >= $1)) || fail "no space: installing needs about $1 GB in $(readlink -f "$VENV"), which has $free GB free: make room, or link venv to a roomier disk"
}

# pyproject.toml's dependencies and those of one extra, a line each, less torch, and less triton where torch has brought one.
requirements() {  # [EXTRA]
    "$PYTHON" - "$ROOT/pyproject.toml" "${1:-}" <<'PYTHON'
import importlib.util, re, sys
try:
    import tomllib
except ImportError:  # Python 3.10; pip has it there
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for line in project["dependencies"] + project["optional-dependencies"].get(sys.argv[2], []):
    name = re.match(r"[\w.-]+", line).group()
    if name != "torch" and not (name == "triton" and importlib.util.find_spec("triton")):
        print(line)
PYTHON
}

# The constraints are given as an option, beside whatever the user's own pip settings say. Torch alone comes without them.
run_pip() {  # WHAT ARGUMENTS...
    local what=$1 pip=(env -u PIP_CONSTRAINT) theirs=${PIP_CONSTRAINT//"$_ar_constraints"/}
    shift
    [[ -z ${theirs// /} ]] || pip=(env "PIP_CONSTRAINT=$theirs")
    pip+=("$PYTHON" -m pip install --no-input --disable-pip-version-check)
    [[ $what == torch ]] || pip+=(-c "$STATE/constraints.txt")
    [[ $what == torch && -t 2 ]] || pip+=(-q)  # only torch is worth a progress bar, and only where someone watches
    : >"$STATE/installing"
    child "${pip[@]}" "$@" >&2 2>"$STATE/install.log" || explain_pip "$what"
    rm -f "$STATE/installing"
}

# pip says it in a page; this is the line that helps. The page stays in install.log.
explain_pip() {  # WHAT (the exit code comes in $?)
    local code=$? log=$STATE/install.log why
    ((code < 128)) || exit "$code"  # stopped by a signal; the next call goes on from here
    if grep -qi 'no space left' "$log"; then
        why="no space left: make room in $(readlink -f "$VENV") and ${TMPDIR:-/tmp}"
    elif grep -qiE 'NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|Read timed out|ProxyError|SSLError|Network is unreachable|Connection (refused|reset|aborted|broken)|IncompleteRead|HTTP error 5|HTTP error 4' "$log"; then
        why="the package index could not be reached: check the network or HTTPS_PROXY, or name a mirror with PIP_INDEX_URL (for torch: AUTORESEARCH_TORCH_INDEX)"
    elif grep -q 'No matching distribution' "$log"; then
        why="$(sed -n 's/.*No matching distribution found for /no build of /p' "$log" | head -1) for $("$PYTHON" -c 'import platform; print("Python", platform.python_version())') on $(uname -m): use another Python (AUTORESEARCH_PYTHON, after rm -r venv)"
        [[ $1 != torch ]] || why+=", torch (AUTORESEARCH_TORCH) or index (AUTORESEARCH_TORCH_INDEX)"
        ! grep -q 'from versions: none' "$log" || why+=", or check the network if the index should have it"
    elif grep -qiE 'permission denied' "$log"; then
        why="no permission to write to $(readlink -f "$VENV"): make it yours, or link venv to one that is"
    else
        why=$(grep -E '^ERROR|Error' "$log" | tail -1)
    fi
    fail "could not install $1: ${why:-pip failed} (details: $log)"
}

# A pip that was killed can leave a package that counts as installed and is not whole: INSTALLER, one of its last files, is missing.
# Only what came after that call began is looked at.
mend_interrupted() {
    [[ -e $STATE/installing ]] || return 0
    say "the last installation was interrupted: finishing it"
    local info
    while IFS= read -r -d '' info; do
        [[ -e $info/INSTALLER ]] || rm -rf "$info"
    done < <(find "$VENV"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$STATE/installing" -print0)
}

# ---- the machine ------------------------------------------------------------------------------------------------------------

# What would make a run fail, freeze or lie ends it here, a line for each. Before installing, what needs torch is left out.
stop_checks() { child "$PYTHON" "$ROOT/doctor.py" --stop "$@"; }

# ---- the whole --------------------------------------------------------------------------------------------------------------

# What the installation depends on. When it is the same as after the last complete one, there is nothing to do.
state_of() {  # EXTRA
    printf '%s\n' "extra: ${1:-}" "hardware: $AUTORESEARCH_HARDWARE ${AUTORESEARCH_GFX:-}" "wanted: $TORCH $INDEX" "there: $(torch_here)" \
        "python: $(readlink -f "$PYTHON")" "packages: $(cksum <"$ROOT/pyproject.toml")"
}

is_ready() {  # [EXTRA]
    local stamp=$STATE/ready-${1:-run}
    [[ -e $stamp && ! -e $STATE/installing && $(<"$stamp") == "$(state_of "${1:-}")" ]]
}

install() {  # [EXTRA]
    choose_torch
    is_ready "${1:-}" || child _ar_locked "$STATE/lock" install_all "${1:-}"
}

install_all() {  # [EXTRA], with the lock held
    is_ready "${1:-}" && return  # another call has done it meanwhile
    mend_interrupted
    "$PYTHON" -c 'import pip' 2>/dev/null || "$PYTHON" -m ensurepip >/dev/null 2>&1 ||
        fail "venv/ has no pip and cannot get one: $(_ar_install_with python3-pip python3-pip python-pip), or link venv to an environment with pip"
    _ar_write_constraints
    install_torch
    say "installing the other packages${1:+, those of \"$1\" too}"
    requirements "${1:-}" >"$STATE/requirements.txt"
    run_pip "the packages" -r "$STATE/requirements.txt"
    _ar_write_constraints
    state_of "${1:-}" >"$STATE/ready.$$"
    mv "$STATE/ready.$$" "$STATE/ready-${1:-run}"  # last, so that it stands for a whole installation
}

prepare_data() {
    "$PYTHON" prepare.py --check >/dev/null 2>&1 || child "$PYTHON" prepare.py
}

# Holds the machine awake while this process lives, beside the training and not around it: systemd-inhibit passes on no signals.
# The lid needs a lock of its own. Where there is no systemd to ask (a container), it ends at once, and so be it.
stay_awake() {
    command -v systemd-inhibit >/dev/null || return 0
    (setsid systemd-inhibit --what=idle:sleep:handle-lid-switch --who=autoresearch --why="an experiment is running" \
        tail --pid=$$ -f /dev/null </dev/null >/dev/null 2>&1 &)
}

# torch.compile calls the C++ compiler with paths that it does not quote: a venv with a space in its path is called by a link without one.
avoid_spaces() {
    [[ $VENV == *[[:space:]]* ]] || return 0
    local cache=${AUTORESEARCH_CACHE:-${HOME:-}/.cache/autoresearch} link
    cache=${cache/#\~\//${HOME:-}/}
    [[ $cache == /* ]] || cache=$ROOT/$cache
    link=$cache/venv-$(cksum <<<"$VENV" | cut -d' ' -f1)
    [[ $link != *[[:space:]]* ]] || return 0
    [[ $link -ef $VENV ]] || { mkdir -p "$cache" && ln -sfn "$VENV" "$link"; } 2>/dev/null || return 0  # then it runs uncompiled, and says so
    PYTHON=$link/bin/python
}

main() {
    case "${1:-}" in -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$ROOT/run.sh"  # the head of this file
        [[ -e $STATE/ready-run ]] || exit 0
        echo ;;
    esac
    # shellcheck source=env.sh
    source "$ROOT/env.sh" || exit
    case "${1:-}" in -h | --help) exec "$PYTHON" "$ROOT/train.py" --help ;; esac
    if [[ ${1:-} == --doctor ]]; then avoid_spaces && exec "$PYTHON" "$ROOT/doctor.py" "${@:2}"; fi
    if [[ ${1:-} == --report ]]; then avoid_spaces && exec "$PYTHON" "$ROOT/doctor.py" "$@"; fi
    choose_torch
    is_ready || stop_checks --before-install
    install
    avoid_spaces
    stop_checks
    if [[ $AUTORESEARCH_HARDWARE == none && ${AUTORESEARCH_DATASET:-demo} == demo ]]; then
        say "NO GPU: THIS IS THE DEMONSTRATION, a small model on the CPU. Its numbers show that all parts work; they compare with no GPU's."
    fi
    cd "$ROOT"
    prepare_data
    [[ ${1:-} != --setup ]] || exit 0
    stay_awake
    exec "$PYTHON" -m harness.launch "$@"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
