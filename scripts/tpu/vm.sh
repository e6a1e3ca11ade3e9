#!/usr/bin/env bash
# Measures a table of the paper, or trains a model, on a Cloud TPU VM, and resumes it when the VM is
# pre-empted.
#   export PROJECT=my-project ZONE=us-central2-b NAME=my-tpu
#   scripts/tpu/vm.sh table 2 --results=gs://bucket/folder --spot --checkpoints=gs://bucket/weights
#   scripts/tpu/vm.sh train --results=gs://bucket/folder --spot --data_dir=gs://bucket/tokenized \
#       --config=configs/training/finetune_ende.gin --init_from=gs://… --vocabulary=gs://…
# table     creates a VM, installs the checked-out commit, measures table 2, 3, 4 or 5 there with any
#           other options of `speculative table`, fetches the results to results/ and deletes the
#           VM. It exits with the program's exit code. Results and compiled programs are copied to
#           the --results folder every 20 seconds (INTERVAL), so a new VM can resume when one is
#           pre-empted or stops answering. A gs://… file or folder in an option is copied to the VM
#           first. Rerun the command to watch a run in progress or to resume one that stopped. With
#           --workers=auto all chips work at once, and on an ACCELERATOR with several hosts each
#           measures its share of the texts
# train     does the same with scripts/train.py and its options: all hosts train one model. In the
#           --results folder, `checkpoints` holds the state to resume from, `work` the log and plot,
#           which are fetched to results/, and `model` the finished model, which is not fetched.
#           --init_from=gs://… is read from its bucket, not copied to the VM. Exit code 75 means
#           that --max_minutes are over; rerun to resume
# create    creates a VM of type ACCELERATOR (v4-8) with the software RUNTIME (tpu-ubuntu2204-base)
# install   copies the checked-out commit, which every record then names, and installs it with the
#           extras tpu and tasks; repeat after every commit
# ssh       runs any command there, in the home folder; without one, opens a shell
# delete    deletes the VM, which is billed until then; gcloud asks first
# --spot    (table, train, create) uses a spot VM, which costs less and may be pre-empted
# --queued  (table, train, create, delete) uses the VM of a queued resource of the same name
# --keep    (table, train) does not delete the VM at the end
# With --dry_run before the verb, the commands are printed, quoted for a shell, and not run; for
# table and train, these are the commands of an undisturbed run.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
ACCELERATOR=${ACCELERATOR:-v4-8} RUNTIME=${RUNTIME:-tpu-ubuntu2204-base} INTERVAL=${INTERVAL:-20}
TRIES=5 # Consecutive failures of a step that end the run, on an existing VM.

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
  table | train | create | install | ssh | delete) shift ;;
  -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *)
    fail "'$VERB' is none of table, train, create, install, ssh and delete; --help explains them."
    ;;
esac

TABLE='' RESULTS='' SPOT='' QUEUED='' KEEP='' OPTIONS=()
for word in "$@"; do
  case "$VERB $word" in
    "ssh "*) ;;
    "table --spot" | "train --spot" | "create --spot") SPOT=1 ;;
    "table --queued" | "train --queued" | "create --queued" | "delete --queued") QUEUED=1 ;;
    "table --keep" | "train --keep") KEEP=1 ;;
    "table --results="* | "train --results="*) RESULTS=${word#*=} RESULTS=${RESULTS%/} ;;
    "table --output_dir="* | "train --work_dir="* | "train --out_dir="* | \
      "train --checkpoint_dir="* | "train --distributed="*)
      fail "'$word' cannot be given, for ${word%%=*} is set on the VM; leave it out."
      ;;
    "table --"*=* | "train --"*=*) OPTIONS+=("$word") ;;
    "table "[!-]*) TABLE+="${TABLE:+ }$word" ;;
    *) fail "'$word' is no option of $VERB; write --name=value, and see --help." ;;
  esac
done
if [[ $VERB == table ]]; then
  [[ $TABLE =~ ^[2-5]$ ]] || fail "'$TABLE' is no table to measure; give 2, 3, 4 or 5."
elif [[ $VERB == train ]]; then
  for word in --config --data_dir; do
    [[ " ${OPTIONS[*]-}" == *" $word="* ]] || fail "train lacks $word; add $word=VALUE."
  done
