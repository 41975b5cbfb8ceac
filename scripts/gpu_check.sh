#!/usr/bin/env bash
# Everything that wants a GPU, in one command of under 8 minutes on one H200: the gpu-marked tests, then the benchmarks
# on random weights of the paper's shapes (nothing is downloaded). Not run on a GPU yet.
#
#   bash scripts/gpu_check.sh [folder]        default: $OUT, else ./gpu_results
#
# Leaves gpu_check.md (all tables), gpu_check.tar.gz (JSON, Markdown and plots) and gpu_check.log there. Every step has
# a time limit; a step that fails is named at the end and does not stop the others. PYTHON=… picks the interpreter.
set -uo pipefail
here=$(pwd)
cd "$(dirname "$0")/.."
out=${1:-${OUT:-gpu_results}}
[[ $out = /* ]] || out=$here/$out
python=${PYTHON:-python3}
[[ -z ${PYTHON:-} && -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$out/gpu_check.log
: > "$log"
failed=()

step() { # seconds, name, command …
  local limit=$1 name=$2
  shift 2
  echo "== $name (at most $limit s)" | tee -a "$log"
  timeout "$limit" "$@" 2>&1 | tee -a "$log"
  local status=${PIPESTATUS[0]}
  # pytest says 5 where it found no test of the mark
  [[ $status -eq 0 || ($status -eq 5 && $name = *tests) ]] || failed+=("$name")
}

device=${DEVICE:-cuda}
if [[ $device = cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: no CUDA device is available to $python: run this on a machine with a GPU." >&2
  exit 2
fi
shapes=${SHAPES:-llama-3.2-3b,llama-3.1-8b}
target=${TARGET:-llama-3.1-8b}
prefixes=${PREFIXES:-8K,32K}
# 141 GB of weights: all 80 layers where they fit with caches beside them, else half of them
large=${LARGE:-$("$python" -c 'import torch; print("llama-3.1-70b" + "@40" * (torch.cuda.mem_get_info()[1] < 180e9))')}
common=(--device "$device" --dtype bfloat16 --out "$work")

step 90 "gpu-marked tests" "$python" -m pytest -q -m gpu tests
step 110 "prefill" "$python" scripts/bench_prefill.py "${common[@]}" --shapes "$shapes" --target "$target" \
  --prefixes "$prefixes" --repeats 3
step 110 "decoding" "$python" scripts/bench_decode.py "${common[@]}" --shapes "$shapes" --target "$target" \
  --prefixes "${STEPS:-1K,8K,32K}" --repeats 5 --acceptance 2.5,4
step 70 "memory" "$python" scripts/bench_memory.py "${common[@]}" --shapes "$shapes" --target "$target" \
  --prefixes "$prefixes" --repeats 3
mkdir -p "$work/large"
step 80 "decoding, large target" "$python" scripts/bench_decode.py "${common[@]}" --out "$work/large" \
  --shapes "${shapes##*,}" --target "$large" --prefixes "$prefixes" --repeats 3 --acceptance 2.5

find "$work" -name '*.md' | sort | xargs -r cat > "$out/gpu_check.md"
tar -czf "$out/gpu_check.tar.gz" -C "$work" .
echo "results: $out" | tee -a "$log"
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'gpu_check: failed or out of time: %s\n' "${failed[@]}" | tee -a "$log" >&2
  exit 1
fi
