#!/usr/bin/env bash
# On a machine with a GPU: builds the package from a clean checkout, with this machine's compiler and the README's command, then
# runs from that checkout the whole test suite, compute-sanitizer on every kernel, the examples and the GPU benchmarks.
#
#   scripts/gpu_check.sh [--carried] [folder] [build|tests-cpu|tests-cuda|sanitizer|examples|benchmarks ...]
#
# Without stages: all of them. Each stage can run in a call of its own, after `build`.
# The clean checkout is build/clean_checkout: HEAD in a git repository, else a copy of the sources without build products. Beside
# it is the virtual environment that it is installed into, which sees the packages of the Python that runs this script.
#
# folder        receives logs, plots, the measurements as JSON and the page made of them; the last two go to docs/benchmarks too
#               (default: $OUT, else build/gpu_check; a name of a stage is a stage)
# --carried     for tuning only: no clean checkout. The stages use this tree and the library in it, which another machine may have
#               built; `build` adds what is missing. A run with this option does not check a commit.
#
# PYTHON        the interpreter (default: python3)
# PIP_NO_INDEX  pip's own variable, for a machine that reaches no package index: `build` then installs without build isolation and
#               without dependencies. It does the same where no index answers.
# WORKERS       tests that run at a time, if pytest-xdist is installed (default: as many as cores, for tests-cuda at most sixteen,
#               which share the GPUs there are)
# BENCHMARKS    names of the benchmarks that run, separated by spaces (default: all). The page has the earlier measurements of the
#               others.
#
# Exits with 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

tree=$(pwd -P)
checkout=$tree/build/clean_checkout
environment=$tree/build/clean_checkout_environment
python=${PYTHON:-python3}
carried=false
if [ "${1:-}" = --carried ]; then
  carried=true
  shift