fi
if [[ $VERB == table || $VERB == train ]]; then
  [[ $RESULTS =~ ^gs://[^/]+/. ]] ||
    fail "'$RESULTS' is no folder of a bucket; give --results=gs://BUCKET/FOLDER."
fi

MISSING=
for setting in PROJECT ZONE NAME; do
  [[ -n ${!setting:-} ]] || MISSING+="${MISSING:+, }$setting"
done
[[ -z $MISSING ]] || fail "$MISSING not set; export PROJECT, ZONE and NAME (of the VM) first."

command -v gcloud >/dev/null || [[ -n $DRY_RUN ]] ||
  fail "gcloud is not installed; get the Google Cloud CLI from https://cloud.google.com/sdk."

# Prints the number of hosts of an accelerator type: each has four chips, or up to eight if it is the
# only one. Prints nothing if there is no such type. v4 and v5p count two cores per chip.
hosts_of() {
  local chips sizes
  [[ $1 =~ ^(v4|v5p|v5litepod|v6e)-([0-9]{1,5})$ ]] || return 0
  chips=${BASH_REMATCH[2]} sizes='4 8 16 32 64 128 256 512 1024 2048'
  case ${BASH_REMATCH[1]} in
    v4 | v5p)
      ((chips % 2 == 0)) || return 0
      chips=$((chips / 2))
      ;;
    *)
      sizes='1 4 8 16 32 64 128 256'
      ((chips > 8)) || chips=$((chips == 8 ? 4 : chips)) # Eight are on one host.
      ;;
  esac
  [[ " $sizes " == *" $chips "* ]] || return 0
  echo $(((chips + 3) / 4))
}

HOSTS=$(hosts_of "$ACCELERATOR")
[[ -n $HOSTS ]] || fail "'$ACCELERATOR' is no accelerator type that this script knows; give \
ACCELERATOR as v4-8, v4-32, v5litepod-4, v5p-8, v6e-8 and the like, in sizes that Cloud TPU has."

# Runs a command, or prints it.
call() {
  local line
  printf -v line '%q ' "$@"
  if [[ -n $DRY_RUN ]]; then printf '%s\n' "${line% }"; else "$@"; fi
}

# Runs a gcloud verb on TPUs in the project and zone. Nobody would answer its questions during table
# and train.
tpus() {
  [[ $VERB != table && $VERB != train ]] || set -- "$@" --quiet
  call gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"
}

create() {
  local software=--version kind=tpu-vm node=
  [[ -z $QUEUED ]] || software=--runtime-version kind=queued-resources node=--node-id=$NAME
  tpus "$kind" create "$NAME" ${node:+"$node"} --accelerator-type="$ACCELERATOR" \
    "$software=$RUNTIME" ${SPOT:+--spot}
}

delete() {
  if [[ -z $QUEUED ]]; then
    tpus tpu-vm delete "$NAME"
  else
    tpus queued-resources delete "$NAME" --force # With its VM.
  fi
}

# Options of a command that runs on all hosts, if there are several.
WORKERS=()
((HOSTS == 1)) || WORKERS=(--worker=all)

# Runs a command on the VM, or on each of its hosts, in the home folder.
remote() {
  tpus tpu-vm ssh "$NAME" ${WORKERS[@]+"${WORKERS[@]}"} --command="$1"
}

# `table` and `train` retry it if it fails, so each of its commands returns on failure.
install() {
  # A bundle carries the commit's name, which a copy of the files would lose.
  local bundle=${TMPDIR:-/tmp}/speculative-$NAME.bundle
  call git -C "$ROOT" bundle create --quiet "$bundle" HEAD || return
  tpus tpu-vm scp "$bundle" "$NAME:speculative.bundle" ${WORKERS[@]+"${WORKERS[@]}"} || return
  call rm "$bundle"
  remote "git init --quiet speculative && cd speculative \
&& git fetch --quiet ../speculative.bundle HEAD && git checkout --quiet --force FETCH_HEAD" ||
    return
  # Ubuntu 22.04 has Python 3.10, which is too old; uv brings a newer one.
  remote "cd speculative && python3 -m pip install --quiet --user uv \
&& python3 -m uv venv --quiet --allow-existing --python=3.12 \
&& python3 -m uv pip install --quiet --constraints=constraints.txt --editable='.[tpu,tasks]'"
}

