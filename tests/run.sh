#!/usr/bin/env bash
# The tests of this project, with one command:
#
#   bash tests/run.sh                      a selection, for work on the code (minutes); of other frameworks than
#                                          PyTorch if a stage of them has been run before
#   bash tests/run.sh --all                everything
#   bash tests/run.sh --only STAGE [...]   one stage whole; STAGE is one of those listed at the end of a run
#   bash tests/run.sh --gpu                the tests that need a GPU; says what it ran, or that there is none
#   bash tests/run.sh --no-apt [...]       install no system packages; the tests that need them are skipped
#   bash tests/run.sh [PATH ...] [-k ...]  these tests whole: pytest gets these arguments
#
# It makes what it needs first: virtual environments (.venv-test*), and as root on Debian or Ubuntu the system
# packages for the tests on several hosts, after a line that names them. It does not make them again the next time. The first stage that
# fails ends it; a table of the stages and the slowest tests comes at the end. Two stages run at a time, since
# many tests wait more than they compute; what the second one prints comes when the first is over.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # or each of thousands of processes compiles what it imports

beside=(slow hosts slurm aarch64 tensorflow mxnet jax trainers engines)
stages=(lint types main slow hosts slurm aarch64 tensorflow mxnet jax trainers engines coverage docs package pythons gpu)
mode=quick only=() may_install=1
while [ $# -gt 0 ]; do
    case $1 in
        --all) mode=all ;;
        --gpu) mode=all only+=(gpu) ;;
        --no-apt) may_install= ;;
        --only)
            shift
            [ $# -gt 0 ] || { echo "--only needs a stage: ${stages[*]}" >&2; exit 2; }
            [[ " ${stages[*]} " == *" $1 "* ]] || { echo "no stage is called $1; there are ${stages[*]}" >&2; exit 2; }
            mode=all only+=("$1") ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit ;;
        *) break ;;
    esac
    shift
