#!/usr/bin/env bash
# Everything that this project checks, with one command:  bash tests/run.sh
#
# Makes what it needs first: virtual environments (.venv-test*), and as root on Debian or Ubuntu the system
# packages for the tests on several hosts. It does not make them again the next time. The first stage that
# fails ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1

stage=start
passed=()
begin() {
    stage=$1
    printf '\n=== %s (after %d min %d s)\n' "$stage" $((SECONDS / 60)) $((SECONDS % 60))
}
finish() {
    passed+=("$stage")
}
conclude() {
    local code=$?
    if [ "$code" -eq 0 ]; then
        printf '\nALL PASSED in %d min %d s: %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$(printf '%s; ' "${passed[@]}")"
    else
        printf '\nFAILED at stage "%s" (exit code %d) after %d s; passed before: %s\n' \
            "$stage" "$code" "$SECONDS" "$(printf '%s; ' "${passed[@]:-none}")" >&2
    fi
}
trap conclude EXIT
# Without these, who is ended by a signal would conclude with the exit code of the last command that ended well.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

quietly() { # COMMAND...: show what it says only if it fails
    local log code=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || code=$?
    [ "$code" -eq 0 ] || cat "$log" >&2
    rm -f "$log"
    return "$code"
}

environment() { # DIRECTORY PYTHON PIP-ARGUMENTS...: a virtual environment, made again when its ingredients change
    local directory=$1 python=$2 wanted
    shift 2
    wanted="$("$python" -VV) $PWD $* $(cat pyproject.toml tests/requirements*.txt | cksum)"
    if [ "$(cat "$directory/made-from" 2>/dev/null)" != "$wanted" ]; then
        echo "making $directory"
        quietly "$python" -m venv --clear "$directory"
        quietly "$directory/bin/python" -m pip install "$@"
        echo "$wanted" >"$directory/made-from"
    fi
}

minor_of() { # PYTHON: 11 for a CPython 3.11 that works, else nothing
    "$1" -c 'import ensurepip, sys, venv
if sys.implementation.name == "cpython" and sys.version_info[0] == 3: print(sys.version_info[1])' 2>/dev/null || true
}

pythons=() # by minor version
find_pythons() {
    local candidate minor
    for candidate in python3.{8..13} python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        minor=$(minor_of "$candidate")
        if [ -n "$minor" ] && [ "$minor" -ge 8 ] && [ "$minor" -le 13 ]; then
            : "${pythons[$minor]:=$candidate}"
        fi
    done
}

system_packages() { # for tests/hosts: several hosts on this machine
    local item missing=()
    for item in sshd:openssh-server ssh:openssh-client nft:nftables ip:iproute2 unshare:util-linux; do
        command -v "${item%%:*}" >/dev/null || missing+=("${item#*:}")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        if quietly apt-get -q update && quietly apt-get -q install -y --no-install-recommends "${missing[@]}"; then
            return 0
        fi
    fi
    echo "not installed: ${missing[*]}; tests on several hosts will say what they need"
}

core() { # ENVIRONMENT: the core's tests, of parametrized ones another eighth in each environment
    "$1/bin/python" -m pytest -q -n 2 -m "not slow and not hosts" --one-in 8 tests/unit tests/contract tests/sim
}

begin "environment"
find_pythons
main=${pythons[11]:-python3}
[ -n "$(minor_of "$main")" ] || { echo "Python with venv is needed (Debian: apt install python3-venv)" >&2; exit 2; }
environment .venv-test "$main" -e '.[test,dev,examples]' -r tests/requirements.txt
system_packages
python=.venv-test/bin/python
finish

begin "ruff"
"$python" -m ruff check
finish

begin "mypy"
"$python" -m mypy
finish

begin "tests on Python $("$python" -c 'import platform; print(platform.python_version())')"
"$python" -m pytest -q -rs -n 2 -m "not slow and not hosts"
finish

begin "slow tests, and tests on several hosts"
"$python" -m pytest -q -rs -n 2 --dist loadgroup -m "slow or hosts"
finish

begin "TensorFlow and Keras"
environment .venv-test-tf "$main" -e '.[test,examples]' -r tests/requirements-tf.txt
tf_python=.venv-test-tf/bin/python
# It asks for the package "tensorflow", which the one for CPUs replaces here.
"$tf_python" -c 'import importlib.util as util; exit(util.find_spec("tf_keras") is None)' ||
    quietly "$tf_python" -m pip install --no-deps tf_keras==2.21.0
"$tf_python" -m pytest -q -rs -n 2 --dist loadgroup tests/adapters/tensorflow tests/adapters/keras tests/hosts/test_keras.py
"$tf_python" -m pytest -q -rs tests/proc/test_ringrun_horovod.py -k the_adapters_of_this_version
finish

core_needs=(pytest pytest-timeout pytest-xdist ml_dtypes)
for minor in "${!pythons[@]}"; do
    [ "$minor" != "$(minor_of "$python")" ] || continue
    begin "core on Python 3.$minor"
    environment ".venv-test-3.$minor" "${pythons[$minor]}" -e . "${core_needs[@]}"
    core ".venv-test-3.$minor"
    finish
done

for minor in 10 11 9 8; do
    [ -n "${pythons[$minor]:-}" ] || continue
    begin "core with NumPy 1.23.5 on Python 3.$minor"
    environment .venv-test-numpy-1.23 "${pythons[$minor]}" -e . numpy==1.23.5 "${core_needs[@]}"
    core .venv-test-numpy-1.23
    finish
    break
done