# Starts measure.sh on the VM. It takes the lock before this returns, so any later check finds it
# running. ssh waits for any process that holds its streams: the job holds none.
start() {
  local work
  printf -v work '%q' "$WORK"
  remote "exec 9>>speculative.job && flock --nonblock 9 && \
printf '%s\n' $work >speculative.job && { \
nohup $JOB >speculative.log 2>&1 </dev/null & }"
}

# Runs a command with its output in NOTES, for `reason`.
quietly() {
  if [[ -n $DRY_RUN ]]; then "$@"; else "$@" >"$NOTES" 2>&1 </dev/null; fi
}

# Prints the error in the output, which may span several lines, as one line; without an error, the
# last line. gcloud's output before it, and after an empty line, is unrelated.
reason() {
  local said
  said=$(awk '/ERROR/ { found = 1 } found && !NF { exit } found' "$NOTES" | tr -s '[:space:]' ' ')
  [[ -n $said ]] || said=$(grep . "$NOTES" | tail -n 1) || true
  printf '%s\n' "${said% }"
}

# Prints the temporary obstacle to a VM that gcloud's message names; nothing if it may be permanent.
# A used-up quota is temporary only if a VM of this run has used it.
passing() {
  says() { grep -qiE "$1" <<<"$WHY"; }
  local WHY=$1
  if says 'rate.?limit|too many requests|per (minute|second)'; then
    echo 'too many requests'
  elif says 'quota'; then
    [[ -z $OWNED ]] || echo 'the quota is in use'
  elif says 'capacity|stockout|resource_(pool_)?exhausted|(enough|available) resources' ||
    says '"code": 8[^0-9]'; then
    echo 'no capacity'
  elif says 'internal:|internal (server )?error|unavailable|deadline|aborted|try again|crashed' ||
    says '"code": (4|10|13|14)[^0-9]'; then
    echo "an error of Google's"
  fi
}

# Prints a message, unless it was also the last one.
say() {
  [[ $1 == "$SAID" ]] || printf '%s  %s\n' "$(date +%H:%M)" "$1"
  SAID=$1
}

# Prints gcloud's state of the VM, NONE if there is no VM, nothing if gcloud does not answer.
state() {
  local found=ACTIVE
  [[ -z $QUEUED ]] || found=$(described queued-resources state.state)
  if [[ $found == ACTIVE ]]; then
    found=$(described tpu-vm state)
    [[ -z $QUEUED || $found != NONE ]] || found=SUSPENDED # The queued resource still exists.
  fi
  printf '%s' "$found"
}

described() {
  if ! tpus "$1" describe "$NAME" --format="value($2)" 2>"$NOTES"; then
    ! reason | grep -qE 'NOT_FOUND|was not found|"code": 5[^0-9]' || echo NONE
  fi
}

# Prints the exit code of the run, which is in the bucket once all its results are; for several
# hosts, the greatest one, once all have one.
ended() {
  local host code most=0
  for ((host = 0; host < HOSTS; host++)); do
    code=$(gcloud storage cat "$FOLDER/$(code_of "$host")" 2>/dev/null | grep .) || return 1
    ((code <= most)) || most=$code
  done
  echo "$most"
}

# Prints the file name of a host's exit code.
code_of() {
  if ((HOSTS == 1)); then echo exit_code; else echo "exit_code.$1"; fi
}

# Removes exit codes of hosts that ended although the run has not.
forget() {
  local host
  for ((host = 0; host < HOSTS; host++)); do
    quietly gcloud storage rm "$FOLDER/$(code_of "$host")" || true
  done
}

# Creates a VM, which may be lost meanwhile.
make() {
  local why what
  say "Requesting the ${SPOT:+spot }VM $NAME ($ACCELERATOR in $ZONE)${QUEUED:+ in the queue}."
  until quietly create; do
    why=$(reason)
    [[ $(state) == NONE ]] || return 0
    what=$(passing "$why")
    [[ -n $what ]] || fail "$NAME cannot be made; gcloud says: $why"
    say "$NAME is not available in $ZONE now ($what); the request is repeated until it is."
    sleep "$INTERVAL"
  done
  NEW=1
}

