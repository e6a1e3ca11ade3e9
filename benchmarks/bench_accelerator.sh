#!/bin/sh
# Measures one accelerator with T5 v1.1 XXL and the paper's small draft, with random weights, within
# eight minutes, the most telling first: passes of 1 to 64 positions compared with the memory's
# bandwidth, v and c; rows of Table 2 with the paper's acceptance simulated, one of them with a target
# in int8, one with a tree of guesses and one with coupled verification; transformers on the same
# shapes (needs torch and transformers; not on a TPU); SmolLM2-135M, a model too small to wait for
# memory; on a GPU, command buffers. Needs no checkpoint and no data. Parts for which no time is left
# are named; finished parts are on disk.
#
#   sh benchmarks/bench_accelerator.sh                    # writes results/<device>/
#
# On a CPU, at small sizes, and without a limit:
#   TARGET=t5_1_1_small DTYPE=float32 SECONDS_IN_ALL=9999 sh benchmarks/bench_accelerator.sh
#
# c of a larger draft: DRAFT=t5_1_1_base or t5_1_1_large. All 12 rows:
# `speculative table 2 --weights=random --simulated_alpha=paper`.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
target=${TARGET:-t5_1_1_xxl}
draft=${DRAFT:-t5_1_1_small}
dtype=${DTYPE:-bfloat16}
platform=$($python -c 'import jax; print(jax.default_backend())') || exit
device=$($python -c 'import jax; print(jax.devices()[0].device_kind.replace(" ", "_"))') || exit
out=${OUT:-results/$device}
ends=$(($(date +%s) + ${SECONDS_IN_ALL:-480})) failed=
mkdir -p "$out"
# What one step compiled, or a GPU's compiler tried, serves the next.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$out/programs}"

measure() { # a name, a module and its options: a failure does not end the others
  name=$1 began=$(date +%s) ended=done
  shift
  left=$((ends - began))
  if [ "$left" -lt 20 ]; then
    failed="$failed $name"
    echo "$name: left out, for the time is over"
    return
  fi
  timeout -k 5 "$left" $python -m "$@" > "$out/$name.log" 2>&1 ||
    ended=failed failed="$failed $name"
  tail -n 30 "$out/$name.log"
  echo "$name: $ended after $(($(date +%s) - began)) s"
}
bench() { # a name, target, draft, widths
  name=$1 models="--target=$2 --draft=$3"
  shift 3
  measure "$name" speculative.cli bench $models --weights=random --dtype="$dtype" \
    --source_length=128 --max_length=256 --output_dir="$out/$name" --widths "$@"
}
transformers() { # a name, target, draft
  [ "$platform" = tpu ] || measure "$1" benchmarks.time_transformers --target="$2" --draft="$3" --dtype="$dtype" \
    --output="$out/$1.json"
}
row() { # a name, a row of Table 2, options
  name=$1 config=$2
  shift 2
  measure "$name" speculative.cli run --gin_file="configs/runs/table2/$config.gin" \
    --target="$target" --draft="$draft" --weights=random --simulated_alpha=paper --dtype="$dtype" \
    --limit=2 --output_dir="$out/$name" "$@"
}

bench "bench_$draft" "$target" "$draft" 1 8 16 32 64
row ende ende_small_t0
transformers transformers "$target" "$draft"
row ende_int8 ende_small_t0 --quantize=int8
row ende_tree ende_small_t0 --tree=15
bench smollm2 smollm2_135m copy 1 8 64
transformers transformers_smollm2 smollm2_135m none
row ende_coupled ende_small_t1 --verification=coupled --tree=15
row cnndm cnndm_small_t0
if [ "$platform" = gpu ]; then
  # Whole loops as one graph, so that the host does not look at every step; then no graphs at all.
  buffers=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE
  given=${XLA_FLAGS:-}
  export XLA_FLAGS="$given --xla_gpu_enable_command_buffer=$buffers"
  bench loops_as_graphs "$target" "$draft" 1 8
  export XLA_FLAGS="$given --xla_gpu_enable_command_buffer="
  bench no_graphs "$target" "$draft" 1 8
  export XLA_FLAGS="$given"
fi
echo "Everything is in $out.${failed:+ Failed or left out:$failed.}"
[ -z "$failed" ]
