# shellcheck shell=bash
# The environment of this project, for bash and zsh: `. ./env.sh`. run.sh and test.sh source it too.
# It makes venv/ if there is none, activates it, finds the hardware and sets what ROCm and pip need. Sourcing it twice is harmless.
#
# What you may set beforehand:
#   AUTORESEARCH_PYTHON      the Python that makes venv/ (default: the newest on PATH for which torch has wheels)
#   AUTORESEARCH_HARDWARE    gfx1151, amd, nvidia or none (default: what the machine has)
#   AUTORESEARCH_SYSROOT     where /sys, /dev and /proc are looked up (for tests)
# What it exports for Python: AUTORESEARCH_HARDWARE as above; AUTORESEARCH_GFX, the AMD parts found ("gfx1151", "gfx1100 gfx1036", …).
#
# venv may be a link to a virtual environment of your own: its torch and triton are then never touched.

_ar_say() { printf 'autoresearch: %s\n' "$*" >&2; }
_ar_fail() { _ar_say "$*"; return 1; }

# A choice is said once a shell (and to what is started from it), not at each sourcing.
_ar_say_once() {  # KEY MESSAGE
    case " ${AUTORESEARCH_SAID:-} " in *" $1 "*) return 0 ;; esac
    export AUTORESEARCH_SAID="${AUTORESEARCH_SAID:-} $1"
    shift
    _ar_say "$*"
}

# The command that installs a system package: `_ar_install_with apt-names dnf-names pacman-names`.
_ar_install_with() {
    if command -v apt-get >/dev/null; then echo "sudo apt install $1"
    elif command -v dnf >/dev/null; then echo "sudo dnf install $2"
    elif command -v pacman >/dev/null; then echo "sudo pacman -S $3"
    else echo "install $1 (or what your system calls it)"; fi
}

# Runs a command while holding FILE's lock, so that two calls at once do not both install.
_ar_locked() {  # FILE COMMAND...
    (
        if command -v flock >/dev/null; then
            flock -n 9 || { _ar_say "another call is setting up the same venv/; waiting for it"; flock 9; }
        fi
        shift
        "$@"
    ) 9>"$1"
}

# ---- hardware, without torch ------------------------------------------------------------------------------------------------

# kfd writes a part as major*10000 + minor*100 + step in decimal; its name has minor and step in hex: 110501 is gfx1151, 90010 gfx90a.
_ar_find_amd() {
    AUTORESEARCH_GFX=""
    for _ar_file in "$1"/sys/class/kfd/kfd/topology/nodes/*/properties; do
        [ -r "$_ar_file" ] || continue
        while read -r _ar_key _ar_value; do
            [ "$_ar_key" = gfx_target_version ] && [ "$_ar_value" -gt 0 ] || continue  # 0 is a CPU
            _ar_value=$(printf 'gfx%d%x%x' $((_ar_value / 10000)) $((_ar_value / 100 % 100)) $((_ar_value % 100)))
            case " $AUTORESEARCH_GFX " in *" $_ar_value "*) ;; *) AUTORESEARCH_GFX="${AUTORESEARCH_GFX:+$AUTORESEARCH_GFX }$_ar_value" ;; esac
        done <"$_ar_file"
    done
    export AUTORESEARCH_GFX
}

_ar_has_nvidia() {
    for _ar_file in "$1"/dev/nvidia[0-9]* "$1"/proc/driver/nvidia/gpus/*; do
        [ -e "$_ar_file" ] && return 0
    done
    [ -e "$1/dev/dxg" ] && [ -e "$1/usr/lib/wsl/lib/libcuda.so.1" ]  # Windows' subsystem for Linux
}

# A GPU whose driver is not there is hardware all the same: the run must stop and say so. Only parts that surely can train are
# looked for: any NVIDIA display device, and Strix Halo's own (1002:1586); old AMD server graphics are nobody's GPU.
_ar_find_driverless() {
    for _ar_file in "$1"/sys/bus/pci/devices/*/vendor; do
        [ -r "$_ar_file" ] || continue
        read -r _ar_value <"$_ar_file"
        case "$_ar_value" in 0x10de | 0x1002) ;; *) continue ;; esac
        _ar_file=${_ar_file%/vendor}
        read -r _ar_key <"$_ar_file/class"
        case "$_ar_value $_ar_key" in "0x10de 0x03"*) echo nvidia; return ;; esac
        read -r _ar_key <"$_ar_file/device"
        case "$_ar_value $_ar_key" in "0x1002 0x1586") echo gfx1151; return ;; esac
    done
    echo none
}

