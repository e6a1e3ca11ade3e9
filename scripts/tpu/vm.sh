#!/usr/bin/env bash
# A table of the paper on a Cloud TPU VM: makes the VM, installs this checkout, measures, fetches.
#   export PROJECT=my-project ZONE=us-central2-b NAME=my-tpu
#   scripts/tpu/vm.sh create
#   scripts/tpu/vm.sh install
#   scripts/tpu/vm.sh ssh gcloud storage cp \
#       gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model speculative
#   scripts/tpu/vm.sh run 2 --checkpoints=gs://bucket/folder --vocabulary=sentencepiece.model
#   scripts/tpu/vm.sh ssh tail -f speculative/results/table2/log.txt
#   scripts/tpu/vm.sh fetch 2
#   scripts/tpu/vm.sh delete
# create   a VM of ACCELERATOR (v4-8) with the software RUNTIME (tpu-ubuntu2204-base)
# install  copies the commit that is checked out, which every record then names, and installs it
#          with the extras tpu and tasks; again after every commit
# ssh      runs any command there, in the home folder; without one, opens a shell
# run      measures table 2, 3, 4 or 5 with whatever else `speculative table` takes, in the
#          background: the connection may break. The log's last line is the exit code; the same
#          command goes on where a run stopped
# fetch    copies a table's results to results/
# delete   deletes the VM, which is paid for until then; gcloud asks first
# With --dry_run before the verb, the commands are printed, quoted for a shell, and not run.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

DRY_RUN=
if [[ ${1:-} == --dry_run ]]; then
  DRY_RUN=1
  shift
fi
VERB=${1:-}
case $VERB in
  create | install | ssh | run | fetch | delete) shift ;;
  -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *) fail "'$VERB' is none of create, install, ssh, run, fetch and delete; --help explains them." ;;
esac

MISSING=
for setting in PROJECT ZONE NAME; do
  [[ -n ${!setting:-} ]] || MISSING+="${MISSING:+, }$setting"
done
[[ -z $MISSING ]] || fail "$MISSING not set; export PROJECT, ZONE and NAME (of the VM) first."

command -v gcloud >/dev/null || [[ -n $DRY_RUN ]] ||
  fail "gcloud is not installed; get the Google Cloud CLI from https://cloud.google.com/sdk."

# Runs a command, or prints it.
call() {
  local line
  printf -v line '%q ' "$@"
  if [[ -n $DRY_RUN ]]; then printf '%s\n' "${line% }"; else "$@"; fi
}

# A verb of gcloud on the VM's project and zone.
tpu() {
  call gcloud compute tpus tpu-vm "$@" --project="$PROJECT" --zone="$ZONE"
}

# The table that was asked for, checked here because it will be used in the background.
table() {
  [[ ${1:-} =~ ^[2-5]$ ]] || fail "'${1:-}' is no table to $VERB; give 2, 3, 4 or 5."
  printf '%s' "$1"
}

case $VERB in
  create)
    tpu create "$NAME" --accelerator-type="${ACCELERATOR:-v4-8}" \
      --version="${RUNTIME:-tpu-ubuntu2204-base}"
    ;;
  install)
    # A bundle carries the commit's name, which a copy of the files would lose.
    BUNDLE=${TMPDIR:-/tmp}/speculative-$NAME.bundle
    call git -C "$ROOT" bundle create --quiet "$BUNDLE" HEAD
    tpu scp "$BUNDLE" "$NAME:speculative.bundle"
    call rm "$BUNDLE"
    tpu ssh "$NAME" --command="git init --quiet speculative && cd speculative \
&& git fetch --quiet ../speculative.bundle HEAD && git checkout --quiet --force FETCH_HEAD"
    # Ubuntu 22.04 has Python 3.10, which is too old; uv brings a newer one.
    tpu ssh "$NAME" --command="cd speculative && python3 -m pip install --quiet --user uv \
&& python3 -m uv venv --quiet --allow-existing --python=3.12 \
&& python3 -m uv pip install --quiet --constraints=constraints.txt --editable='.[tpu,tasks]'"
    ;;
  ssh)
    printf -v COMMAND '%q ' "$@"
    if [[ $# == 0 ]]; then tpu ssh "$NAME"; else tpu ssh "$NAME" --command="${COMMAND% }"; fi
    ;;
  run)
    TABLE=$(table "$@")
    shift
    OUTPUT=results/table$TABLE
    printf -v MEASURE '%q ' .venv/bin/speculative table "$TABLE" --output_dir="$OUTPUT" "$@"
    # shellcheck disable=SC2016  # It is the VM's shell that knows the exit code.
    printf -v JOB '%q' "$MEASURE"'; echo "exit code $?"'
    # ssh waits for whatever holds its streams: the job holds none.
    tpu ssh "$NAME" --command="cd speculative && mkdir -p $OUTPUT || exit; \
nohup bash -c $JOB >>$OUTPUT/log.txt 2>&1 </dev/null &"
    ;;
  fetch)
    TABLE=$(table "$@")
    call mkdir -p "$ROOT/results"
    tpu scp --recurse "$NAME:speculative/results/table$TABLE" "$ROOT/results"
    ;;
  delete)
    tpu delete "$NAME"
    ;;
esac
