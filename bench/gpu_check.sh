#!/usr/bin/env bash
# Everything that has to be seen on a machine with one NVIDIA GPU, in one command of less than eight minutes and without
# a network: environment, build, checks, benchmarks against torch, the test-suite. A step that fails stops no other one.
# All of it with the backends cuda and triton, or with triton alone where the build left out the CUDA kernels.
#
#   bench/gpu_check.sh --prepare    on a machine with a network: fetches what the build and the tests may lack there
#   bench/gpu_check.sh              the real thing
#   bench/gpu_check.sh --dry-run    every step on the CPU, in Triton's interpreter and with tiny sizes
#
# OUT                            folder for the results (default: build/gpu_check/results)
# PYTHON                         interpreter with torch, on which a virtual environment is put (default: python3)
# MO_FUSED_GPU_CHECK_PYTHON      interpreter that has mo_fused already: nothing is built
# MO_FUSED_BACKEND               cuda or triton: that backend alone (default: both)
# MO_FUSED_TEST_NATIVE           for --dry-run: library with the CUDA kernels compiled for the CPU
# MO_FUSED_COMMIT                what the results say about the source where there is no git
set -uo pipefail

out=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
check=bench/gpu_check.py
outer=${PYTHON:-python3}
python=${MO_FUSED_GPU_CHECK_PYTHON:-$PWD/build/gpu_check/venv/bin/python}
out=${out:-$PWD/build/gpu_check/results}
total=470 # seconds for all steps together
dry=()
case "$*" in
"") ;;
--dry-run)
    dry=(--dry-run)
    export OMP_NUM_THREADS=1 # a team of threads costs tiny tensors more than it does for them
    ;;
--prepare) exec "$outer" $check prepare ;;
*)
    echo "bench/gpu_check.sh: expected --prepare, --dry-run or nothing, found: $*" >&2
    exit 2
    ;;
esac

mkdir -p "$out"
for name in report.txt bench.jsonl tests-{cuda,triton}.{xml,log} {environment,build,verify,bench}.log; do rm -f "$out/$name"; done
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/gpu_check/triton}
steps=()
failed=0

step() { # name seconds command...: runs the command within its time, keeps its log, goes on whatever happens
    local name=$1 limit=$2 start=$SECONDS status=0 verdict=ok
    shift 2
    if ((limit > total - start)); then limit=$((total - start)); fi
    if ((limit < 5)); then
        verdict="FAILED (not started: no time left)"
    else
        echo "::: $name, at most $limit s"
        timeout --signal=INT --kill-after=12 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
        case $status in
        0) ;;
        77) verdict="not run" ;;
        124 | 137) verdict="FAILED (time limit of $limit s)" ;;
        *) verdict="FAILED (exit status $status)" ;;
        esac
    fi
    if [[ $verdict == FAILED* ]]; then
        failed=1
        tail -n 25 "$out/$name.log" 2>/dev/null | cut -c 1-300
    fi
    steps+=("$name|$((SECONDS - start))|$verdict")
    echo "::: $name took $((SECONDS - start)) s: $verdict"
}

step environment 30 "$outer" $check environment "${dry[@]}"
if [[ -n ${MO_FUSED_GPU_CHECK_PYTHON:-} ]]; then
    step build 30 "$python" $check installed
else
    step build 120 "$outer" $check build "${dry[@]}"
fi
step verify 110 "$python" $check verify "${dry[@]}"
# A minute is kept for the tests. They come last: cut short by the clock they still say which of them have passed.
left=$((total - SECONDS - 60 < 200 ? total - SECONDS - 60 : 200))
step bench $left "$python" $check bench "${dry[@]}" --seconds $((left - 15)) --json "$out/bench.jsonl"
for backend in cuda triton; do
    step tests-$backend 100 "$python" $check tests "${dry[@]}" --backend $backend --junit "$out/tests-$backend.xml"
done

"$outer" $check report --out "$out" "${steps[@]}" || failed=1
exit $failed
