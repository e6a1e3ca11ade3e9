#!/usr/bin/env bash
# Measures a table of the paper, or trains a model, on a Cloud TPU VM, and goes on with it when the
# VM is pre-empted.
#   export PROJECT=my-project ZONE=us-central2-b NAME=my-tpu
#   scripts/tpu/vm.sh table 2 --results=gs://bucket/folder --spot --checkpoints=gs://bucket/weights
#   scripts/tpu/vm.sh train --results=gs://bucket/folder --spot --data_dir=gs://bucket/tokenized \
#       --config=configs/training/finetune_ende.gin --init_from=gs://… --vocabulary=gs://…
# table     makes a VM, installs the commit that is checked out, measures table 2, 3, 4 or 5 there
#           with whatever else `speculative table` takes, fetches the results to results/ and
#           deletes the VM. The exit code is that of the program. Results and compiled programs
#           are copied to the folder of --results every 20 seconds (INTERVAL), so that a new VM
#           goes on when one is pre-empted or no longer answers. A file or folder gs://… of an
#           option is copied to the VM first. The same command again watches a run that is under
#           way, or goes on with one that stopped. With --workers=auto all chips work at once, and
#           on an ACCELERATOR of several hosts each measures its share of the texts
# train     does the same with scripts/train.py and its options: all hosts train one model. In the
#           folder of --results, `checkpoints` holds what a run goes on from, `work` its log and
#           plot, which are fetched to results/, and `model` the model once it is finished, which
#           is not fetched. --init_from=gs://… is read from its bucket, and not copied to the VM.
#           The exit code 75 says that --max_minutes are over; the same command goes on
# create    makes a VM of ACCELERATOR (v4-8) with the software RUNTIME (tpu-ubuntu2204-base)
# install   copies the commit that is checked out, which every record then names, and installs it
#           with the extras tpu and tasks; again after every commit
# ssh       runs any command there, in the home folder; without one, opens a shell
# delete    deletes the VM, which is paid for until then; gcloud asks first
# --spot    of table, train and create: a spot VM, which costs less and may be pre-empted
# --queued  of table, train, create and delete: the VM is that of a queued resource of the same name
# --keep    of table and train: the VM is not deleted at the end
# With --dry_run before the verb, the commands are printed, quoted for a shell, and not run; of
# table and train, those of a run that nothing disturbs.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
ACCELERATOR=${ACCELERATOR:-v4-8} RUNTIME=${RUNTIME:-tpu-ubuntu2204-base} INTERVAL=${INTERVAL:-20}
TRIES=5 # How often in a row a step may fail on a VM that is there.

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

# The hosts of an accelerator type, each with four chips, or up to eight where there is one; nothing
# if there is no such type. v4 and v5p count two cores a chip.
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
      ((chips > 8)) || chips=$((chips == 8 ? 4 : chips)) # Eight are of one host.
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

# A verb of gcloud on TPUs in the project and zone. Nobody is there to answer what table and train
# would ask.
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

# Of a command for all hosts, if there are several.
WORKERS=()
((HOSTS == 1)) || WORKERS=(--worker=all)

# Runs a command on the VM, or on every host of it, in the home folder.
remote() {
  tpus tpu-vm ssh "$NAME" ${WORKERS[@]+"${WORKERS[@]}"} --command="$1"
}

# `table` and `train` try it again if it fails, so every command says whether to go on.
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

# Starts measure.sh on the VM, with the lock taken before this returns: whoever looks finds it under
# way. ssh waits for whatever holds its streams: the job holds none.
start() {
  local work
  printf -v work '%q' "$WORK"
  remote "exec 9>>speculative.job && flock --nonblock 9 && \
printf '%s\n' $work >speculative.job && { \
nohup $JOB >speculative.log 2>&1 </dev/null & }"
}

# Runs a command without its output, of which `reason` tells.
quietly() {
  if [[ -n $DRY_RUN ]]; then "$@"; else "$@" >"$NOTES" 2>&1 </dev/null; fi
}

# The error in the output, which may have several lines, in one; without any, the last line. What
# gcloud says before it, and after an empty line, is of other things.
reason() {
  local said
  said=$(awk '/ERROR/ { found = 1 } found && !NF { exit } found' "$NOTES" | tr -s '[:space:]' ' ')
  [[ -n $said ]] || said=$(grep . "$NOTES" | tail -n 1) || true
  printf '%s\n' "${said% }"
}

# What stands in the way of a VM and will pass, by what gcloud says; nothing if nobody knows that it
# will. A quota that is used up passes only where a VM of this run has had its share.
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

# Says something on the terminal, unless it has just been said.
say() {
  [[ $1 == "$SAID" ]] || printf '%s  %s\n' "$(date +%H:%M)" "$1"
  SAID=$1
}

# The state of the VM as gcloud names it, NONE if there is no VM, nothing if gcloud does not answer.
state() {
  local found=ACTIVE
  [[ -z $QUEUED ]] || found=$(described queued-resources state.state)
  if [[ $found == ACTIVE ]]; then
    found=$(described tpu-vm state)
    [[ -z $QUEUED || $found != NONE ]] || found=SUSPENDED # The queued resource is there yet.
  fi
  printf '%s' "$found"
}

described() {
  if ! tpus "$1" describe "$NAME" --format="value($2)" 2>"$NOTES"; then
    ! reason | grep -qE 'NOT_FOUND|was not found|"code": 5[^0-9]' || echo NONE
  fi
}