# Gives up a lost VM, so that a new one will be created.
replace() {
  say "$NAME is lost ($1); a new VM will resume from $FOLDER."
  [[ -n $NEW ]] || FAILURES=0
  NEW=1 STARTED=
  quietly delete || again "$NAME cannot be deleted"
}

# Waits before a failed step is retried on an existing VM; gives up after TRIES failures in a row.
# The count restarts when the run is seen working; after stops of the run itself, when it advances.
again() {
  local why
  why=$(reason)
  FAILURES=$((FAILURES + 1))
  if ((FAILURES >= TRIES)); then
    printf 'error: %s, %s times in a row: %s\n' "$1" "$TRIES" "$why" >&2
    finish 1
  fi
  say "$1${why:+: $why}"
  sleep "$INTERVAL"
}

# Handles a VM that is ready: waits while the run is in progress, else starts it.
attend() {
  local found job
  if ! found=$(remote 'flock -sn speculative.job true || sed "s/^/job: /" speculative.job
tail -n 10 speculative.log 2>/dev/null | sed "s/^/log: /"' 2>"$NOTES" </dev/null); then
    # If this VM was never reached, its replacement would not be either.
    if [[ -z $NEW ]] && ((FAILURES == TRIES - 1)); then
      replace "READY, but it cannot be reached"
    else
      again "$NAME cannot be reached"
    fi
    return
  fi
  NEW=
  job=$(sed -n 's/^job: //p' <<<"$found" | sort -u)
  sed -n 's/^log: //p' <<<"$found" >"$NOTES"
  if [[ $job == "$WORK" ]]; then
    FAILURES=0 STARTED=1
    # The program may write more after this, and so may hosts without a separate log.
    found=$(grep -E '^(Finished|The bucket) ' "$NOTES" | tail -n 1) ||
      found=$(grep . "$NOTES" | tail -n 1) || true
    # Training repeats the steps after its last checkpoint, which is no progress.
    if [[ $found == Finished* && $found != "$PROGRESS" ]] &&
      [[ $(printf '%s\n' "$PROGRESS" "$found" | sort -V | tail -n 1) == "$found" ]]; then
      PROGRESS=$found STOPS=0
    fi
    [[ -z $found ]] || say "$NAME: $found"
    sleep "$INTERVAL"
  elif [[ -n $job ]]; then
    fail "$NAME is busy with other work ($job); wait for its end, or choose another NAME."
  elif [[ -n $STARTED ]]; then
    STARTED=
    if ! ended >/dev/null; then
      FAILURES=$STOPS STOPS=$((STOPS + 1))
      again "The run on $NAME stopped without an exit code"
    fi
  else
    say "$NAME is ready; installing $COMMIT there."
    forget # Hosts that have ended will end again; the run has ended when all have.
    if ! quietly install; then
      again "The installation on $NAME failed"
    elif ! quietly start; then
      again "The run on $NAME could not be started"
    else
      say "The run is under way; its results go to $FOLDER."
      STARTED=1
    fi
  fi
}

# Takes one step towards the end of the run, depending on the VM's state.
advance() {
  local found why what
  found=$(state)
  case $found in
    READY)
      OWNED=1
      attend
      ;;
    NONE) make ;;
    PREEMPTED | TERMINATED | STOPPED | HIDDEN | SUSPENDED | UNKNOWN)
      OWNED=1
      replace "$found"
      ;;
    FAILED)
      why=$(described queued-resources state.failedData.error.message)
      what=$(passing "$why")
      quietly delete || true
      if [[ -n $what ]]; then
        say "$NAME is not available in $ZONE now ($what); the request is repeated until it is."
        sleep "$INTERVAL"
      else
        printf '%s\n' "$why" >"$NOTES"
        again "The request for $NAME failed"
      fi
      ;;
    "") # The run continues without this connection.
      say "gcloud does not report the state of $NAME and is queried again: $(reason)"
      sleep "$INTERVAL"
      ;;
    *)
      say "Waiting for $NAME ($found)."
      sleep "$INTERVAL"
      ;;
  esac
}

