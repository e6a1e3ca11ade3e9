#!/usr/bin/env bash
# Trains the shipped pair: the target and its tests, then the text it writes and the draft.
#   DATA=data/tokenized WORK=work OUT=work/pair scripts/train_shipped_pair.sh
# Every stage goes on where it stopped and is skipped when done. With TARGET_MINUTES or
# DRAFT_MINUTES set, a stage that runs out of time is saved and the script exits with 75: the
# same command goes on. TARGET_GIN and DRAFT_GIN hold further flags.
# Needs no TensorFlow; DATA is made by scripts/export_tokenized.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
DATA=${DATA:-data/tokenized} WORK=${WORK:-work} OUT=${OUT:-$WORK/pair}
PYTHON=${PYTHON:-python3}

"$PYTHON" scripts/train.py --config=configs/training/target.gin \
  --data_dir="$DATA" --work_dir="$WORK/target" --out_dir="$OUT/target" \
  ${TARGET_MINUTES:+--max_minutes="$TARGET_MINUTES"} ${TARGET_GIN:-}

"$PYTHON" scripts/distil.py --config=configs/training/draft.gin --target_dir="$OUT/target" \
  --data_dir="$DATA" --work_dir="$WORK/draft" --out_dir="$OUT/draft" \
  ${DRAFT_MINUTES:+--max_minutes="$DRAFT_MINUTES"} ${DRAFT_GIN:-}