# The exit code of the run, which is in the bucket once all its results are; of several hosts the
# greatest, once all have one.
ended() {
  local host code most=0
  for ((host = 0; host < HOSTS; host++)); do
    code=$(gcloud storage cat "$FOLDER/$(code_of "$host")" 2>/dev/null | grep .) || return 1
    ((code <= most)) || most=$code
  done
  echo "$most"
}

# The file of a host's exit code.
code_of() {
  if ((HOSTS == 1)); then echo exit_code; else echo "exit_code.$1"; fi
}

# Removes what hosts have left of an end that was not that of the run.
forget() {
  local host
  for ((host = 0; host < HOSTS; host++)); do
    quietly gcloud storage rm "$FOLDER/$(code_of "$host")" || true
  done
}

# Makes a VM, which may be lost meanwhile.
make() {
  local why what
  say "Asking for the ${SPOT:+spot }VM $NAME ($ACCELERATOR in $ZONE)${QUEUED:+ in the queue}."
  until quietly create; do
    why=$(reason)
    [[ $(state) == NONE ]] || return 0
    what=$(passing "$why")
    [[ -n $what ]] || fail "$NAME cannot be made; gcloud says: $why"
    say "There is no $NAME in $ZONE now ($what); it is asked for until there is."
    sleep "$INTERVAL"
  done
  NEW=1
}

# Gives up a VM that was lost, for which a new one will be made.
replace() {
  say "$NAME is lost ($1); a new VM will go on with $FOLDER."
  [[ -n $NEW ]] || FAILURES=0
  NEW=1 STARTED=
  quietly delete || again "$NAME cannot be deleted"
}

# Tries again later what has failed on a VM that is there; after TRIES times in a row, gives up. A
# run that is seen at work ends the row, but for stops of the run itself, which its progress ends.
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

# What is to be done on a VM that is ready: nothing while the run is under way, or else to start it.
attend() {
  local found job
  if ! found=$(remote 'flock -sn speculative.job true || sed "s/^/job: /" speculative.job
tail -n 10 speculative.log 2>/dev/null | sed "s/^/log: /"' 2>"$NOTES" </dev/null); then
    # One that was never reached would not be after its replacement either.
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
    # The program may write more after this, and so may hosts that have no log of their own.
    found=$(grep -E '^(Finished|The bucket) ' "$NOTES" | tail -n 1) ||
      found=$(grep . "$NOTES" | tail -n 1) || true
    # Training does the steps after its last checkpoint again, which is no progress.
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
    forget # Hosts that have ended do it again, and the run has ended when all have.
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

# One step towards the end of the run, whatever the VM's state.
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
        say "There is no $NAME in $ZONE now ($what); it is asked for until there is."
        sleep "$INTERVAL"
      else
        printf '%s\n' "$why" >"$NOTES"
        again "The request for $NAME failed"
      fi
      ;;
    "") # The run goes on without this connection.
      say "gcloud does not tell the state of $NAME and is asked again: $(reason)"
      sleep "$INTERVAL"
      ;;
    *)
      say "Waiting for $NAME ($found)."
      sleep "$INTERVAL"
      ;;
  esac
}

# Whether the run has failed because its VM is lost.
lost() {
  sleep "$INTERVAL" # The state may lag behind.
  [[ $(state) != READY ]]
}

fetch() {
  call mkdir -p "$ROOT/$FETCHED"
  call gcloud storage rsync --recursive "$FOLDER" "$ROOT/$FETCHED"
}

# Fetches the results, shows the prediction or the error, deletes the VM, ends with an exit code.
finish() {
  local folder=$FETCHED
  if quietly fetch; then
    say "The results are in $folder."
    if [[ $1 == 0 && $VERB == train ]]; then
      say "The model is in $RESULTS/model."
    elif [[ $1 == 75 ]]; then
      say "The run has stopped at its --max_minutes; the same command goes on with it."
    elif [[ $1 == 0 && $HOSTS != 1 ]]; then
      say "speculative report $folder merges what the $HOSTS hosts measured."
    elif [[ $1 == 0 ]]; then
      cat "$ROOT/$folder/compared.txt"
    elif [[ -e $ROOT/$folder/log.txt ]]; then
      printf 'error: exit code %s; the end of %s:\n' "$1" "$folder/log.txt" >&2
      tail -n 20 "$ROOT/$folder/log.txt" >&2
    elif ((HOSTS > 1)); then
      printf 'error: exit code %s; see the logs of the hosts, %s/log.*.txt.\n' "$1" "$folder" >&2
    fi
  else
    say "The results stay in $FOLDER, for they could not be fetched: $(reason)"
  fi
  if [[ -n $KEEP ]]; then
    say "$NAME is kept and paid for until you delete it: vm.sh delete${QUEUED:+ --queued}."
  elif quietly delete; then
    say "$NAME is deleted."
  else
    say "$NAME could not be deleted and is paid for until it is: $(reason)"
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
    ${OPTIONS[@]+"${OPTIONS[@]}"} # For bash 3, which a Mac has, an empty list is not set.
  WORK="commit $COMMIT: $JOB" NOTES=$(mktemp)
  # What was said last; failures in a row; whether the run has been seen at work; how often it has
  # stopped since its progress was this; whether this run has had a VM, and whether the one that is
  # there has been reached.
  SAID='' FAILURES=0 STARTED='' STOPS=0 PROGRESS='' OWNED='' NEW=''
  trap 'rm -f "$NOTES"' EXIT
  # What an earlier run left of its end must go anyway, which shows whether the bucket can be used.
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
  trap 'printf "\nA run on %s goes on; the same command watches it.\n" "$NAME"; exit 130' INT
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