_ar_find_hardware() {
    _ar_find_amd "${AUTORESEARCH_SYSROOT:-}"
    case "${AUTORESEARCH_HARDWARE:-}" in
        gfx1151 | amd | nvidia | none) export AUTORESEARCH_HARDWARE; return ;;
        "") ;;
        *) _ar_fail "AUTORESEARCH_HARDWARE=$AUTORESEARCH_HARDWARE is not known: use gfx1151, amd, nvidia or none"; return 1 ;;
    esac
    # A desktop with an NVIDIA card often has a small AMD GPU in its processor: the card is meant, unless the processor is Strix Halo.
    case " $AUTORESEARCH_GFX " in
        *" gfx1151 "*) AUTORESEARCH_HARDWARE=gfx1151 ;;
        *)
            if _ar_has_nvidia "${AUTORESEARCH_SYSROOT:-}"; then AUTORESEARCH_HARDWARE=nvidia
            elif [ -n "$AUTORESEARCH_GFX" ]; then AUTORESEARCH_HARDWARE=amd
            else AUTORESEARCH_HARDWARE=$(_ar_find_driverless "${AUTORESEARCH_SYSROOT:-}"); fi ;;
    esac
    export AUTORESEARCH_HARDWARE
    _ar_say_once hardware "hardware: $AUTORESEARCH_HARDWARE (AUTORESEARCH_HARDWARE chooses another)"
}

# ---- the virtual environment ------------------------------------------------------------------------------------------------

# By running it, since a name on PATH may be a shim of a version that is not installed. 3.14 comes last: torch has wheels for it,
# but nothing here is tested on it.
_ar_choose_python() {
    _ar_without_venv=""
    if [ -n "${AUTORESEARCH_PYTHON:-}" ]; then set -- "$AUTORESEARCH_PYTHON"
    else set -- python3.13 python3.12 python3.11 python3.10 python3 python python3.14; fi
    for _ar_name; do
        "$_ar_name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 || continue
        if "$_ar_name" -c 'import ensurepip, venv' >/dev/null 2>&1; then echo "$_ar_name"; return; fi
        _ar_without_venv=${_ar_without_venv:-$_ar_name}
    done
    if [ -n "$_ar_without_venv" ]; then
        _ar_name=$("$_ar_without_venv" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
        _ar_fail "$_ar_without_venv cannot make a virtual environment: $(_ar_install_with "$_ar_name-venv" python3 python)"
    elif [ -n "${AUTORESEARCH_PYTHON:-}" ]; then
        _ar_fail "AUTORESEARCH_PYTHON=$AUTORESEARCH_PYTHON is not a Python 3.10 to 3.14 that runs"
    else
        _ar_fail "no Python 3.10 to 3.13 on PATH: $(_ar_install_with 'python3 python3-venv' python3 python), or set AUTORESEARCH_PYTHON"
    fi
}

# venv/.autoresearch/making is there from before the first file until the last: a creation that was interrupted is done again.
_ar_make_venv() {
    [ -x "$_ar_venv/bin/python" ] && [ ! -e "$_ar_venv/.autoresearch/making" ] && return 0  # another call was faster
    _ar_python=$(_ar_choose_python) || return 1
    _ar_say "making venv/ with $_ar_python ($("$_ar_python" -c 'import platform, sys; print(platform.python_version(), sys.executable, sep=", ")'))"
    { mkdir -p "$_ar_venv/.autoresearch" && : >"$_ar_venv/.autoresearch/making"; } 2>/dev/null ||
        { _ar_fail "cannot write to $_ar_root: make it writable, or clone into a folder of your own"; return 1; }
    rm -rf "$_ar_venv"/lib/python3*/site-packages/pip*  # a half-written pip would count as installed
    _ar_error=$("$_ar_python" -m venv "$_ar_venv" 2>&1) ||
        { _ar_fail "$_ar_python -m venv failed: ${_ar_error##*$'\n'} (free disk space, or choose another with AUTORESEARCH_PYTHON)"; return 1; }
    rm -f "$_ar_venv/.autoresearch/making"
}

_ar_need_venv() {
    if [ -e "$_ar_venv/bin/python" ] && [ ! -e "$_ar_venv/.autoresearch/making" ]; then :
    elif [ -L "$_ar_venv" ] && [ ! -e "$_ar_venv" ]; then
        _ar_fail "venv is a link to $(readlink "$_ar_venv"), which is not there: mend the link, or remove it and a new venv/ is made"; return 1
    elif [ -L "$_ar_venv" ]; then
        _ar_fail "venv is a link to $(readlink "$_ar_venv"), which is no virtual environment (no bin/python)"; return 1
    elif [ -L "$_ar_venv/bin/python" ] && [ ! -e "$_ar_venv/bin/python" ]; then
        _ar_fail "venv/ was made with $(readlink -f "$_ar_venv/bin/python"), which is gone: rm -r '$_ar_venv', and it is made again"; return 1
    elif [ -d "$_ar_venv" ] && [ ! -d "$_ar_venv/.autoresearch" ] && [ -n "$(ls -A "$_ar_venv")" ]; then
        _ar_fail "venv/ is there but is no virtual environment: move it away, and one is made"; return 1
    else
        { : >>"$_ar_root/.setup.lock"; } 2>/dev/null || { _ar_fail "cannot write to $_ar_root: make it writable, or clone into a folder of your own"; return 1; }
        _ar_locked "$_ar_root/.setup.lock" _ar_make_venv || return 1
    fi
    "$_ar_venv/bin/python" -c '' 2>/dev/null ||
        { _ar_fail "venv/bin/python does not run (was its Python removed?): rm -r '$_ar_venv', and it is made again"; return 1; }
}

# bin/activate knows only the folder in which it was made, and conda's environments have none: without it, or where it went
# elsewhere because the project was moved, PATH is set by hand.
_ar_activate() {
    if [ "${VIRTUAL_ENV:-}" -ef "$_ar_venv" ]; then
        case "$(command -v python)" in "$VIRTUAL_ENV/bin/python" | "$_ar_venv/bin/python") return 0 ;; esac
    fi
    if [ -r "$_ar_venv/bin/activate" ] && grep -qF -e "$_ar_venv" -e "$(readlink -f "$_ar_venv")" "$_ar_venv/bin/activate"; then
        # shellcheck disable=SC1091
        . "$_ar_venv/bin/activate"
    fi
    case "$PATH:" in "$_ar_venv/bin:"* | "${VIRTUAL_ENV:-/none}/bin:"*) ;; *) export PATH="$_ar_venv/bin:$PATH" ;; esac
    if ! [ "${VIRTUAL_ENV:-}" -ef "$_ar_venv" ]; then
        export VIRTUAL_ENV="$_ar_venv" PATH="$_ar_venv/bin:$PATH"
        unset PYTHONHOME
    fi
    hash -r 2>/dev/null
    return 0
}

