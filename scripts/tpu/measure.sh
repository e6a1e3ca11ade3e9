#!/usr/bin/env bash
# Measures a table, or trains a model, on the machine where it runs, and copies the results to a
# bucket meanwhile.
#   scripts/tpu/measure.sh gs://BUCKET/FOLDER N [--NAME=VALUE, options of `speculative table`]
#   scripts/tpu/measure.sh gs://BUCKET/FOLDER train [--NAME=VALUE, options of scripts/train.py]
# vm.sh starts it on a VM. It resumes from the bucket's contents, compiles the table's programs
# before it measures, and leaves the exit code in the bucket once all results are there. With several
# HOSTS, each measures its share of the texts into separate files, which report merges; training is
# one program on all of them, and only its first process writes a log and the model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RESULTS=$1 RUN=$2 INTERVAL=${INTERVAL:-20}
shift 2
# The folder that is copied to RESULTS, except for files too BIG to be copied with the rest.
KEPT=results FOLDER=$RESULTS/table$RUN BIG='' STAGE=$(mktemp -d)
if [[ $RUN == train ]]; then # A kept VM may have trained something else.
  KEPT=results/${RESULTS#gs://} FOLDER=$RESULTS/work BIG='checkpoints/.*|model/.*'
fi
OUTPUT=$KEPT/${FOLDER##*/}
HOSTS=${HOSTS:-1} HOST=0 LOG=log.txt CODE=exit_code
if ((HOSTS > 1)); then # Host names end in their numbers.
  [[ $(hostname) =~ -w-([0-9]+)$ ]] || { echo "$(hostname) does not end in its number." && exit 2; }
  HOST=${BASH_REMATCH[1]} LOG=log.${BASH_REMATCH[1]}.txt CODE=exit_code.${BASH_REMATCH[1]}
  if [[ $RUN == train ]]; then
    set -- "$@" --distributed=auto
  else
    set -- "$@" "--hosts=$HOST/$HOSTS"
    [[ " $* " == *" --workers="* ]] || set -- "$@" --workers=auto
  fi
fi
trap 'rm -rf "$STAGE"' EXIT
export JAX_COMPILATION_CACHE_DIR=$PWD/$KEPT/compiled

# Copies the files of a folder that another folder lacks or has in an older version: a host without a
# newer log than the one it fetched leaves the first process's log unchanged.
copy() {
  local left_out="exit_code(\.[0-9]+)?|workers\.txt|\.lock[.0-9]*|\.unfinished-.*"
  gcloud storage rsync --recursive --skip-if-dest-has-newer-mtime --no-user-output-enabled \
    --exclude="(.*/)?($left_out${3:+|$3})$" "$1" "$2"
}

# Copies the results and the compiled programs to the bucket. The records go last, from a copy made
# first: whenever the machine is lost, the bucket has all examples of each row that has a record.
upload() {
  mkdir -p "$STAGE/records"
  cp -p "$OUTPUT"/records*.jsonl "$STAGE/records" 2>/dev/null || true
  cp -p ~/speculative.log "$OUTPUT/$LOG"
  copy "$KEPT" "$RESULTS" "records(\.[0-9]+)?\.jsonl${BIG:+|$BIG}" &&
    copy "$STAGE/records" "$FOLDER"
}

# Prints how much has been measured or trained.
finished() {
  local rows=0 examples step
  if [[ $RUN == train ]]; then
    step=$(sed -n '$s/.*"step": \([0-9]*\).*/\1/p' "$OUTPUT/log.jsonl" 2>/dev/null) || true
    echo "Finished steps: ${step:-0}."
    return
  fi
  [[ ! -e $OUTPUT/records.jsonl ]] || rows=$(wc -l <"$OUTPUT/records.jsonl")
  examples=$(find "$OUTPUT" -name 'examples*.jsonl' -exec cat {} + | wc -l)
  echo "Finished rows: $rows; measured examples: $examples."
}

# Prints it if it has changed on this machine.
progress() {
  local now
  now=$(finished)
  [[ $now == "$SAID" ]] || echo "$now"
  SAID=$now
}

measure() {
  if ((HOSTS == 1)); then # A single program would wait for the other hosts' chips.
    echo "Compiling the programs of table $RUN."
    .venv/bin/speculative compile "${COMPILE[@]}" --json >"$STAGE/predicted.jsonl" || return
    mv "$STAGE/predicted.jsonl" "$OUTPUT" || return
  fi
  echo "Measuring table $RUN."
  .venv/bin/speculative table "$RUN" --output_dir="$OUTPUT" "${OPTIONS[@]}" || return
  ((HOSTS == 1)) || return 0
  .venv/bin/python scripts/tpu/compare.py "$OUTPUT" >"$OUTPUT/compared.txt"
}

train() {
  # A model that was not copied is rebuilt from the last checkpoint: only one host would find it and
  # end, while the others continue.
  rm -rf "$KEPT/model" "$KEPT"/.unfinished-*
  echo "Training."
  .venv/bin/python scripts/train.py "${OPTIONS[@]}" --work_dir="$OUTPUT" --out_dir="$KEPT/model" \
    --checkpoint_dir="$RESULTS/checkpoints"
}

# The first thing written shows whether this machine may write there; then the folder exists.
git describe --always | gcloud storage cp - "$FOLDER/commit.txt"
mkdir -p "$OUTPUT"
copy "$RESULTS" "$KEPT" "$BIG"
SAID=$(finished)

# Native checkpoints and texts are read from disk; each process reads its own parts of --init_from
# from the bucket.
OPTIONS=() COMPILE=(--table="$RUN" --topology=present)
for option in "$@"; do
  if [[ $option != --init_from=* && $option =~ ^(.*=)gs://(.*[^/])/?$ ]]; then
    place=inputs/${BASH_REMATCH[2]}
    echo "Copying gs://${BASH_REMATCH[2]}."
    mkdir -p "$(dirname "$place")"
    if [[ $option == --checkpoints=* || $option == --data_dir=* ]]; then
      mkdir -p "$place"
      copy "gs://${BASH_REMATCH[2]}" "$place"
    else
      gcloud storage cp "gs://${BASH_REMATCH[2]}" "$place"
    fi
    option=${BASH_REMATCH[1]}$place
  fi
  OPTIONS+=("$option")
  case ${option%%=*} in
    --family | --checkpoints | --weights | --dtype | --gin | --quantize | --quantize_draft | --mesh | --draft_mesh)
      COMPILE+=("$option") ;;
  esac
done

if [[ $RUN == train ]]; then train & else measure & fi
while sleep "$INTERVAL" && kill -0 $! 2>/dev/null; do
  progress
  upload || echo "The bucket could not be written; retrying."
done
code=0
wait $! || code=$?
# A machine that shuts down ends its programs with TERM: the run resumes elsewhere.
((code != 143)) || exit "$code"
progress
((code != 0)) || BIG='' # The model is finished.
upload || { sleep "$INTERVAL" && upload; }
echo $code | gcloud storage cp - "$FOLDER/$CODE"
