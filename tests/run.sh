#!/usr/bin/env bash
# The tests of this project, with one command:
#
#   bash tests/run.sh                      a selection, for work on the code: at most 5 minutes; of other frameworks
#                                          than PyTorch if a stage of them has been run before
#   bash tests/run.sh --ci                 what CI runs before a change lands: at most 25 minutes
#   bash tests/run.sh --all                everything, before a release: at most 60 minutes
#   bash tests/run.sh --only STAGE [...]   one stage whole; STAGE is one of those listed at the end of a run
#   bash tests/run.sh --gpu                the tests that need a GPU; says what it ran, or that there is none
#   bash tests/run.sh --no-apt [...]       install no system packages; the tests that need them are skipped
#   bash tests/run.sh --record [...]       write the durations of the run to tests/durations.json
#   bash tests/run.sh [PATH ...] [-k ...]  these tests whole: pytest gets these arguments
#
# It makes what it needs first: virtual environments (.venv-test*), and as root on Debian or Ubuntu the system
# packages for the tests on several hosts, after a line that names them. The first stage that fails ends the run,
# except with --all. Two lanes of stages run side by side, since many tests wait more than they compute; what the
# second prints comes when the first is over. (Not nox: it runs one session after the other, so the lanes would stay here.)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # or each of thousands of processes compiles what it imports

lane_1=(lint main clusters mxnet docs package pythons coverage) lane_2=(types hosts frameworks trainers slurm aarch64)
release=(docs package pythons coverage trainers slurm aarch64) # only with --all
tier=quick only=() may_install=1 record="" beside=1
while [ $# -gt 0 ]; do
    case $1 in
        --ci) tier=ci ;;
        --all) tier=all ;;
        --gpu) tier=all only+=(gpu) ;;
        --no-apt) may_install= ;;
        --record) record=--record ;;
        --only)
            shift
            stages=("${lane_1[@]}" "${lane_2[@]}" gpu)
            [[ " ${stages[*]} " == *" ${1:-} "* && -n "${1:-}" ]] || { echo "--only needs one of ${stages[*]}" >&2; exit 2; }
            tier=all only+=("$1") ;;
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit ;;
        *) break ;;
    esac
    shift