# ---- pip --------------------------------------------------------------------------------------------------------------------

# Whatever is installed later must leave torch, its Triton and its ROCm or CUDA libraries alone.
_ar_write_constraints() {
    "$_ar_venv/bin/python" - "$_ar_venv/.autoresearch/constraints.txt" <<'PYTHON'
import importlib.metadata, os, re, sys

keep = re.compile(r"(torch|torchvision|torchaudio|triton|triton-rocm|pytorch-triton(-\w+)?|rocm([-_].*)?|amd[-_]torch.*|nvidia-.*)", re.I)
pins = {}
for dist in importlib.metadata.distributions():  # in the order of sys.path: the first of a name is the one that is imported
    name = dist.metadata["Name"]
    if name and keep.fullmatch(name):
        pins.setdefault(name.lower(), f"{name}=={dist.version}\n")
path = sys.argv[1]
with open(f"{path}.{os.getpid()}", "w") as file:
    file.writelines(pins[name] for name in sorted(pins))
os.replace(file.name, path)
PYTHON
}

_ar_constrain_pip() {
    mkdir -p "$_ar_venv/.autoresearch" 2>/dev/null && [ -w "$_ar_venv/.autoresearch" ] ||
        { _ar_fail "venv/ ($(readlink -f "$_ar_venv")) is not writable: make it so, or link to one that is"; return 1; }
    for _ar_file in "$_ar_venv"/lib/python3*/site-packages; do  # newer when a package has come or gone
        [ "$_ar_venv/.autoresearch/constraints.txt" -nt "$_ar_file" ] || _ar_write_constraints || return 1
    done
    # These variables hold lists with spaces between: a path with spaces has to be a URL.
    _ar_constraints="$_ar_venv/.autoresearch/constraints.txt"
    case "$_ar_constraints" in
        *[[:space:]]*) _ar_constraints="file://$(printf '%s' "$_ar_constraints" | sed 's/%/%25/g; s/ /%20/g; s/\t/%09/g; s/#/%23/g; s/?/%3F/g')" ;;
    esac
    case " ${PIP_CONSTRAINT:-} " in *" $_ar_constraints "*) ;; *) export PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$_ar_constraints" ;; esac
    case " ${UV_CONSTRAINT:-} " in *" $_ar_constraints "*) ;; *) export UV_CONSTRAINT="${UV_CONSTRAINT:+$UV_CONSTRAINT }$_ar_constraints" ;; esac
}

