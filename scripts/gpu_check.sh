#!/usr/bin/env bash
# On a machine with a GPU, from a checkout: the CUDA tests, compute-sanitizer on every kernel, the profiler and the training
# example, the GPU benchmarks.
#
#   scripts/gpu_check.sh [folder] [build|tests|sanitizer|examples|benchmarks ...]
#
# Uses the package as it is built; where it is not, builds it in place. Logs, plots, the measurements as JSON and the page made of
# them go to the folder (default: $OUT, else build/gpu_check), the last two to docs/benchmarks too. Exits with 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

out=${1:-${OUT:-build/gpu_check}}
shift || true
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(build tests sanitizer examples benchmarks)
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=()

# run <name> <command ...>: output to <name>.log, its end to the terminal.
run() {
  local name=$1 start=$SECONDS
  shift
  printf '== %s\n' "$name"
  if "$@" >"$out/$name.log" 2>&1; then
    tail -n 3 "$out/$name.log"
    printf '   ok, %d s\n' $((SECONDS - start))
  else
    failed+=("$name")
    tail -n 60 "$out/$name.log"
    printf '   FAILED, %d s\n' $((SECONDS - start))
  fi
}

is_usable() {
  "$python" - <<'PY'
import torch
import ssm_kernels

info = ssm_kernels.build_info()
print(info)
assert torch.cuda.is_available(), "PyTorch finds no CUDA GPU"
assert info["cuda"], "ssm_kernels was built without CUDA kernels"
PY
}

build() {
  "$python" -c 'import torch; assert torch.cuda.is_available(), "PyTorch finds no CUDA GPU"' || return 1
  is_usable && return
  if [ -e ssm_kernels/_ops.abi3.so ]; then
    echo "_ops serves every Python, _C only its own: building that one"
    "$python" - <<'PY' && is_usable && return
import setuptools  # noqa: F401: provides distutils
from distutils.core import run_setup

distribution = run_setup("setup.py", ["build_ext", "--inplace"], stop_after="commandline")
distribution.ext_modules = [extension for extension in distribution.ext_modules if extension.name == "ssm_kernels._C"]
distribution.run_commands()
PY
  fi
  echo "building everything"
  "$python" setup.py build_ext --inplace && is_usable
}

# Each tool on several shares of the cases at once.
sanitizer() {
  local tool status=0 program share shares=$((($(nproc) + 3) / 4)) running
  program=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
  for tool in memcheck racecheck initcheck synccheck; do
    echo "-- $tool"
    running=()
    for share in $(seq "$shares"); do
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$program" --tool "$tool" --target-processes all --error-exitcode 1 \
        "$python" scripts/sanitizer_cases.py --share "$share/$shares" >"$out/$tool.$share.log" 2>&1 &
      running+=($!)
    done
    for share in $(seq "$shares"); do
      if wait "${running[share - 1]}"; then
        tail -n 2 "$out/$tool.$share.log"
      else
        status=1
        tail -n 20 "$out/$tool.$share.log"
        echo "$tool $share/$shares failed"
      fi
    done
  done
  return $status
}

examples() {
  local status=0
  "$python" profile_discretization.py --device cuda --plot "$out/profile_discretization.png" \
    --json "$out/profile_discretization.json" || status=1
  "$python" examples/train_sequence.py --device cuda --plot "$out/train_sequence.png" || status=1
  return $status
}

benchmarks() {
  local name page status=0 names=() files=()
  for name in selective_scan ssd linear_scan state_update overhead; do
    echo "-- $name"
    rm -f "$out/$name.json"
    "$python" "benchmarks/bench_$name.py" --json "$out/$name.json" || { status=1; echo "$name failed"; }
    [ ! -e "$out/$name.json" ] || { names+=("$name"); files+=("$out/$name.json"); }
  done
  [ ${#files[@]} -gt 0 ] || return 1
  page=$("$python" benchmarks/report.py "${files[@]}") || return 1
  for name in "${names[@]}"; do cp "$out/$name.json" "${page%.md}_$name.json" || return 1; done
  cp "$page" "${page%.md}"_*.png "$out/" || status=1
  return $status
}

for stage in "${stages[@]}"; do
  case $stage in
    build) run build build ;;
    tests) run tests "$python" -m pytest -q -m cuda -p no:cacheprovider tests ;;
    sanitizer) run sanitizer sanitizer ;;
    examples) run examples examples ;;
    benchmarks) run benchmarks benchmarks ;;
    *)
      echo "unknown stage '$stage', expected build, tests, sanitizer, examples or benchmarks" >&2
      exit 1
      ;;
  esac
  # Nothing else can succeed without it.
  if [ "$stage" = build ] && [ ${#failed[@]} -gt 0 ]; then break; fi
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]} (logs in $out)"
  exit 1
fi
echo "all ok (logs in $out)"