# Tells whether the run has failed because its VM is lost.
lost() {
  sleep "$INTERVAL" # The state may lag behind.
  [[ $(state) != READY ]]
}

fetch() {
  call mkdir -p "$ROOT/$FETCHED"
  call gcloud storage rsync --recursive "$FOLDER" "$ROOT/$FETCHED"
}

# Fetches the results, shows the comparison or the error, deletes the VM, exits with a code.
finish() {
  local folder=$FETCHED
  if quietly fetch; then
    say "The results are in $folder."
    if [[ $1 == 0 && $VERB == train ]]; then
      say "The model is in $RESULTS/model."
    elif [[ $1 == 75 ]]; then
      say "The run has stopped at its --max_minutes; rerun the command to resume it."
    elif [[ $1 == 0 && $HOSTS != 1 ]]; then
      say "speculative report $folder merges the results of the $HOSTS hosts."
    elif [[ $1 == 0 ]]; then
      cat "$ROOT/$folder/compared.txt"
    elif [[ -e $ROOT/$folder/log.txt ]]; then
      printf 'error: exit code %s; the end of %s:\n' "$1" "$folder/log.txt" >&2
      tail -n 20 "$ROOT/$folder/log.txt" >&2
    elif ((HOSTS > 1)); then
      printf 'error: exit code %s; see the logs of the hosts, %s/log.*.txt.\n' "$1" "$folder" >&2
    fi
  else
    say "The results stay in $FOLDER, because they could not be fetched: $(reason)"
  fi
  if [[ -n $KEEP ]]; then
    say "$NAME is kept and billed until you delete it: vm.sh delete${QUEUED:+ --queued}."
  elif quietly delete; then
    say "$NAME is deleted."
  else
    say "$NAME could not be deleted and is billed until it is: $(reason)"
  fi
  exit "$1"
}

# Measures a table or trains a model.
launch() {
  local code
  FOLDER=$RESULTS/work FETCHED=results/${RESULTS##*/} COMMIT=$(git -C "$ROOT" describe --always)
  [[ $VERB == train ]] || FOLDER=$RESULTS/table$TABLE FETCHED=results/table$TABLE
  printf -v JOB '%q ' env HOSTS="$HOSTS" \
    speculative/scripts/tpu/measure.sh "$RESULTS" "${TABLE:-train}" \
    ${OPTIONS[@]+"${OPTIONS[@]}"} # Bash 3, as on a Mac, treats an empty list as unset.
  WORK="commit $COMMIT: $JOB" NOTES=$(mktemp)
  # The last message; failures in a row; whether the run has been seen working; how often it has
  # stopped since it made this progress; whether this run has had a VM; whether the current VM is
  # new, that is, has not been reached yet.
  SAID='' FAILURES=0 STARTED='' STOPS=0 PROGRESS='' OWNED='' NEW=''
  trap 'rm -f "$NOTES"' EXIT
  # An earlier run's exit codes must be removed anyway, which shows whether the bucket is writable.
  local host
  for ((host = 0; host < HOSTS; host++)); do
    if ! quietly call gcloud storage cp - "$FOLDER/$(code_of "$host")" ||
      ! quietly call gcloud storage rm "$FOLDER/$(code_of "$host")"; then
      fail "$RESULTS cannot be written ($(reason)); make the bucket or ask its owner for the role \
roles/storage.objectUser."
    fi
  done
  if [[ -n $DRY_RUN ]]; then
    create && install && start && fetch && { [[ -n $KEEP ]] || delete; }
    return
  fi
  trap 'printf "\nA run on %s continues; rerun the command to watch it.\n" "$NAME"; exit 130' INT
  while true; do
    if ! code=$(ended); then
      advance
    elif [[ $code != 0 ]] && lost; then
      forget
    else
      finish "$code"
    fi
  done
}

case $VERB in
  table | train) launch ;;
  create) create ;;
  install) install ;;
  ssh)
    printf -v COMMAND '%q ' "$@"
    if [[ $# == 0 ]]; then tpus tpu-vm ssh "$NAME"; else remote "${COMMAND% }"; fi
    ;;
  delete) delete ;;
esac