# ---- ROCm -------------------------------------------------------------------------------------------------------------------

_ar_drop() {  # VARIABLE REASON
    eval "_ar_value=\${$1:-}"
    [ -z "$_ar_value" ] || _ar_say "unset $1=$_ar_value: $2"
    unset "$1"
}

# AMD's wheels bring a ROCm of their own; /opt/rocm is for torch builds without one, and before theirs on the library path it breaks them.
_ar_set_rocm_home() {
    _ar_home=""
    for _ar_file in "$_ar_venv"/lib/python3*/site-packages/_rocm_sdk_devel "$_ar_venv"/lib/python3*/site-packages/_rocm_sdk_core; do
        if [ -d "$_ar_file" ]; then _ar_home=$_ar_file; break; fi
    done
    if [ -n "$_ar_home" ]; then
        case ":${LD_LIBRARY_PATH:-}" in *:/opt/rocm*)
            LD_LIBRARY_PATH=$(printf '%s' "$LD_LIBRARY_PATH" | tr ':' '\n' | grep -v '^/opt/rocm' | paste -sd:)
            export LD_LIBRARY_PATH
            _ar_say "took /opt/rocm out of LD_LIBRARY_PATH: torch brings its own ROCm" ;;
        esac
    elif [ -d "${AUTORESEARCH_SYSROOT:-}/opt/rocm" ]; then _ar_home=${AUTORESEARCH_SYSROOT:-}/opt/rocm
    else return 0; fi
    for _ar_name in ROCM_HOME HIP_PATH; do
        eval "_ar_value=\${$_ar_name:-}"
        case "$_ar_value" in
            "" | /opt/rocm*) export "$_ar_name=$_ar_home"; _ar_say_once "$_ar_name" "$_ar_name=$_ar_home" ;;
        esac  # anything else is your choice
    done
}

_ar_set_rocm() {
    export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1  # without it attention on gfx1151 is 17 times slower (AOTriton up to 0.11.2)
    _ar_drop PYTORCH_HIP_ALLOC_CONF "allocator settings crash or corrupt on ROCm"
    _ar_drop PYTORCH_ALLOC_CONF "allocator settings crash or corrupt on ROCm"
    case "$AUTORESEARCH_HARDWARE" in gfx1151 | amd) ;; *) return 0 ;; esac
    _ar_drop PYTORCH_CUDA_ALLOC_CONF "ROCm builds read it as their own allocator settings"
    _ar_set_rocm_home
    if [ "$AUTORESEARCH_HARDWARE" = gfx1151 ]; then
        export PYTORCH_ROCM_ARCH=gfx1151  # for extensions that are built here
        _ar_drop HSA_OVERRIDE_GFX_VERSION "gfx1151 is supported as itself; another part's code faults on it"
    elif [ -n "$AUTORESEARCH_GFX" ]; then
        PYTORCH_ROCM_ARCH=$(printf '%s' "$AUTORESEARCH_GFX" | tr ' ' ';')
        export PYTORCH_ROCM_ARCH
    fi
}

_ar_main() {
    # shellcheck disable=SC2034  # zsh's own words, for code that is written for sh
    if [ -n "${ZSH_VERSION:-}" ]; then emulate -L sh; fi
    _ar_root=$(dirname "$(readlink -f "$1")")
    _ar_venv=$_ar_root/venv
    _ar_find_hardware && _ar_need_venv && _ar_activate && _ar_constrain_pip && _ar_set_rocm || return 1
    # "none" may be a choice on a machine that has a GPU: then torch must not see it either.
    [ "$AUTORESEARCH_HARDWARE" != none ] || export CUDA_VISIBLE_DEVICES="" HIP_VISIBLE_DEVICES=""
}

# shellcheck disable=SC2296  # the second is zsh's
if [ -n "${BASH_VERSION:-}" ]; then _ar_main "${BASH_SOURCE[0]}"; else eval '_ar_main "${(%):-%x}"'; fi