done
given=("$@")
for argument in "$@"; do
    if [[ $argument == tests/* && ! -e ${argument%%::*} ]]; then
        echo "there is no $argument" >&2
        exit 2
    fi
done
if [ ${#given[@]} -gt 0 ] && [ ${#only[@]} -eq 0 ]; then only=(main); mode=all; fi

results=$(mktemp -d)
stage=start other=""
conclude() {
    local code=$?
    if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
        kill -- "-$other" || true
        cat "$results/beside.log"
    fi
    if [ -e "$results/stages" ]; then
        printf '\n'
        "$python" tests/summary.py table "$results" || true
    fi
    if [ "$code" -eq 0 ]; then
        printf '\nALL PASSED in %d min %d s (%s)\n' $((SECONDS / 60)) $((SECONDS % 60)) "$mode"
    else
        printf '\nFAILED at stage "%s" (exit code %d) after %d s\n' "$stage" "$code" "$SECONDS" >&2
    fi
    rm -rf "$results"
}
trap conclude EXIT
# Without these, a run that is ended by a signal would conclude with the exit code of the last command.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

quietly() { # COMMAND...: show its output only if it fails
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
        # "|| return" because a caller's "if" switches set -e off.
        quietly "$python" -m venv --clear "$directory" || return
        # Modules are compiled when they are first imported, which most of a framework never are.
        quietly "$directory/bin/python" -m pip install --no-compile "$@" || return
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
    for candidate in python3.{8..14} python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        minor=$(minor_of "$candidate")
        if [ -n "$minor" ] && [ "$minor" -ge 8 ] && [ "$minor" -le 14 ]; then
            : "${pythons[$minor]:=$candidate}"
        fi
    done
}

host_packages=(sshd:openssh-server ssh:openssh-client nft:nftables ip:iproute2 unshare:util-linux)
emulation_packages=(debootstrap:debootstrap qemu-aarch64-static:qemu-user-static)
slurm_packages=(slurmctld:slurm-wlm munged:munge mpirun.openmpi:openmpi-bin mpirun.mpich:mpich)

system_packages() { # PURPOSE PROGRAM:PACKAGE...: install the packages of programs that are missing
    local item missing=() purpose=$1
    shift
    for item in "$@"; do
        command -v "${item%%:*}" >/dev/null || missing+=("${item#*:}")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ -n "$may_install" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "apt-get installs ${missing[*]}: the tests of $purpose need that. With --no-apt they are skipped."
        export DEBIAN_FRONTEND=noninteractive
        if quietly apt-get -q update && quietly apt-get -q install -y --no-install-recommends "${missing[@]}"; then
            return 0
        fi
    fi
    echo "not installed: ${missing[*]}. The tests of $purpose need that, and will say so."
}

tests() { # ENVIRONMENT NAME PYTEST-ARGUMENTS...: run pytest; NAME is for the table of the slowest tests
    local environment=$1 name=$2 code=0 failed=()
    shift 2
    # A worker that crashes ends the run: with another one in its place pytest-xdist 3.8 may never end.
    "$environment/bin/python" -m pytest -q -rs --no-header -o cache_dir="$results/cache.$stage.$name" \
        --max-worker-restart=0 --junitxml="$results/$stage.$name.xml" "$@" || code=$?
    if [ "$code" -ne 1 ] || [ "$mode" = quick ] || [ ${#given[@]} -gt 0 ]; then return "$code"; fi
    # Thousands of tests with real processes and time limits, on a machine that others use: a few that failed
    # are run once more, alone. The table names them, and more than a few are a failure.
    mapfile -t failed < <("$python" tests/summary.py failed "$results/cache.$stage.$name" "$results/$stage.$name.xml")
    if [ ${#failed[@]} -eq 0 ]; then return "$code"; fi
    printf '\nRunning the %d that failed once more, alone\n' ${#failed[@]}
    "$environment/bin/python" -m pytest -q --no-header "${failed[@]}" || return
    printf '%s\n' "${failed[@]/#/$name: }" >>"$results/repeated"
}

quick() { [ "$mode" = quick ]; }

left_out() { # ENVIRONMENT: the quick run tests a framework only if its environment has been made before
    quick && [ ! -e "$1/made-from" ] || return 1
    echo "left out, as there is no $1 yet: bash tests/run.sh --only $stage makes it"
}

may_skip() { # REASON: skip a stage, except where everything is required: in CI
    echo "cannot run: $1"
    [[ ! "${CI:-} ${RINGCOMM_REQUIRE_HOSTS:-}" =~ 1|true ]]
}

# ---- stages ----

stage_lint() {
    "$python" -m ruff check
}

stage_types() { # also as on macOS, where many calls are absent
    local compiling=""
    if quick; then # once beside this, not in every worker of pytest
        "$python" -m pytest -q --collect-only -m "${here_only[1]}" >/dev/null 2>&1 &
        compiling=$!
    fi
    "$python" -m mypy
    "$python" -m mypy --platform darwin --cache-dir .mypy_cache/darwin
    [ -z "$compiling" ] || wait "$compiling" || true # what is wrong with a test is shown where tests are run
}

here_only=(-m "not slow and not hosts and not slurm and not aarch64")

stage_main() { # everything that needs neither several hosts nor TensorFlow, on the main Python
    if [ ${#given[@]} -gt 0 ]; then
        tests .venv-test given -n 2 --dist loadgroup "${given[@]}"
    elif quick; then
        export FUZZ_CASES=${FUZZ_CASES:-1000}
        tests .venv-test main -n 4 --dist loadgroup --quick "${here_only[@]}"
    else
        tests .venv-test main -n 2 --dist loadgroup "${here_only[@]}"
    fi
}

stage_slow() {
    quick || tests .venv-test slow -n 2 --dist loadgroup -m "slow and not hosts and not aarch64"
}

stage_hosts() {
    if quick; then
        tests .venv-test hosts --quick -m "hosts and smoke" tests/hosts
    else
        tests .venv-test hosts -n 2 --dist loadgroup -m hosts
    fi
}

stage_slurm() { # a real Slurm, and real mpiruns, over several hosts on this machine
    quick && return
    system_packages "Slurm and MPI" "${slurm_packages[@]}"
    tests .venv-test slurm -m slurm tests/slurm
}

stage_aarch64() { # jobs on x86-64 and ARM together: hosts with a Debian of arm64, and of armhf, in emulation
    quick && return
    system_packages "hosts of aarch64 in emulation" "${emulation_packages[@]}"
    local code=0
    bash tests/aarch64/make_root.sh "$PWD/.root-aarch64" "$python" 2>"$results/reason" || code=$?
    if [ "$code" -eq 3 ]; then # in CI, too: it is this machine that lacks something
        echo "aarch64: $(tail -n 1 "$results/reason")" | tee -a "$results/skipped"
        return
    fi
    cat "$results/reason" >&2
    [ "$code" -eq 0 ] || return "$code"
    bash tests/aarch64/make_root.sh "$PWD/.root-armhf" "$python" armhf 2>"$results/reason" ||
        echo "armhf: $(tail -n 1 "$results/reason")" | tee -a "$results/skipped"
    tests .venv-test aarch64 -m aarch64 tests/aarch64
}

stage_tensorflow() {
    if left_out .venv-test-tf; then return; fi
    environment .venv-test-tf "$main" -e '.[test,examples]' -r tests/requirements-tf.txt
    # It asks for the package "tensorflow", which the one for CPUs replaces here.
    .venv-test-tf/bin/python -c 'import importlib.util as util; exit(util.find_spec("tf_keras") is None)' ||
        quietly .venv-test-tf/bin/python -m pip install --no-deps tf_keras==2.21.0
    if quick; then
        tests .venv-test-tf smoke -n 2 --dist loadgroup -m smoke tests/adapters/tensorflow tests/adapters/keras
    else
        tests .venv-test-tf tf -n 2 --dist loadgroup tests/adapters/tensorflow tests/adapters/keras tests/hosts/test_keras.py
        tests .venv-test-tf horovod tests/proc/test_ringrun_horovod.py -k the_adapters_of_this_version
        tests .venv-test-tf prepared tests/integration/storage/test_prepared_files.py -k 'data and service'
    fi
}

stage_mxnet() { # MXNet 1.9 exists for Python 3.8 to 3.11
    local minor
    if left_out .venv-test-mxnet; then return; fi
    for minor in 11 10 9 8; do
        [ -n "${pythons[$minor]:-}" ] || continue
        if ! environment .venv-test-mxnet "${pythons[$minor]}" -e . -r tests/requirements-mxnet.txt; then
            may_skip "MXNet cannot be installed here"
        elif quick; then
            tests .venv-test-mxnet smoke -m smoke tests/adapters/mxnet
        else
            tests .venv-test-mxnet mxnet tests/adapters/mxnet
            tests .venv-test-mxnet horovod tests/proc/test_ringrun_horovod.py -k 'the_adapters_of_this_version and mxnet'
        fi
        return
    done
    may_skip "MXNet needs one of Python 3.8 to 3.11"
}

stage_jax() { # and MLX
    if left_out .venv-test-jax; then return; fi
    environment .venv-test-jax "$main" -e '.[test,examples]' -r tests/requirements-jax.txt
    if quick; then
        tests .venv-test-jax smoke -m smoke tests/adapters/jax tests/adapters/mlx
    else
        tests .venv-test-jax jax -n 2 --dist loadgroup tests/adapters/jax tests/adapters/mlx
        tests .venv-test-jax shared tests/test_help.py tests/proc/test_examples.py -k 'jax or mlx'
    fi
}

stage_trainers() { # Lightning, Fabric, Accelerate, the Hugging Face Trainer and Composer
    if left_out .venv-test-trainers; then return; fi
    if ! trainers_environment; then
        may_skip "what tests/requirements-trainers.txt lists cannot be installed here"
        return
    fi
    if quick; then
        tests .venv-test-trainers smoke --quick -m smoke tests/adapters/trainers
    else
        system_packages "Slurm and MPI" "${slurm_packages[@]}"
        tests .venv-test-trainers trainers tests/adapters/trainers tests/hosts/test_trainers.py \
            tests/slurm/test_lightning.py
    fi
}

trainers_environment() {
    environment .venv-test-trainers "$main" -e '.[test]' -r tests/requirements-trainers.txt || return
    # These two ask for another PyTorch than the tests use, and a torchvision that other trainers can see breaks
    # them: so they are in a folder of their own, which tests/adapters/trainers/recorded.py adds to the path.
    [ -e .venv-test-trainers/composer/composer ] ||
        quietly .venv-test-trainers/bin/python -m pip install --no-deps --target .venv-test-trainers/composer \
            mosaicml==0.32.1 torchvision==0.28.0
}

stage_engines() { # Ray, Dask and Spark, each as a real cluster on this machine
    quick && return
    if ! environment .venv-test-engines "$main" -e '.[test]' -r tests/requirements-engines.txt; then
        may_skip "what tests/requirements-engines.txt lists cannot be installed here"
        return
    fi
    system_packages "Spark" java:default-jre-headless
    tests .venv-test-engines engines -n 2 --dist loadfile tests/adapters/clusters
}

stage_coverage() { # every module by the tests that the table names for it; only with --only coverage
    [ ${#only[@]} -gt 0 ] || return 0
    quietly "$python" tests/check_coverage.py
    coverage_in .venv-test-tf tensorflow keras jax
    coverage_in .venv-test-jax ringcomm/mlx
    coverage_in .venv-test-mxnet ringcomm/mxnet
    coverage_in .venv-test-engines ringcomm/ray/ ringcomm/dask ringcomm/spark
}

coverage_in() { # ENVIRONMENT PART ...: measure these modules, if the environment is made
    [ -e "$1/made-from" ] || return 0
    if "$1/bin/python" -c 'import coverage' 2>/dev/null; then
        quietly "$1/bin/python" tests/check_coverage.py "${@:2}"
    else
        echo "not measured in $1: there is no package coverage for its Python"
    fi
}

stage_docs() {
    quick && return
    quietly "$python" -m docs --output "$results/site"
    SITE="$results/site" tests .venv-test site tests/test_site.py
}

stage_package() { # wheel and sdist in empty environments of every Python here, and beside the version before
    quick && return
    quietly "$python" -m pip install build twine
    quietly "$python" -m build --outdir "$results/dist" .
    quietly "$python" -m twine check --strict "$results"/dist/*
    local minor file
    for minor in "${!pythons[@]}"; do
        quietly "${pythons[$minor]}" -m venv --clear "$results/empty"
        for file in "$results"/dist/*; do # the second finds the packages that the first has brought
            quietly "$results/empty/bin/python" -m pip uninstall --yes ringcomm
            quietly "$results/empty/bin/python" -m pip install "$file"
            (cd "$results" && quietly empty/bin/ringrun -np 2 empty/bin/python -c \
                'import numpy, ringcomm as rc; rc.init(); assert rc.allreduce(numpy.ones(3)).sum() == 3')
            echo "Python 3.$minor: ${file##*/} installed, and two ranks run"
        done
    done
    local before
    before=$("$python" -c 'from tests.proc.test_other_version import earlier_commit; print(earlier_commit() or "")')
    if [ -n "$before" ]; then
        mkdir "$results/before"
        git archive "$before" | tar -x -C "$results/before"
        quietly "$python" -m build --wheel --outdir "$results/previous" "$results/before"
        export PREVIOUS_WHEEL
        PREVIOUS_WHEEL=$(echo "$results"/previous/*.whl)
    fi
    tests .venv-test package tests/proc/test_other_version.py
}

core_needs=(pytest pytest-timeout pytest-xdist hypothesis ml_dtypes)

stage_pythons() { # the core on every other Python, the oldest with the oldest NumPy; of the tests another share in each
    quick && return
    local minor part others=()
    for minor in "${!pythons[@]}"; do
        if [ "$minor" != "$(minor_of "$python")" ] || [ ${#others[@]}:$((minor <= 11)) = 0:1 ]; then
            others+=("$minor")
        fi
    done
    # Integration tests take four fifths of the time: sockets and threads are tried on the oldest and the newest,
    # half of the tests on each. In between every Python has its share of the rest.
    local last=$((${#others[@]} - 1))
    for part in "${!others[@]}"; do
        minor=${others[part]}
        core_environment "$minor" "$([ "$part" -gt 0 ] || [ "$minor" -gt 11 ] || echo numpy==1.23.5)"
        if [ "$part" -gt 0 ] && [ "$part" -lt "$last" ]; then
            core_tests "3.$minor" --part "$part/$((last - 1))" tests/unit tests/sim
        else
            core_tests "3.$minor" tests/unit tests/sim
            core_tests "3.$minor-c" --part "$((part == 0 ? 1 : 2))/$((last == 0 ? 1 : 2))" tests/integration
        fi
    done
}

core_environment() { # MINOR NEED: what the core needs on this Python, and one need more, if it is not empty
    environment ".venv-test-3.$1" "${pythons[$1]}" -e . "${core_needs[@]}" ${2:+"$2"}
}

core_tests() { # NAME PYTEST-ARGUMENTS...: NAME begins with the version
    local name=$1
    shift
    tests ".venv-test-${name%-*}" "$name" -n 2 --one-in 16 --schedules 100 \
        -m "not slow and not hosts and not full" "$@"
}

stage_gpu() { # only with --gpu or --only gpu: arrays on a CUDA device, with the libraries that see one
    [ ${#only[@]} -gt 0 ] || return 0
    if ! "$python" tests/gpu/report.py; then
        echo "no GPU: neither torch nor CuPy of $python sees a CUDA device, so nothing was run"
        return 0
    fi
    export PYTHONPATH="$PWD:$PWD/launcher"
    "$python" -m pytest -q -rs --no-header -W ignore --junitxml="$results/gpu.gpu.xml" tests/gpu
    local transport
    for transport in auto tcp; do
        "$python" -m ringrun -np 2 --transport "$transport" "$python" benchmarks/device.py
    done
}

# ---- run them ----

if [ "${only[*]:-}" = gpu ] && ! python3 tests/gpu/report.py --driver; then
    echo "no GPU: there is no driver for CUDA devices here, so nothing was run"
    trap - EXIT
    rm -rf "$results"
    exit 0
fi
if [ "${only[*]:-}" = gpu ] && python3 -c 'import numpy, pytest' 2>/dev/null && python3 tests/gpu/report.py >/dev/null; then
    python=python3 # as it is on a machine for GPUs: it has CUDA's libraries
else
    find_pythons
    main=${pythons[11]:-python3}
    [ -n "$(minor_of "$main")" ] || { echo "Python with venv is needed (Debian: apt install python3-venv)" >&2; exit 2; }
    environment .venv-test "$main" -e '.[test,dev,examples]' -r tests/requirements.txt
    system_packages "several hosts on this machine" "${host_packages[@]}"
    python=.venv-test/bin/python
fi
echo "environment=$SECONDS" >"$results/stages"

run_stages() { # STAGE...: one after the other
    local began
    for stage in "$@"; do
        began=$SECONDS
        printf '\n=== %s (after %d min %d s)\n' "$stage" $((SECONDS / 60)) $((SECONDS % 60))
        "stage_$stage"
        echo "$stage=$((SECONDS - began))" >>"$results/stages"
    done
}

if [ ${#only[@]} -gt 0 ]; then
    wanted=()
    for stage in "${stages[@]}"; do
        if [[ " ${only[*]} " == *" $stage "* ]]; then wanted+=("$stage"); fi
    done
    run_stages "${wanted[@]}"
else
    first=()
    for stage in "${stages[@]}"; do
        [[ " ${beside[*]} " == *" $stage "* ]] || first+=("$stage")
    done
    run_stages lint types
    set -m # a process group of its own, so that it can be ended as a whole
    (run_stages "${beside[@]}") >"$results/beside.log" 2>&1 &
    other=$!
    set +m
    run_stages "${first[@]:2}"
    code=0
    wait "$other" || code=$?
    other=""
    cat "$results/beside.log"
    if [ "$code" -ne 0 ]; then
        stage=$(sed -n 's/^=== \([a-z0-9]*\) .*/\1/p' "$results/beside.log" | tail -n 1)
        exit "$code"
    fi
fi
