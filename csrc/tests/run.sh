#!/usr/bin/env bash
# Builds the native code with sanitizers and runs its own tests: every csrc/tests/*_test.cpp is a program that returns
# non-zero when it fails; every csrc/tests/*_kernel.cpp is compiled once per instruction set, like those in csrc/cpu.
# All run under the address and undefined-behaviour sanitizers; those with "thread" in their name run a second time
# under the thread sanitizer, which cannot be combined with the first two, on the baseline kernels (threads are the
# same on all).
#
# The CUDA kernels are compiled with the same C++ compiler, against csrc/cuda/tests/shim.h, and run through the tests of
# the step once more, under the address and undefined-behaviour sanitizers, with the threads of a block in two orders;
# csrc/tests/cuda_*_test.cpp test the shim itself.
#
#   csrc/tests/run.sh            CXX names the compiler (default: g++), MAX_JOBS the compilers at a time
set -euo pipefail

csrc=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cxx=${CXX:-g++}
jobs=${MAX_JOBS:-$(nproc)}
out=$(mktemp -d)
trap 'wait; rm -rf "$out"' EXIT

# -O1 keeps the build short and stacks readable; with -ftree-vectorize the loops run as vectors, as they are shipped. GCC 12
# does not see at -O1 that buffers are written before they are read (their lengths are known when running).
flags=(-O1 -ftree-vectorize -g1 -fno-omit-frame-pointer -Werror -pthread "-I$csrc")
quiet=(-Wno-unknown-warning-option -Wno-maybe-uninitialized)
isas=(base)
have=() # tells csrc/cpu/select.cpp and the tests which further instruction sets there are
declare -A isa_flags=([base]="")
while read -r where name rest; do
    if [[ $where == "*" && $name == common ]]; then
        read -ra common <<<"$rest"
        flags+=("${common[@]}" "${quiet[@]}")
    elif [[ $where == "$(uname -m)" ]]; then
        isas+=("$name")
        isa_flags[$name]=$rest
        have+=("-DMO_HAVE_${name^^}=1")
    fi
done <"$csrc/flags.txt"

running=0
in_background() { # command...: waits while $jobs are running; a failed one ends the script
    if ((running >= jobs)); then
        wait -n
        running=$((running - 1))
    fi
    "$@" &
    running=$((running + 1))
}
wait_for_all() {
    while ((running > 0)); do
        wait -n
        running=$((running - 1))
    done
}

# build_and_run <sanitizers> <test source>...
build_and_run() {
    local sanitizers=$1 folder="$out/$1" source name isa program objects=() these=("${isas[@]}")
    local build=("$cxx" "${flags[@]}" "-fsanitize=$sanitizers" -fno-sanitize-recover=all)
    if [[ $sanitizers == thread ]]; then these=(base); else build+=("${have[@]}"); fi
    shift
    mkdir -p "$folder"
    for source in "$csrc"/cpu/*.cpp "$csrc"/tests/*_kernel.cpp; do
        name=$(basename "$source" .cpp)
        if [[ $name == *_kernel ]]; then
            for isa in "${these[@]}"; do
                objects+=("$folder/$name.$isa.o")
                # shellcheck disable=SC2086  # a list of flags
                in_background "${build[@]}" "-DMO_ISA=$isa" ${isa_flags[$isa]} -c "$source" -o "$folder/$name.$isa.o"
            done
        else
            objects+=("$folder/$name.o")
            in_background "${build[@]}" -c "$source" -o "$folder/$name.o"
        fi
    done
    for source in "$@"; do
        in_background "${build[@]}" -c "$source" -o "$folder/$(basename "$source" .cpp).test"
    done
    wait_for_all
    for source in "$@"; do
        program="$folder/$(basename "$source" .cpp)"
        "${build[@]}" "$program.test" "${objects[@]}" -o "$program"
        echo "run $(basename "$program") ($sanitizers)"
        "${fixed_addresses[@]}" "$program" || {
            echo "csrc/tests/run.sh: status $? from ${source##*/} under -fsanitize=$sanitizers" >&2
            exit 1
        }
    done
}

# build_and_run_device <test source>...: with the CUDA kernels in the place of the CPU's
build_and_run_device() {
    local folder="$out/device" source name program objects=()
    # Blocks of 64 threads: a fiber for each costs time, and nothing in the kernels depends on their number.
    local build=("$cxx" "${flags[@]}" -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-unknown-pragmas
        -DMO_CUDA_SHIM=1 -DMO_THREADS=64)
    mkdir -p "$folder"
    for source in "$csrc"/cuda/*.cu "$csrc"/cuda/tests/*.cpp; do
        name=$(basename "$source")
        objects+=("$folder/$name.o")
        in_background "${build[@]}" -DMO_ISA=device -x c++ -c "$source" -o "$folder/$name.o"
    done
    for source in "$@"; do
        in_background "${build[@]}" -c "$source" -o "$folder/$(basename "$source" .cpp).test"
    done
    wait_for_all
    for source in "$@"; do
        program="$folder/$(basename "$source" .cpp)"
        "${build[@]}" "$program.test" "${objects[@]}" -o "$program"
        echo "run $(basename "$program") (CUDA kernels, address,undefined)"
        in_background run_on_device "$program"
    done
    wait_for_all
}

run_on_device() { # program: one thread each, so that several run at a time
    "$1" 2> >(grep -v "ASan doesn't fully support makecontext" >&2) || {
        echo "csrc/tests/run.sh: status $? from $(basename "$1") with the CUDA kernels" >&2
        return 1
    }
}

shopt -s nullglob
mapfile -t tests < <(printf '%s\n' "$csrc"/tests/*_test.cpp | grep -v '/cuda_')
device_tests=("$csrc"/tests/{step,norm,adafactor,quantised}_test.cpp "$csrc"/tests/cuda_*_test.cpp)
thread_tests=("$csrc"/tests/*thread*_test.cpp)
if [[ ${#tests[@]} -eq 0 ]]; then
    echo "csrc/tests/run.sh: expected at least one csrc/tests/*_test.cpp, found none" >&2
    exit 1
fi

# Older thread sanitizers refuse to start where the kernel spreads addresses widely; where it is allowed, don't let it.
fixed_addresses=()
if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
    fixed_addresses=(setarch "$(uname -m)" --addr-no-randomize)
fi
export TSAN_OPTIONS=${TSAN_OPTIONS:-die_after_fork=0:halt_on_error=1}

build_and_run address,undefined "${tests[@]}"
if [[ ${#thread_tests[@]} -gt 0 ]]; then
    build_and_run thread "${thread_tests[@]}"
fi
build_and_run_device "${device_tests[@]}"
passed=$((${#tests[@]} + ${#thread_tests[@]} + ${#device_tests[@]}))
echo "native: $passed passed, 0 failed"