done
given=("$@")
for argument in "$@"; do
    [[ $argument != tests/* || -e ${argument%%::*} ]] || { echo "there is no $argument" >&2; exit 2; }
done
if [ ${#given[@]} -gt 0 ] && [ ${#only[@]} -eq 0 ]; then only=(main) tier=all; fi

results=$(mktemp -d)
stage=start other="" python=python3
conclude() {
    local code=$?
    if [ -n "$other" ]; then
        kill -- "-$other" 2>/dev/null || true
        cat "$results/lane_2.log"
    fi
    if [ -e "$results/stages" ]; then
        printf '\n'
        python3 tests/summary.py table "$results" "$tier" $record || { [ "$code" -ne 0 ] || code=1 stage=summary; }
    fi
    if [ "$code" -eq 0 ]; then
        printf '\nALL PASSED in %d min %d s (%s)\n' $((SECONDS / 60)) $((SECONDS % 60)) "$tier"
    else
        [ ! -e "$results/failed" ] || stage=$(paste -s -d ' ' "$results/failed")
        printf '\nFAILED at stage "%s" (exit code %d) after %d s\n' "$stage" "$code" "$SECONDS" >&2
    fi
    rm -rf "$results"
    exit "$code"
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

pythons=() # by minor version
find_pythons() {
    local candidate minor
    for candidate in python3.{8..14} python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        minor=$("$candidate" -c 'import ensurepip, sys, venv
if sys.implementation.name == "cpython" and sys.version_info[0] == 3: print(sys.version_info[1])' 2>/dev/null || true)
        if [ -n "$minor" ] && [ "$minor" -ge 8 ] && [ "$minor" -le 14 ]; then
            : "${pythons[$minor]:=$candidate}"
        fi
    done
}

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
    "$environment/bin/python" -m pytest -q -rs --no-header --tier "$tier" -o cache_dir="$results/cache.$stage.$name" \
        --max-worker-restart=0 --junitxml="$results/$stage.$name.xml" "$@" || code=$?
    if [ "$code" -ne 1 ] || [ "$tier" = quick ] || [ ${#given[@]} -gt 0 ]; then return "$code"; fi
    # Real processes with time limits, on a machine that others use: a few that failed are run once more, alone.
    # Those that pass then are listed as unstable with what they said; too many of them fail the run.
    mapfile -t failed < <(python3 tests/summary.py failed "$results" "$stage.$name")
    if [ ${#failed[@]} -eq 0 ]; then return "$code"; fi
    printf '\nRunning the %d that failed once more, alone\n' ${#failed[@]}
    "$environment/bin/python" -m pytest -q --no-header --tier all "${failed[@]}"
}

quick() { [ "$tier" = quick ]; }

left_out() { # ENVIRONMENT: the quick run tests a framework only if its environment has been made before
    quick && [ ! -e "$1/made-from" ] || return 1
    echo "left out, as there is no $1 yet: bash tests/run.sh --only $stage makes it"
}

may_skip() { # REASON: skip a stage, except where everything is required: in CI
    echo "cannot run: $1"
    [[ ! "${CI:-} ${RINGCOMM_REQUIRE_HOSTS:-}" =~ 1|true ]]
}

# ---- stages ----

here_only=(-m "not hosts and not slurm and not aarch64")

stage_lint() { "$python" -m ruff check; }

stage_types() { # also as on macOS, where many calls are absent
    "$python" -m mypy
    quick || "$python" -m mypy --platform darwin --cache-dir .mypy_cache/darwin
}

stage_main() { # everything that needs neither several hosts nor another framework than PyTorch
    if [ ${#given[@]} -gt 0 ]; then
        tests .venv-test given -n 2 --dist loadgroup "${given[@]}"
    elif quick; then
        export FUZZ_CASES=${FUZZ_CASES:-1000}
        tests .venv-test main -n 4 --dist loadgroup "${here_only[@]}"
    else
        [ "$tier" = all ] || export FUZZ_CASES=${FUZZ_CASES:-1500}
        tests .venv-test main -n 2 --dist loadgroup "${here_only[@]}"
    fi
}

stage_hosts() {
    if quick; then tests .venv-test hosts -m "hosts and smoke" tests/hosts; return; fi
    tests .venv-test hosts -n "$beside" --dist loadgroup -m hosts
}

frameworks() { # make the environment with all frameworks but MXNet, for stages of both lanes
    exec 9>"$results/frameworks.lock"
    flock 9
    environment .venv-test-frameworks "$main" -e '.[test,examples]' -r tests/requirements-frameworks.txt
    # It asks for the package "tensorflow", which the one for CPUs replaces here.
    .venv-test-frameworks/bin/python -c 'import importlib.util as util; exit(util.find_spec("tf_keras") is None)' ||
        quietly .venv-test-frameworks/bin/python -m pip install --no-deps tf_keras==2.21.0
    exec 9>&-
}

stage_frameworks() { # TensorFlow, Keras, JAX, MLX, Lightning
    if left_out .venv-test-frameworks; then return; fi
    frameworks
    local adapters=(tests/adapters/{tensorflow,keras,jax,mlx})
    if quick; then
        tests .venv-test-frameworks smoke -n 2 --dist loadgroup -m smoke "${adapters[@]}"
        return
    fi
    tests .venv-test-frameworks adapters -n "$beside" --dist loadgroup "${adapters[@]}" tests/test_help.py \
        tests/adapters/trainers
    tests .venv-test-frameworks hosts tests/hosts/test_keras.py # apart: it forks, which JAX's threads forbid
    tests .venv-test-frameworks programs tests/proc/test_ringrun_horovod.py tests/proc/test_examples.py \
        -k 'the_adapters_of_this_version or jax or mlx'
}

stage_clusters() { # Ray, Dask and Spark, each as a real cluster here
    if quick; then return; fi
    frameworks
    system_packages "Spark" java:default-jre-headless
    tests .venv-test-frameworks clusters -n "$beside" --dist loadfile tests/adapters/clusters
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
            tests .venv-test-mxnet programs tests/proc/test_ringrun_horovod.py -k 'the_adapters_of_this_version and mxnet'
        fi
        return
    done
    may_skip "MXNet needs one of Python 3.8 to 3.11"
}

stage_trainers() { # Fabric, Accelerate, the Hugging Face Trainer and Composer
    if ! environment .venv-test-trainers "$main" -e '.[test]' -r tests/requirements-trainers.txt; then
        may_skip "what tests/requirements-trainers.txt lists cannot be installed here"
        return
    fi
    # These two ask for another PyTorch than the tests use, and a torchvision that other trainers can see breaks
    # them: so they are in a folder of their own, which tests/adapters/trainers/recorded.py adds to the path.
    [ -e .venv-test-trainers/composer/composer ] ||
        quietly .venv-test-trainers/bin/python -m pip install --no-deps --target .venv-test-trainers/composer \
            mosaicml==0.32.1 torchvision==0.28.0
    system_packages "Slurm and MPI" "${slurm_packages[@]}"
    tests .venv-test-trainers trainers tests/adapters/trainers tests/hosts/test_trainers.py \
        tests/slurm/test_launched.py::test_lightning_trains_in_an_allocation
}

slurm_packages=(slurmctld:slurm-wlm munged:munge mpirun.openmpi:openmpi-bin)

stage_slurm() { # a real Slurm, and real mpiruns, over several hosts on this machine
    system_packages "Slurm and MPI" "${slurm_packages[@]}"
    tests .venv-test slurm -m slurm tests/slurm
}

stage_aarch64() { # jobs on x86-64 and ARM together: hosts with a Debian of arm64, and of armhf, in emulation
    system_packages "hosts of aarch64 in emulation" debootstrap:debootstrap qemu-aarch64-static:qemu-user-static
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

stage_docs() {
    environment .venv-docs "$main" -e . $(sed 's/ *#.*//' docs/requirements.txt)
    NO_MKDOCS_2_WARNING=1 quietly .venv-docs/bin/mkdocs build --strict -d "$results/site"
    SITE="$results/site" tests .venv-test site tests/test_site.py
}

ends_of_pythons() { # the oldest and the newest Python here
    local minors=("${!pythons[@]}")
    printf '%s\n' "${minors[0]}" "${minors[-1]}" | uniq
}

stage_package() { # one wheel in empty environments of the oldest and the newest Python, and beside the version before
    quietly "$python" -m pip install build twine
    quietly "$python" -m build --outdir "$results/dist" .
    quietly "$python" -m twine check --strict "$results"/dist/*
    local minor tag
    tag=$(git describe --tags --abbrev=0 --match 'v*' HEAD~1 2>/dev/null || true)
    [ -z "$tag" ] || "$python" -m griffe check ringcomm --against "$tag" # a public name that went is an error
    for minor in $(ends_of_pythons); do
        quietly "${pythons[$minor]}" -m venv --clear "$results/empty"
        quietly "$results/empty/bin/python" -m pip install "$results"/dist/*.whl
        (cd "$results" && quietly empty/bin/ringrun -np 2 empty/bin/python -c \
            'import numpy, ringcomm as rc; rc.init(); assert rc.allreduce(numpy.ones(3)).sum() == 3')
        echo "Python 3.$minor: the wheel is installed, and two ranks run"
    done
    if [ -n "$tag" ]; then
        mkdir "$results/before"
        git archive "$tag" | tar -x -C "$results/before"
        quietly "$python" -m build --wheel --outdir "$results/previous" "$results/before"
        export PREVIOUS_WHEEL
        PREVIOUS_WHEEL=$(echo "$results"/previous/*.whl)
    fi
    tests .venv-test package tests/proc/test_other_version.py
}

stage_pythons() { # the core on the oldest Python with the oldest NumPy, and on the newest: a selection of its tests
    local minor tier=quick
    for minor in $(ends_of_pythons); do
        environment ".venv-test-3.$minor" "${pythons[$minor]}" -e . pytest pytest-timeout pytest-xdist hypothesis ml_dtypes \
            $([ "$minor" -gt 11 ] || echo numpy==1.23.5)
        tests ".venv-test-3.$minor" "3.$minor" -n 2 tests/unit tests/sim tests/integration
    done
}

stage_coverage() { # lines and branches that the tests of the core run, processes included, by package
    local package failed=0
    # Arrays: without a GPU. The agent: hosts run it from a text. join, job: more tests of them need a launcher.
    local -A least=(
        [ringcomm/arrays]=75 [launcher/ringrun/agent]=60 [launcher/ringrun/join]=80 [launcher/ringrun/job]=80)
    export COVERAGE_PROCESS_START=$PWD/pyproject.toml COVERAGE_FILE=$results/covered
    tests .venv-test coverage -n 2 --dist loadgroup tests/unit tests/sim tests/integration
    unset COVERAGE_PROCESS_START
    quietly "$python" -m coverage combine "$results"
    rm -f "$results"/covered.* # of processes that were killed
    for package in ringcomm/{wire,codec,schedule,transport,group,collective,arrays,engine,rendezvous,calls,job,storage} \
        ringcomm/{configuration,elastic,balance} launcher/ringrun/{plan,agent,elastic,reach,join,diagnosis,show,job}; do
        printf '%s: ' "$package"
        "$python" -m coverage report --include="$package/*" --fail-under="${least[$package]:-85}" > "$results/report" || failed=1
        tail -n 1 "$results/report"
    done
    return "$failed"
}

stage_gpu() { # only with --gpu or --only gpu: arrays on a CUDA device, with the libraries that see one
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
python3 tests/summary.py calibrate "$results"
if [ "${only[*]:-}" = gpu ] && python3 -c 'import numpy, pytest' 2>/dev/null && python3 tests/gpu/report.py >/dev/null; then
    python=python3 # as it is on a machine for GPUs: it has CUDA's libraries
else
    find_pythons
    main=${pythons[11]:-python3}
    "$main" -c 'import ensurepip, venv' || { echo "Python with venv is needed (Debian: apt install python3-venv)" >&2; exit 2; }
    environment .venv-test "$main" -e '.[test,dev,examples]' -r tests/requirements.txt
    system_packages "several hosts on this machine" \
        sshd:openssh-server ssh:openssh-client nft:nftables ip:iproute2 unshare:util-linux
    python=.venv-test/bin/python
fi
echo "environment=$SECONDS" >"$results/stages"

run_stages() { # STAGE...: one after the other
    local began code
    for stage in "$@"; do
        if [ "$tier" != all ] && [[ " ${release[*]} " == *" $stage "* ]]; then continue; fi
        began=$SECONDS
        printf '\n=== %s (after %d min %d s)\n' "$stage" $((SECONDS / 60)) $((SECONDS % 60))
        set +e
        (set -e; "stage_$stage")
        code=$?
        set -e
        echo "$stage=$((SECONDS - began))" >>"$results/stages"
        [ "$code" -ne 0 ] || continue
        echo "$stage" >>"$results/failed"
        [ "$tier" = all ] || exit "$code" # before a release, everything that is wrong is wanted at once
    done
    [ ! -e "$results/failed" ] || exit 1
}

stage="interrupted" # unless one fails
if [ ${#only[@]} -gt 0 ]; then
    beside=2 # workers of lane 2, which shares the machine with lane 1 otherwise
    run_stages "${only[@]}"
    exit
fi
set -m # a process group of its own, so that it can be ended as a whole
(run_stages "${lane_2[@]}") >"$results/lane_2.log" 2>&1 &
other=$!
set +m
set +e
(set -e; run_stages "${lane_1[@]}")
code=$?
set -e
[ "$code" -eq 0 ] || [ "$tier" = all ] || exit "$code"
wait "$other" || code=$?
other=""
cat "$results/lane_2.log"
exit "$code"
