#!/usr/bin/env bash
# Measures a table on the machine where it runs, and keeps its results in a bucket meanwhile.
#   scripts/tpu/measure.sh gs://BUCKET/FOLDER N [--NAME=VALUE, options of `speculative table`]
# vm.sh starts it on a VM. It goes on with what the bucket holds, compiles the table's programs
# before it measures, and leaves the exit code in the bucket once all results are there. Of several
# HOSTS each measures its share of the texts, in files of its own: report merges them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RESULTS=$1 TABLE=$2 INTERVAL=${INTERVAL:-20}
shift 2
FOLDER=$RESULTS/table$TABLE OUTPUT=results/table$TABLE STAGE=$(mktemp -d)
HOSTS=${HOSTS:-1} HOST=0 LOG=log.txt CODE=exit_code
if ((HOSTS > 1)); then # Their names end in their numbers.
  [[ $(hostname) =~ -w-([0-9]+)$ ]] || { echo "$(hostname) does not end in its number." && exit 2; }
  HOST=${BASH_REMATCH[1]} LOG=log.${BASH_REMATCH[1]}.txt CODE=exit_code.${BASH_REMATCH[1]}
  set -- "$@" "--hosts=$HOST/$HOSTS"
  [[ " $* " == *" --workers="* ]] || set -- "$@" --workers=auto
fi
trap 'rm -rf "$STAGE"' EXIT
export JAX_COMPILATION_CACHE_DIR=$PWD/results/compiled

# Copies the files of a folder that another folder lacks, or of which it has an older version.
copy() {
  gcloud storage rsync --recursive --skip-if-dest-has-newer-mtime --no-user-output-enabled \
    --exclude="(.*/)?(exit_code(\.[0-9]+)?|workers\.txt|\.lock[.0-9]*|\.unfinished-.*${3:+|$3})$" "$1" "$2"
}

# Copies the results and the compiled programs to the bucket. The records go last, and as they were
# before: whenever the machine is lost, the bucket has all examples of a row that has a record.
upload() {
  mkdir -p "$STAGE/records"
  cp -p "$OUTPUT"/records*.jsonl "$STAGE/records" 2>/dev/null || true
  cp -p ~/speculative.log "$OUTPUT/$LOG"
  copy results "$RESULTS" 'records(\.[0-9]+)?\.jsonl' && copy "$STAGE/records" "$FOLDER"
}

# Says what has been measured, where that has changed.
progress() {
  local rows=0 examples
  [[ ! -e $OUTPUT/records.jsonl ]] || rows=$(wc -l <"$OUTPUT/records.jsonl")
  examples=$(find "$OUTPUT" -name 'examples*.jsonl' -exec cat {} + | wc -l)
  [[ $rows/$examples == "${SAID:-0/0}" ]] ||
    echo "Finished rows: $rows; measured examples: $examples."
  SAID=$rows/$examples
}

measure() {
  if ((HOSTS == 1)); then # A program alone would wait for the other hosts' chips.
    echo "Compiling the programs of table $TABLE."
    .venv/bin/speculative compile "${COMPILE[@]}" --json >"$STAGE/predicted.jsonl" || return
    mv "$STAGE/predicted.jsonl" "$OUTPUT" || return
  fi
  echo "Measuring table $TABLE."
  .venv/bin/speculative table "$TABLE" --output_dir="$OUTPUT" "${MEASURE[@]}" || return
  ((HOSTS == 1)) || return 0
  .venv/bin/python scripts/tpu/compare.py "$OUTPUT" >"$OUTPUT/compared.txt"
}

# The first thing written shows whether this machine may write there; then the folder exists.
git describe --always | gcloud storage cp - "$FOLDER/commit.txt"
mkdir -p "$OUTPUT"
copy "$RESULTS" results

# Checkpoints of our own format, and texts, are read from a disk.
MEASURE=() COMPILE=(--table="$TABLE" --topology=present)
for option in "$@"; do
  if [[ $option =~ ^(.*=)gs://(.*[^/])/?$ ]]; then
    place=inputs/${BASH_REMATCH[2]}
    echo "Copying gs://${BASH_REMATCH[2]}."
    mkdir -p "$(dirname "$place")"
    if [[ $option == --checkpoints=* ]]; then
      mkdir -p "$place"
      copy "gs://${BASH_REMATCH[2]}" "$place"
    else
      gcloud storage cp "gs://${BASH_REMATCH[2]}" "$place"
    fi
    option=${BASH_REMATCH[1]}$place
  fi
  MEASURE+=("$option")
  case ${option%%=*} in
    --family | --checkpoints | --weights | --dtype | --gin | --quantize | --quantize_draft | --mesh | --draft_mesh)
      COMPILE+=("$option") ;;
  esac
done

measure &
while sleep "$INTERVAL" && kill -0 $! 2>/dev/null; do
  progress
  upload || echo "The bucket could not be written; it is tried again."
done
code=0
wait $! || code=$?
# A machine that is switched off ends its programs by TERM: the run goes on elsewhere.
((code != 143)) || exit "$code"
progress
upload || { sleep "$INTERVAL" && upload; }
echo $code | gcloud storage cp - "$FOLDER/$CODE"