fi
every=(build tests-cpu tests-cuda sanitizer examples benchmarks)
is_stage() { [[ " ${every[*]} " == *" $1 "* ]]; }
out=${OUT:-build/gpu_check}
if [ $# -gt 0 ] && ! is_stage "$1"; then
  out=$1
  shift
fi
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=("${every[@]}")
for stage in "${stages[@]}"; do
  is_stage "$stage" || { echo "unknown stage '$stage', expected one of: ${every[*]}" >&2; exit 1; }
done
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
export PYTHONUNBUFFERED=1
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

# The sources as a tar file, without what .gitignore lists, with neither times nor owners.
archive_sources() {
  sed -e 's,/$,,' -e 's,^/,./,' "$tree/.gitignore" |
    tar -c -C "$tree" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --exclude=./.git -X - .
}

is_repository() { [ "$(git -C "$tree" rev-parse --show-toplevel 2>/dev/null)" = "$tree" ]; }

# Identity of a clean checkout of this tree: the commit, or a checksum of the sources.
version() {
  if is_repository; then git -C "$tree" rev-parse HEAD; else archive_sources | sha256sum | cut -d ' ' -f 1; fi
}

make_clean_checkout() {
  rm -rf "$checkout" "$environment" "$checkout.version"
  if is_repository; then
    [ -z "$(git -C "$tree" status --porcelain)" ] || echo "the tree has changes that are not committed: they are not checked"
    git clone --quiet "$tree" "$checkout" || return 1
  else
    mkdir -p "$checkout" && archive_sources | tar -x -C "$checkout" || return 1
  fi
  if [ -n "$(find "$checkout" -name '*.so' -o -name '*.o')" ]; then
    echo "the clean checkout has build products"
    return 1
  fi
  version >"$checkout.version"
  echo "clean checkout of $(cat "$checkout.version") in $checkout"
  # Where $python is of a virtual environment itself, --system-site-packages would show the packages of the Python beneath it.
  "$python" -m venv --without-pip "$environment" || return 1
  "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
    >"$(echo "$environment"/lib/python*/site-packages)/packages_of_the_caller.pth"
}

# pip of the virtual environment, as the README's command calls it.
pip() { "$environment/bin/python" -m pip --disable-pip-version-check "$@"; }

has_index() {
  [ -z "${PIP_NO_INDEX:-}" ] &&
    pip install --dry-run --ignore-installed --no-deps --retries 0 --timeout 10 ninja >/dev/null 2>&1
}

install_clean_checkout() {
  local command
  if has_index; then
    command=$(sed -n 's/^\(pip install -e "\.\[test\]"\) && pytest$/\1/p' README.md)
    [ -n "$command" ] || { echo "README.md has no command that installs and runs the tests"; return 1; }
  else
    echo "no package index: without build isolation, without dependencies"
    command="pip install --no-index --no-build-isolation --no-deps -e ."
  fi
  echo "+ $command"
  eval "$command --verbose"
}

is_usable() {
  "$python" - <<'PY'
import sys
from pathlib import Path

import torch
import ssm_kernels

info = ssm_kernels.build_info()
print(info, "from", ssm_kernels.__file__)
assert torch.cuda.is_available(), "PyTorch finds no CUDA GPU"
assert info["cuda"], "ssm_kernels was built without CUDA kernels"
assert Path(ssm_kernels.__file__).is_relative_to(Path.cwd()), "another installation of ssm_kernels is imported"
PY
}

build() {
  "$python" -c 'import torch; assert torch.cuda.is_available(), "PyTorch finds no CUDA GPU"' || return 1
  make_clean_checkout || return 1
  cd "$checkout" && install_clean_checkout || return 1
  python=$environment/bin/python
  is_usable
}

# --carried: uses the library that is there.
complete_carried_build() {
  is_usable && return
  echo "building everything"
  "$python" setup.py build_ext --inplace && is_usable
}

# The cores of this machine; nproc alone counts no more than OMP_NUM_THREADS.
cores() { env -u OMP_NUM_THREADS nproc; }

# Runs a command while CUDA's multi-process service (MPS) lets the kernels of several processes run at once: without it the GPU
# takes turns of milliseconds, and tests take twice as long. Runs it alone where the service does not start.
with_mps() {
  local status=0 folder
  folder=$(mktemp -d)
  if ! command -v nvidia-cuda-mps-control >/dev/null ||
    ! env CUDA_MPS_PIPE_DIRECTORY="$folder" CUDA_MPS_LOG_DIRECTORY="$folder" nvidia-cuda-mps-control -d; then
    echo "without the multi-process service"
    "$@"
    return
  fi
  (export CUDA_MPS_PIPE_DIRECTORY="$folder" CUDA_MPS_LOG_DIRECTORY="$folder" && "$@") || status=$?
  echo quit | env CUDA_MPS_PIPE_DIRECTORY="$folder" timeout 60 nvidia-cuda-mps-control >/dev/null
  rm -rf "$folder"
  return $status
}

# tests <most workers> <expression of marks>
tests() {
  local most=$1 marks=$2 workers threads=${OMP_NUM_THREADS:-} parallel=()
  workers=$(cores)
  workers=${WORKERS:-$((workers < most ? workers : most))}
  if "$python" -c 'import xdist' 2>/dev/null; then
    # Tests that need much of the GPU's memory are one group, which one worker runs.
    parallel=(-n "$workers" --dist loadgroup)
    threads=${threads:-$((($(cores) + workers - 1) / workers))}
  fi
  echo "pytest ${parallel[*]:-, one test at a time}, OMP_NUM_THREADS=${threads:-unset}"
  env ${threads:+OMP_NUM_THREADS="$threads"} "$python" -m pytest -q -p no:cacheprovider --durations 10 -rf "${parallel[@]}" \
    -m "$marks" tests
}

# Each tool on several shares of the cases at once.
# racecheck orders by an mbarrier only what the arriving thread itself has done. In the sequential linear scans one lane arrives
# for its warp, after a __syncwarp(), and racecheck reports what the other lanes wrote; it reports nothing in the same exchange if
# every lane arrives.
sanitizer() {
  local tool status=0 program share shares=$((($(cores) + 3) / 4)) running options
  program=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
  for tool in memcheck racecheck initcheck synccheck; do
    echo "-- $tool"
    options=()
    if [ "$tool" = racecheck ]; then options=(--kernel-name-exclude kernel_substring=linear_scan_sequential); fi
    running=()
    for share in $(seq "$shares"); do
      "$program" --tool "$tool" "${options[@]}" --target-processes all --error-exitcode 1 \
        "$python" -m pytest -q -p no:cacheprovider -m sanitizer --part "$share/$shares" tests/sanitizer >"$out/$tool.$share.log" 2>&1 &
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
  "$python" examples/char_lm.py --device cuda --plot "$out/char_lm.png" || status=1
  return $status
}

benchmarks() {
  local name page start status=0 names=() files=()
  for name in layers selective_scan ssd linear_scan summaries state_update delta_rule delta_rule_layers delta_rule_step mamba3 mamba3_layers mlstm causal_conv1d norms sizes overhead clients distributed; do
    echo "-- $name"
    if [[ " ${BENCHMARKS:-$name} " != *" $name "* ]]; then
      echo "not measured: not among BENCHMARKS"
      continue
    fi
    if [ "$name" = clients ] && ! "$python" -c 'import transformers' 2>/dev/null; then
      echo "not measured: transformers is not installed"
      continue
    fi
    if [ "$name" = distributed ] && ! "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
      echo "not measured: there is one GPU"
      continue
    fi
    rm -f "$out/$name.json"
    start=$SECONDS
    "$python" "benchmarks/bench_$name.py" --json "$out/$name.json" || { status=1; echo "$name failed"; }
    printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
    [ ! -e "$out/$name.json" ] || { names+=("$name"); files+=("$out/$name.json"); }
  done
  [ ${#files[@]} -gt 0 ] || return 1
  page=$("$python" benchmarks/report.py --output "$tree/docs/benchmarks" "${files[@]}") || return 1
  for name in "${names[@]}"; do cp "$out/$name.json" "${page%.md}_$name.json" || return 1; done
  "$python" benchmarks/report.py --output "$tree/docs/benchmarks" "${page%.md}"_*.json || return 1
  cp "$page" "${page%.md}"_*.png "$out/" || status=1
  return $status
}

if $carried; then
  echo "with the library that is carried in this tree: for tuning only"
  export PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
elif [ "${stages[0]}" != build ]; then
  if [ "$(cat "$checkout.version" 2>/dev/null)" != "$(version)" ]; then
    echo "there is no clean checkout of the present sources in $checkout: run the stage build first" >&2
    exit 1
  fi
  cd "$checkout" || exit 1
  python=$environment/bin/python
fi

for stage in "${stages[@]}"; do
  case $stage in
    build) if $carried; then run build complete_carried_build; else run build build; fi ;;
    tests-cpu) run "$stage" tests 64 "not cuda" ;;
    tests-cuda) run "$stage" with_mps tests 16 cuda ;;
    *) run "$stage" "$stage" ;;
  esac
  # Nothing else can succeed without it.
  if [ "$stage" = build ] && [ ${#failed[@]} -gt 0 ]; then break; fi
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]} (logs in $out)"
  exit 1
fi
echo "all ok (logs in $out)"
