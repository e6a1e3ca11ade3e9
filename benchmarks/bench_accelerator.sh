#!/bin/sh
# How fast one accelerator decodes with T5 v1.1 XXL and the paper's drafts, weights being random:
# steps beside the memory's bandwidth, v, c, and the 12 rows of Table 2 with the paper's own
# acceptance simulated. Needs no checkpoint and no data; 32 GiB of memory, and half an hour.
#
#   sh benchmarks/bench_accelerator.sh                    # writes results/<device>/
#   sh benchmarks/bench_accelerator.sh --limit=20         # options of `speculative table 2`
#
# On a CPU, at small sizes:
#   TARGET=t5_1_1_small DRAFTS=t5_1_1_small DTYPE=float32 sh benchmarks/bench_accelerator.sh \
#     --limit=2 --gin "RowConfig.draft = 't5_1_1_small'"
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
target=${TARGET:-t5_1_1_xxl}
drafts=${DRAFTS:-t5_1_1_small t5_1_1_base t5_1_1_large}
dtype=${DTYPE:-bfloat16}
platform=$($python -c 'import jax; print(jax.default_backend())')
device=$($python -c 'import jax; print(jax.devices()[0].device_kind.replace(" ", "_"))')
out=${OUT:-results/$device}

bench() { # the draft, the folder
  $python -m speculative.cli bench --target="$target" --draft="$1" --weights=random \
    --dtype="$dtype" --source_length=128 --max_length=256 --output_dir="$2"
}

for draft in $drafts; do bench "$draft" "$out/bench_$draft"; done
if [ "$platform" = gpu ]; then
  # Whole loops as one graph, so that the host does not look at every step: worth it, or not?
  buffers=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE
  first=${drafts%% *}
  (
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=$buffers"
    bench "$first" "$out/bench_${first}_command_buffers"
  ) || echo "command buffers: failed"
fi
$python -m speculative.cli table 2 --weights=random --simulated_alpha=paper --dtype="$dtype" \
  --gin "RowConfig.target = '$target'" --limit=16 --output_dir="$out/table2" "$@"
$python -m speculative.cli figure 4 --records="$out/table2/records.jsonl" \
  --output="$out/figure_4.png"
echo "Everything is in $out."
