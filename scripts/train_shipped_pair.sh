#!/usr/bin/env bash
# Trains the bundled pair: the target, the deeper target, then the draft, on the target's outputs.
#   DATA=data/tokenized WORK=work OUT=work/pair scripts/train_shipped_pair.sh
# Every stage resumes where it stopped and is skipped when done. With MINUTES set, a stage that
# runs out of time is saved and the script exits with 75: rerun it to resume.
# It needs no TensorFlow; scripts/export_tokenized.py makes DATA.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
DATA=${DATA:-data/tokenized} WORK=${WORK:-work} OUT=${OUT:-$WORK/pair}
PYTHON=${PYTHON:-python3}

LIMIT=${MINUTES:+--max_minutes="$MINUTES"}

"$PYTHON" scripts/train.py --config=configs/training/target.gin $LIMIT \
  --data_dir="$DATA" --work_dir="$WORK/shallow" --out_dir="$WORK/pair/shallow"

"$PYTHON" scripts/train.py --config=configs/training/target_deeper.gin $LIMIT \
  --init_from="$WORK/pair/shallow" \
  --data_dir="$DATA" --work_dir="$WORK/target" --out_dir="$OUT/target"

distil() {  # Arguments: DIR, the draft to make, and options.
  [ -e "$1" ] || "$PYTHON" -m speculative.cli distil --config=configs/training/draft.gin $LIMIT \
    --target="$OUT/target" --data_dir="$DATA" --output="$@"
}
distil "$WORK/pair/draft_once" --work_dir="$WORK/draft"

# Train once more on the same text, in another order and from a lower peak learning rate.
mkdir -p "$WORK/draft_again"
cp -rn "$WORK/draft/texts" "$WORK/draft_again/"
distil "$OUT/draft" --work_dir="$WORK/draft_again" --init_from="$WORK/pair/draft_once" \
  --gin=loop.TrainConfig.steps=8000 --gin=loop.TrainConfig.learning_rate=0.01 \
  --gin=loop.TrainConfig.seed=1
