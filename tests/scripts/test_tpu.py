"""The launcher of TPU VMs: what it would run, and what that does where gcloud is a stand-in."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "tpu"
SCRIPT = SCRIPTS / "vm.sh"
SETTINGS = {"PROJECT": "my project", "ZONE": "us-central2-b", "NAME": "my 'tpu'"}
VM = ["--project=my project", "--zone=us-central2-b"]
QUIET = ["--quiet", *VM]
TPU = ["gcloud", "compute", "tpus", "tpu-vm"]
QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
RESULTS = "gs://my-bucket/some folder"
TABLE = ("table", "2", f"--results={RESULTS}")
GIN = """--gin=registry.named.size = "a 'b' $HOME" """
TRAIN = ("train", f"--results={RESULTS}", "--config=a.gin", "--data_dir=gs://my-bucket/texts", GIN)

# Stands in for Google Cloud. In the folder $WORLD, `vm` and `queue` hold states; the VM is the
# folder `home` and the processes of `sessions`, a bucket a folder of `bucket`. The lines of
# `disturbance` say what happens, one after the other. It is as strict as gcloud is in what follows,
# where an easier one would pass what fails there:
# - an error has several lines, JSON or text with a code; notes with the words of other errors stand
#   before it and an advertisement after it, and all of it is on standard error;
# - flags and verbs that gcloud does not have, flags without their value, and a missing project or
#   zone are refused, and so is a second VM of a name;
# - a VM that is gone may be READY for good, and its ssh then fails as ssh does;
# - quota stays in use for a while after a VM is gone; a queued request may fail for that, too;
# - a bucket's folder without files does not exist; what is not there is not read or removed.
# It is kinder in this: it answers at once, asks nothing, its ssh and rsync never hang, a VM has one
# host, and permissions are those of a whole bucket.
GCLOUD = r"""#!/usr/bin/env bash
set -euo pipefail
echo "$*" >>"$WORLD/calls"
verb=$1.$2
[[ $1 != compute ]] || verb+=.$3.${4:-}
tell() {
  echo "WARNING: The default quota project was not found; its capacity is unavailable." >&2
  printf 'ERROR: (gcloud.%s) %s\n\n' "$verb" "$1" >&2
  echo "Updates are available for some Google Cloud CLI components. Try again after an ERROR." >&2
}
error() { tell "$1"; exit 1; }
json() { error "$(printf '{\n  "code": %s,\n  "message": "%s"\n}' "$1" "$2")"; }
refuse() { tell "unrecognized arguments:"$'\n'"  $1"; exit 2; }
case $verb in
  compute.tpus.tpu-vm.create) flags="--accelerator-type= --version= --spot" ;;
  compute.tpus.queued-resources.create)
    flags="--node-id= --accelerator-type= --runtime-version= --spot" ;;
  compute.tpus.*.describe) flags="--format=" ;;
  compute.tpus.tpu-vm.delete | compute.tpus.tpu-vm.scp) flags="" ;;
  compute.tpus.queued-resources.delete) flags="--force" ;;
  compute.tpus.tpu-vm.ssh) flags="--command=" ;;
  storage.cat | storage.rm | storage.cp) flags="" ;;
  storage.rsync)
    flags="--recursive --skip-if-dest-has-newer-mtime --no-user-output-enabled --exclude=" ;;
  *) refuse "$verb" ;;
esac
if [[ $1 == compute ]]; then
  flags+=" --project= --zone= --quiet"
  for flag in --project= --zone=; do
    [[ " $* " == *" $flag"[!\ ]* ]] || error "The required property [$flag] is not set."
  done
fi
for argument; do
  case $argument in
    --*=?*) [[ " $flags " == *" ${argument%%=*}= "* ]] || refuse "$argument" ;;
    -?*) [[ " $flags " == *" $argument "* ]] || refuse "$argument" ;;
  esac
done
place() { if [[ $1 == gs://* ]]; then echo "$WORLD/bucket/${1#gs://}"; else realpath -m "$1"; fi; }
needs() {
  [[ $1 != gs://* || -d $WORLD/bucket/$(cut -d / -f 3 <<<"$1") ]] || error "$1 not found: 404."
  [[ $1 != gs://* || -z ${ON_VM:-} || ! -e $WORLD/closed ]] || error "HTTPError 403: $1 denied."
}
missing() {
  error "NOT_FOUND: Resource 'projects/p/locations/z/$1' was not found.
- '@type': type.googleapis.com/google.rpc.ResourceInfo"
}
boot() { mkdir "$WORLD/home" && echo READY >"$WORLD/vm"; }
over="Quota limit 'TPUV4sPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8 in zone"
case $verb in
  *.create)
    echo "Create request issued for: [$5]" >&2
    [[ ! -e $WORLD/vm && ! -e $WORLD/queue ]] || json 6 "ALREADY_EXISTS: $5 exists"
    if happens capacity; then
      json 8 'There is no more capacity in the zone \"us-central2-b\"; you can try elsewhere.'
    fi
    if happens quota; then json 8 "$over us-central2-b."; fi
    if happens reservation; then
      error "Reservation r does not have enough resources available to fulfil the request."
    fi
    if happens internal; then json 13 "an internal error has occurred"; fi
    if happens rate; then
      error "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Requests' and limit 'Requests per
minute' of service 'tpu.googleapis.com'."
    fi
    if happens refusal; then json 7 "Cloud TPU API has not been used in this project before"; fi
    if [[ $verb == *.queued-resources.* ]]; then
      echo WAITING_FOR_RESOURCES >"$WORLD/queue"
      exit
    fi
    boot
    if happens creation; then preempt; error "The VM was pre-empted."; fi
    ;;
  *.queued-resources.describe)
    if [[ " $* " == *failedData* ]]; then cat "$WORLD/failure of the request"; exit; fi
    cat "$WORLD/queue" 2>/dev/null || missing queuedResources
    if [[ $(<"$WORLD/queue") == WAITING* ]]; then
      if happens creation; then
        echo SUSPENDED >"$WORLD/queue"
      elif happens failed-quota; then
        echo "$over us-central2-b." >"$WORLD/failure of the request"
        echo FAILED >"$WORLD/queue"
      elif happens failed; then
        echo "The accelerator type v4-8 is not supported." >"$WORLD/failure of the request"
        echo FAILED >"$WORLD/queue"
      else
        boot && echo ACTIVE >"$WORLD/queue"
      fi
    fi
    ;;
  *.tpu-vm.describe)
    if happens silence; then error "The network is down."; fi
    # The VM of a run that has failed is found lost at the next look.
    if [[ -s $WORLD/bucket/my-bucket/some\ folder/table2/exit_code ]] && happens loss; then
      rm "$WORLD/failure"
      preempt
    fi
    cat "$WORLD/vm" 2>/dev/null || missing nodes
    ;;
  *.delete)
    [[ -e $WORLD/vm || -e $WORLD/queue ]] || missing nodes
    preempt
    rm -f "$WORLD/vm" "$WORLD/queue" "$WORLD/gone"
    [[ ! -e $WORLD/home ]] || mv "$WORLD/home" "$WORLD/gone.$$"
    ;;
  *.ssh | *.scp)
    echo "Using ssh batch size of 1. Attempting to SSH into 1 nodes with a total of 1 workers." >&2
    [[ -e $WORLD/vm ]] || missing nodes
    if [[ $(<"$WORLD/vm") != READY || -e $WORLD/gone ]]; then
      echo "ssh: connect to host 10.0.0.2 port 22: Connection timed out" >&2
      error "[/usr/bin/ssh] exited with return code [255]."
    fi
    [[ $4 != scp ]] || exec cp "$5" "$WORLD/home/${6#*:}"
    for argument; do
      [[ $argument != --command=* ]] || setsid --wait bash -c '
        touch "$WORLD/sessions/$$" && export ON_VM=1 HOME=$WORLD/home && cd && exec bash -c "$0"
      ' "${argument#*=}"
    done
    # A run that cannot write ends at once: before anybody looks.
    [[ ! -e $WORLD/closed ]] || flock "$WORLD/home/speculative.job" true
    ;;
  storage.cat | storage.rm)
    needs "$3"
    [[ -f $(place "$3") ]] || error "The following URLs matched no objects or files: $3"
    "$2" "$(place "$3")"
    ;;
  storage.cp)
    needs "$3" && needs "$4"
    to=$(place "$4")
    mkdir -p "$(dirname "$to")"
    if [[ $3 == - ]]; then cat >"$to"; else cp "$(place "$3")" "$to"; fi
    ;;
  storage.rsync)
    exclude='^$'
    for argument; do
      [[ $argument != --exclude=* ]] || exclude="^${argument#*=}"
    done
    needs "${@: -2:1}" && needs "${@: -1}"
    from=$(place "${@: -2:1}") to=$(place "${@: -1}")
    [[ -d $from ]] || error "source URL $from does not match an existing directory or bucket."
    [[ $to == "$WORLD"/bucket/* || -d $to ]] || error "destination $to is no existing directory."
    cd "$from"
    find . -type f -printf '%P\n' | sort | while IFS= read -r file; do
      [[ ! $file =~ $exclude && ! $to/$file -nt $file ]] || continue
      # Of two versions as old as each other to the clock's tick, contents tell.
      ! cmp -s "$file" "$to/$file" || continue
      mkdir -p "$(dirname "$to/$file")" && cp -p "$file" "$WORLD/part.$$" &&
        mv "$WORLD/part.$$" "$to/$file"
      if [[ -n ${ON_VM:-} && $to == "$WORLD"/bucket/* && $file == */examples.jsonl ]] &&
        [[ -s $to/$file ]] && happens upload; then preempt; fi
    done
    ;;
esac
"""

# Whether something that is asked for happens now.
HAPPENS = r"""#!/usr/bin/env bash
[[ $(head -n 1 "$WORLD/disturbance" 2>/dev/null) == "$1" ]] && sed -i 1d "$WORLD/disturbance"
"""

# Takes the VM away: all its processes end, last of all the one that asked for it. What the bucket
# holds then is copied to `kept`.
PREEMPT = r"""#!/usr/bin/env bash
[[ -e $WORLD/kept ]] || cp -r "$WORLD/bucket" "$WORLD/kept"
[[ ! -e $WORLD/vm ]] || echo PREEMPTED >"$WORLD/vm"
[[ ! -e $WORLD/queue ]] || echo SUSPENDED >"$WORLD/queue"
read -r _ _ _ _ mine _ </proc/self/stat
for session in "$WORLD"/sessions/*; do
  session=${session##*/}
  [[ $session == "$mine" ]] || kill -KILL -- "-$session" 2>/dev/null
done
[[ ! -e $WORLD/sessions/$mine ]] || kill -KILL -- "-$mine"
exit 0
"""

# The VM's own python3: its last call installs the program, where the VM may be lost. It does what
# pip and uv would, in the order in which they need each other, and nothing else.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  "-m pip install --quiet --user uv") touch ~/.uv ;;
  "-m uv venv --quiet --allow-existing --python=3.12") [[ -e ~/.uv ]] && mkdir -p .venv/bin ;;
  "-m uv pip install --quiet --constraints=constraints.txt --editable=.[tpu,tasks]")
    [[ -e ~/.uv && -d .venv ]] || exit 1
    ! happens installation || preempt
    cp "$WORLD/programs/measure" .venv/bin/speculative
    ln -sf "$WORLD/programs/python" .venv/bin/python
    ;;
  *) echo "python3: no such command: $*" >&2 && exit 2 ;;
esac
"""

# Stands in for the package's commands: a table of two rows of three examples, of which a row keeps
# those that it has; each program that is compiled and each example that is measured is told.
MEASURE = r"""#!/usr/bin/env bash
set -euo pipefail
printf '<%s>' "$@" >>"$WORLD/programs/said"
echo >>"$WORLD/programs/said"
if [[ $1 == compile ]]; then
  mkdir -p "$JAX_COMPILATION_CACHE_DIR"
  [[ -e $JAX_COMPILATION_CACHE_DIR/program ]] || echo compiled >>"$WORLD/told"
  echo x >"$JAX_COMPILATION_CACHE_DIR/program"
  for draft in a b; do
    echo "{\"target\": \"t\", \"draft\": \"$draft\", \"gamma\": 5, \"ms_target_step\": 20.0}"
  done
  exit
fi
if [[ -e $WORLD/failure ]]; then
  echo "error: a sentence." >&2
  exit 2
fi
out=results/table2
for row in a b; do
  while [[ $row == b && -e $WORLD/hold ]]; do sleep 0.02; done
  kept=$out/rows/table2/$row/examples.jsonl
  mkdir -p "$(dirname "$kept")"
  for number in 1 2 3; do
    ! grep -qs "$number" "$kept" || continue
    if [[ $row$number == b3 && -e $WORLD/crashes ]]; then
      sleep 0.3
      kill -KILL -- "-$(ps -o sid= $$ | tr -d ' ')"
    fi
    echo "$row$number" >>"$WORLD/told"
    echo "{\"number\": $number}" >>"$kept"
    if [[ $row$number == b2 ]] && happens row; then
      until grep -qs 2 "$WORLD/bucket/my-bucket/some folder/table2/rows/table2/b/examples.jsonl"; do
        sleep 0.02
      done
      preempt
    fi
    if [[ $row$number == b2 ]] && happens unreachable; then # Its state stays READY.
      touch "$WORLD/gone"
      kill -KILL -- "-$(ps -o sid= $$ | tr -d ' ')"
    fi
  done
  grep -qs "\"$row\"" "$out/records.jsonl" || echo "{\"task\": \"x\", \"target\": \"t\",
    \"draft\": \"$row\", \"temperature\": 0.0, \"gamma\": 5, \"ms_target_step\": 25.0}" |
    tr -d '\n' | sed 's/$/\n/' >>"$out/records.jsonl"
done
"""
# Stands in for training: four steps, of which each second one is a checkpoint, which is written to
# the bucket itself; only the first of several processes writes log and model.
TRAINING = r"""
import json, os, pathlib, subprocess, sys, time

world = pathlib.Path(os.environ["WORLD"])
with (world / "programs" / "said").open("a") as said:
    said.write(json.dumps(sys.argv[1:]) + "\n")
if os.environ.get("PROCESS") == "another":
    sys.exit()
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
work, model = pathlib.Path(options["work_dir"]), pathlib.Path(options["out_dir"])
checkpoints = world / "bucket" / options["checkpoint_dir"].removeprefix("gs://")
begun = max([0, *(int(file.name) for file in checkpoints.glob("*"))])
log, settings = work / "log.jsonl", work / "settings.json"
lines = log.read_text().splitlines() if log.exists() else []
if len(lines) < begun or (begun and not settings.exists()) or model.exists():
    sys.exit("error: the work folder is not that of the checkpoint.")
settings.write_text("{}")
log.write_text("".join(f"{line}\n" for line in lines[:begun]))

def happens(what):
    return subprocess.run(["happens", what], check=False).returncode == 0

for step in range(begun + 1, 5):
    if (world / "crashes").exists():
        time.sleep(0.2)
        if step == 4:
            os.killpg(os.getsid(0), 9)
    with (world / "told").open("a") as told:
        told.write(f"{step}\n")
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
    if step % 2 == 0:
        checkpoints.mkdir(exist_ok=True)
        (checkpoints / str(step)).write_text("parameters")
    if step == 3 and happens("step"):
        kept = checkpoints.parent / "work" / "log.jsonl"
        while not kept.exists() or kept.read_text().count("step") < 3:
            time.sleep(0.02)
        subprocess.run(["preempt"], check=False)
    if step == 3 and happens("deadline"):
        sys.exit(75)
model.mkdir()
(model / "weights").write_text("trained")
"""
EVERYTHING = ["compiled", "a1", "a2", "a3", "b1", "b2", "b3"]

Changes = dict[str, str | None]


def vm(
    *arguments: str, changes: Changes | None = None, script: pathlib.Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """Runs the script; a setting that is None is left out."""
    kept = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    settings = {
        key: value for key, value in (SETTINGS | (changes or {})).items() if value is not None
    }
    return subprocess.run(
        [str(script), *arguments],
        env=kept | {"INTERVAL": "0.05"} | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,  # Less than pytest's own: it ends a hang.
    )


def dry(*arguments: str, **changes: str) -> list[list[str]]:
    """The commands that a dry run prints, as a shell would read them."""
    done = vm("--dry_run", *arguments, changes=dict(changes))
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def git(folder: pathlib.Path, *arguments: str) -> str:
    """What git says, in a folder and as somebody."""
    somebody = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *somebody, *arguments]
    dated = os.environ | dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "@0 +0000")
    done = subprocess.run(command, env=dated, capture_output=True, text=True, check=True)
    return done.stdout


def made_world(folder: pathlib.Path, patch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder in which gcloud finds a bucket and makes VMs."""
    made = folder / "the world"
    for part in ("programs", "sessions", "bucket/my-bucket"):
        (made / part).mkdir(parents=True)
    programs = {"gcloud": GCLOUD, "happens": HAPPENS, "preempt": PREEMPT, "python3": PYTHON}
    programs |= {"measure": MEASURE, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
    for name, program in programs.items():
        (made / "programs" / name).write_text(program)
        (made / "programs" / name).chmod(0o755)
    patch.setenv("PATH", f"{made / 'programs'}:{os.environ['PATH']}")
    patch.setenv("WORLD", str(made))
    patch.setenv("TMPDIR", str(folder))
    return made


def made_checkout(folder: pathlib.Path) -> pathlib.Path:
    """A repository that holds these scripts and nothing else; its commit is always the same."""
    made = folder / "check out"
    shutil.copytree(SCRIPTS, made / "scripts" / "tpu", ignore=shutil.ignore_patterns("__pycache__"))
    (made / "scripts" / "train.py").write_text(TRAINING)
    git(made, "init", "--quiet")
    git(made, "add", ".")
    git(made, "commit", "--quiet", "--message", "first")
    return made


@pytest.fixture
def world(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return made_world(tmp_path, monkeypatch)


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    return made_checkout(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of a table that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        made_world(folder, patch)
        checkout = made_checkout(folder)
        assert table(checkout).returncode == 0
    return files(checkout / "results" / "table2")


def table(checkout: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    return vm(*TABLE, *options, script=checkout / "scripts" / "tpu" / "vm.sh")


def train(checkout: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Training on texts that are in the bucket."""
    texts = pathlib.Path(os.environ["WORLD"], "bucket", "my-bucket", "texts")
    texts.mkdir(exist_ok=True)
    (texts / "a.npz").write_text("text")
    return vm(*TRAIN, *options, script=checkout / "scripts" / "tpu" / "vm.sh")


def files(folder: pathlib.Path) -> dict[str, str]:
    """What a folder holds, but for the log, which tells of the last VM alone."""
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_text() for name, file in found.items() if name != "log.txt"}


def calls(world: pathlib.Path, what: str) -> int:
    """How often gcloud was called for something."""
    return sum(what in line for line in (world / "calls").read_text().splitlines())


def test_create() -> None:
    plain = ["--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base"]
    assert dry("create") == [[*TPU, "create", "my 'tpu'", *plain, *VM]]
    assert dry("create", "--spot") == [[*TPU, "create", "my 'tpu'", *plain, "--spot", *VM]]
    assert dry("create", ACCELERATOR="v5p-8", RUNTIME="v2-alpha-tpuv5") == [
        [*TPU, "create", "my 'tpu'", "--accelerator-type=v5p-8", "--version=v2-alpha-tpuv5", *VM]
    ]
    queued = ["--accelerator-type=v4-8", "--runtime-version=tpu-ubuntu2204-base"]
    assert dry("create", "--queued", "--spot") == [
        [*QUEUE, "create", "my 'tpu'", "--node-id=my 'tpu'", *queued, "--spot", *VM]
    ]


def test_delete() -> None:
    assert dry("delete") == [[*TPU, "delete", "my 'tpu'", *VM]]
    assert dry("delete", "--queued") == [[*QUEUE, "delete", "my 'tpu'", "--force", *VM]]


def test_install() -> None:
    bundle, copy, remove, fetch, install = dry("install", TMPDIR="/some where")
    file = "/some where/speculative-my 'tpu'.bundle"
    assert bundle == ["git", "-C", str(ROOT), "bundle", "create", "--quiet", file, "HEAD"]
    assert copy == [*TPU, "scp", file, "my 'tpu':speculative.bundle", *VM]
    assert remove == ["rm", file]
    assert "git fetch --quiet ../speculative.bundle HEAD" in fetch[-3]
    (command,) = [word for word in install if word.startswith("--command=")]
    assert shlex.split(command)[-1] == "--editable=.[tpu,tasks]"


def test_ssh() -> None:
    assert dry("ssh") == [[*TPU, "ssh", "my 'tpu'", *VM]]
    (found,) = dry("ssh", "ls", "-l", "two words", "$HOME")
    command = found[-3].removeprefix("--command=")
    assert found == [*TPU, "ssh", "my 'tpu'", f"--command={command}", *VM]
    assert shlex.split(command) == ["ls", "-l", "two words", "$HOME"]


def test_a_dry_table() -> None:
    option = "--checkpoints=gs://my-bucket/a folder"
    write, remove, create, *install, start, make, fetch, delete = dry(*TABLE, option, "--spot")
    place = f"{RESULTS}/table2/exit_code"
    assert write == ["gcloud", "storage", "cp", "-", place]
    assert remove == ["gcloud", "storage", "rm", place]
    assert create == [*dry("create", "--spot")[0][: -len(VM)], *QUIET]
    assert [line[:5] for line in install] == [line[:5] for line in dry("install")]
    work = shlex.split(start[-4].removeprefix("--command="))
    place = work.index("speculative/scripts/tpu/measure.sh")
    assert work[place + 1 : place + 4] == [RESULTS, "2", option]
    assert work[place + 4 :] == [">speculative.log", "2>&1", "</dev/null", "&", "}"]
    local = str(ROOT / "results" / "table2")
    assert make == ["mkdir", "-p", local]
    assert fetch == ["gcloud", "storage", "rsync", "--recursive", f"{RESULTS}/table2", local]
    assert delete == [*TPU, "delete", "my 'tpu'", *QUIET]
    assert dry(*TABLE, "--keep")[-1] == fetch


@pytest.mark.parametrize(
    ("accelerator", "hosts"),
    [
        ("v4-8", 1),
        ("v4-32", 4),
        ("v5litepod-8", 1),
        ("v5litepod-16", 4),
        ("v5p-16", 2),
        ("v6e-1", 1),
    ],
)
def test_every_host_is_started(accelerator: str, hosts: int) -> None:
    done = vm("--dry_run", *TABLE, changes={"ACCELERATOR": accelerator})
    assert done.returncode == 0
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    several = [line for line in lines if {"ssh", "scp"} & {*line}]
    assert several and {"--worker=all" in line for line in several} == {hosts > 1}
    assert f"HOSTS={hosts} speculative/scripts/tpu/measure.sh" in done.stdout.replace("\\", "")
    codes = [
        line[-1].rpartition("/")[2] for line in lines if line[:3] == ["gcloud", "storage", "rm"]
    ]
    assert codes == (["exit_code"] if hosts == 1 else [f"exit_code.{i}" for i in range(hosts)])


@pytest.mark.parametrize(("accelerator", "hosts"), [("v4-8", 1), ("v4-32", 4)])
def test_a_dry_training(accelerator: str, hosts: int) -> None:
    lines = dry(*TRAIN, "--spot", ACCELERATOR=accelerator)
    codes = ["exit_code"] if hosts == 1 else [f"exit_code.{host}" for host in range(hosts)]
    for code in codes:
        write, remove = lines.pop(0), lines.pop(0)
        assert write == ["gcloud", "storage", "cp", "-", f"{RESULTS}/work/{code}"]
        assert remove == ["gcloud", "storage", "rm", f"{RESULTS}/work/{code}"]
    create, *install, start, make, fetch, delete = lines
    assert create == [*dry("create", "--spot", ACCELERATOR=accelerator)[0][: -len(VM)], *QUIET]
    expected = dry("install", ACCELERATOR=accelerator)
    assert [line[:6] for line in install] == [line[:6] for line in expected]
    assert ("--worker=all" in start) == (hosts > 1)
    (command,) = [word for word in start if word.startswith("--command=")]
    work = shlex.split(command)
    place = work.index("nohup")
    program = ["env", f"HOSTS={hosts}", "speculative/scripts/tpu/measure.sh", RESULTS, "train"]
    assert work[place + 1 : -5] == [*program, *TRAIN[2:]]
    assert work[-5:] == [">speculative.log", "2>&1", "</dev/null", "&", "}"]
    local = str(ROOT / "results" / "some folder")
    assert make == ["mkdir", "-p", local]
    assert fetch == ["gcloud", "storage", "rsync", "--recursive", f"{RESULTS}/work", local]
    assert delete == [*TPU, "delete", "my 'tpu'", *QUIET]


def test_a_dry_run_runs_nothing(world: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for verb in (["create"], ["install"], ["ssh", "touch", "x"], TABLE, TRAIN, ["delete"]):
        dry(*verb)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_undisturbed(world: pathlib.Path, checkout: pathlib.Path) -> None:
    weights = world / "bucket" / "my-bucket" / "weights" / "t"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights.parents[1] / "x y.tsv").write_text("text")
    options = ("--checkpoints=gs://my-bucket/weights/", "--data_file=x=gs://my-bucket/x y.tsv")
    done = table(checkout, *options, "--keep")
    assert (done.returncode, done.stderr) == (0, "")
    assert (world / "told").read_text().split() == EVERYTHING
    found = files(checkout / "results" / "table2")
    assert found["exit_code"] == "0\n"
    assert found["commit.txt"] == git(checkout, "describe", "--always")
    assert len(found["records.jsonl"].splitlines()) == 2
    assert found["rows/table2/b/examples.jsonl"].count("number") == 3
    # The prediction stands beside what was measured, in the results and on the terminal.
    assert "20 / 25" in found["compared.txt"]
    assert found["compared.txt"] in done.stdout
    compiled, measured = (world / "programs" / "said").read_text().splitlines()
    assert compiled == (
        "<compile><--table=2><--topology=present><--checkpoints=inputs/my-bucket/weights><--json>"
    )
    assert measured == (
        "<table><2><--output_dir=results/table2><--checkpoints=inputs/my-bucket/weights>"
        "<--data_file=x=inputs/my-bucket/x y.tsv>"
    )
    there = world / "home" / "speculative" / "inputs" / "my-bucket"
    assert (there / "weights" / "t" / "config.json").read_text() == "{}"
    assert (there / "x y.tsv").read_text() == "text"


@pytest.mark.long
@pytest.mark.parametrize(
    ("disturbance", "kind"),
    [
        ("capacity\ncreation", []),
        ("rate\ninternal\nreservation\ncreation", []),
        ("creation", ["--queued"]),
        ("silence\ninstallation", []),
        ("row", ["--queued"]),
        ("row\nquota\nquota", []),
        ("row\nfailed-quota", ["--queued"]),
        ("unreachable", []),
        ("unreachable\nquota", ["--queued"]),
        ("upload", []),
    ],
)
def test_a_disturbed_table_is_that_of_an_undisturbed_run(
    disturbance: str,
    kind: list[str],
    world: pathlib.Path,
    checkout: pathlib.Path,
    undisturbed: dict[str, str],
) -> None:
    (world / "disturbance").write_text(disturbance)
    done = table(checkout, "--spot", *kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert (world / "disturbance").read_text() == ""
    assert done.stdout.count("is lost") == 1
    assert calls(world, " delete ") == 2 + ("failed" in disturbance)
    assert not any((world / name).exists() for name in ("vm", "queue"))
    assert files(checkout / "results" / "table2") == undisturbed
    # What was in the bucket when the VM was lost has not been measured or compiled again.
    told = (world / "told").read_text().split()
    assert sorted({*told}) == sorted(EVERYTHING)
    kept = {"compiled"} if list(world.glob("kept/*/*/compiled/program")) else set()
    for examples in world.glob("kept/*/*/table2/rows/table2/*/examples.jsonl"):
        lines = examples.read_text().splitlines()
        kept |= {f"{examples.parent.name}{json.loads(line)['number']}" for line in lines}
    assert [name for name in kept if told.count(name) > 1] == []
    if disturbance.startswith("row"):
        assert kept == {"compiled", "a1", "a2", "a3", "b1", "b2"}
    if disturbance == "upload":
        assert "a1" in kept
        assert not list(world.glob("kept/*/*/table2/records.jsonl"))


def test_training_goes_on_after_a_deadline_and_a_loss(
    world: pathlib.Path, checkout: pathlib.Path
) -> None:
    """From the checkpoint in the bucket, with the log that was copied there."""
    bucket = world / "bucket" / "my-bucket"
    (world / "bucket" / "t5-data").mkdir()
    (world / "bucket" / "t5-data" / "pieces.model").write_text("pieces")
    options = ("--init_from=gs://t5-data/t5/checkpoint_1", "--vocabulary=gs://t5-data/pieces.model")
    (world / "disturbance").write_text("deadline\nstep\n")
    done = train(checkout, *options)
    assert (done.returncode, done.stderr) == (75, "")
    assert "stopped at its --max_minutes; rerun the command to resume it" in done.stdout
    assert not (bucket / "some folder" / "model").exists()
    done = train(checkout, *options, "--spot", "--keep")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("is lost (PREEMPTED)") == 1
    assert f"The model is in {RESULTS}/model." in done.stdout
    assert (world / "told").read_text().split() == ["1", "2", "3", "3", "3", "4"]
    assert files(bucket / "some folder" / "model") == {"weights": "trained"}
    found = files(checkout / "results" / "some folder")
    steps = [json.loads(line)["step"] for line in found.pop("log.jsonl").splitlines()]
    assert steps == [1, 2, 3, 4]
    commit = git(checkout, "describe", "--always")
    assert found == {"settings.json": "{}", "exit_code": "0\n", "commit.txt": commit}
    # What the program was called with, each time; --init_from is read where it is.
    first, *others = map(json.loads, (world / "programs" / "said").read_text().splitlines())
    assert others == [first, first]
    local = "results/my-bucket/some folder"
    assert first == [
        "--config=a.gin",
        "--data_dir=inputs/my-bucket/texts",
        GIN,
        "--init_from=gs://t5-data/t5/checkpoint_1",
        "--vocabulary=inputs/t5-data/pieces.model",
        f"--work_dir={local}/work",
        f"--out_dir={local}/model",
        f"--checkpoint_dir={RESULTS}/checkpoints",
    ]
    there = world / "home" / "speculative"
    assert (there / "inputs" / "my-bucket" / "texts" / "a.npz").read_text() == "text"
    assert (there / "inputs" / "t5-data" / "pieces.model").read_text() == "pieces"
    assert not (there / local / "checkpoints").exists()


def test_hosts_train_together(
    world: pathlib.Path, checkout: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each starts a process; the first one, wherever it is, writes the log and the model."""
    home, program = world / "home", checkout / ".venv" / "bin" / "python"
    home.mkdir()
    (home / "speculative.log").write_text("")
    program.parent.mkdir(parents=True)
    program.symlink_to(world / "programs" / "python")
    # A model that was not copied before the run stopped is made again.
    (checkout / "results" / "my-bucket" / "some folder" / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for host, process in ((2, "the first"), (3, "another")):
        hostname = world / "programs" / "hostname"
        hostname.write_text(f"#!/bin/sh\necho t1v-n-1a2b3c-w-{host}\n")
        hostname.chmod(0o755)
        subprocess.run(
            [checkout / "scripts" / "tpu" / "measure.sh", RESULTS, *TRAIN[:1], "--mesh=data:16"],
            env=os.environ | {"HOSTS": "4", "PROCESS": process, "INTERVAL": "0.05"},
            check=True,
            timeout=60,
        )
        said = json.loads((world / "programs" / "said").read_text().splitlines()[-1])
        assert said[:2] == ["--mesh=data:16", "--distributed=auto"]
    found = files(world / "bucket" / "my-bucket" / "some folder")
    assert found["work/log.jsonl"].count("step") == 4
    assert found["model/weights"] == "trained"
    assert [found[f"work/exit_code.{host}"] for host in (2, 3)] == ["0\n", "0\n"]
    assert {"work/log.2.txt", "work/log.3.txt"} <= {*found}


def test_a_run_that_is_under_way_is_watched(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "hold").touch()
    command = [str(checkout / "scripts" / "tpu" / "vm.sh"), *TABLE]
    environment = os.environ | SETTINGS | {"INTERVAL": "0.05"}
    for ends in (False, True):  # The first launcher is killed, the second one sees the run's end.
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout
            while "examples: 3" not in (line := run.stdout.readline()):
                assert line  # It has not ended.
            if ends:
                other = table(checkout, "--limit=1")
                assert other.returncode == 2
                assert "is busy with other work (commit" in other.stderr
                (world / "hold").unlink()
                assert "the results are in" in run.stdout.read().lower()
            else:
                run.kill()
    assert run.returncode == 0
    assert (world / "told").read_text().split() == EVERYTHING
    assert calls(world, " create ") == 1


def test_a_failing_program_is_reported(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "failure").touch()
    done = table(checkout)
    assert done.returncode == 2
    assert "error: exit code 2; the end of results/table2/log.txt:" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: a sentence."
    assert calls(world, " create ") == 1
    assert not (world / "vm").exists()


def test_a_failure_of_a_lost_machine_is_none(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "failure").touch()
    (world / "disturbance").write_text("loss")
    done = table(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(world, " create ") == 2


def test_a_bucket_is_tried_before_a_vm_is_made(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "bucket" / "my-bucket").rmdir()
    done = table(checkout)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: {RESULTS} cannot be written (ERROR: (gcloud.storage.cp) "
    )
    assert done.stderr.endswith("for the role roles/storage.objectUser.\n")
    assert calls(world, "compute") == 0


def test_a_bucket_that_is_closed_to_the_vm(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "closed").touch()
    done = table(checkout)
    assert done.returncode == 1
    assert (
        "stopped without an exit code, 5 times in a row: ERROR: (gcloud.storage.cp) HTT"
        in done.stderr
    )
    assert not (world / "vm").exists()


def test_a_vm_that_google_refuses(world: pathlib.Path, checkout: pathlib.Path) -> None:
    """Quota that no VM of this run has used is no matter of waiting."""
    for kind, said in (
        ("quota", '{ "code": 8, "message": "Quota limit \'TPUV4s'),
        ("refusal", '{ "code": 7, "message": "Cloud TPU API has not been used in this'),
    ):
        (world / "disturbance").write_text(kind)
        done = table(checkout)
        assert done.returncode == 2
        create = "ERROR: (gcloud.compute.tpus.tpu-vm.create)"
        assert f"cannot be made; gcloud says: {create} {said}" in done.stderr
        assert done.stderr.endswith('" }\n') and done.stderr.count("\n") == 1


def test_a_queued_request_that_fails(world: pathlib.Path, checkout: pathlib.Path) -> None:
    (world / "disturbance").write_text("failed\n" * 5)
    done = table(checkout, "--queued")
    assert done.returncode == 1
    assert "The request for my 'tpu' failed, 5 times in a row: The accelerator" in done.stderr


def test_a_vm_that_was_never_reached_is_not_replaced(
    world: pathlib.Path, checkout: pathlib.Path
) -> None:
    """The fault lies elsewhere; but one that was there before may have been lost."""
    (world / "gone").touch()
    (world / "home").mkdir()
    (world / "vm").write_text("READY\n")
    done = table(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is lost (READY, but it cannot be reached)" in done.stdout
    gcloud = world / "programs" / "gcloud"
    gcloud.write_text(gcloud.read_text().replace("boot() {", 'boot() { touch "$WORLD/gone"; '))
    done = table(checkout)
    assert done.returncode == 1
    assert "cannot be reached, 5 times in a row: ERROR: (gcloud.compute.tpus.tpu" in done.stderr
    assert "return code [255]." in done.stderr and "Updates" not in done.stderr
    assert calls(world, " create ") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "most"),
    [(table, "Finished rows: 1; measured examples: 5."), (train, "Finished steps: 3.")],
)
def test_a_run_that_stops_again_and_again_without_progress_ends(
    run: Callable[[pathlib.Path], subprocess.CompletedProcess[str]],
    most: str,
    world: pathlib.Path,
    checkout: pathlib.Path,
) -> None:
    """Though it is seen at work between its stops, and training does its last steps again."""
    (world / "crashes").touch()
    done = run(checkout)
    assert done.returncode == 1
    assert "stopped without an exit code, 5 times in a row: " in done.stderr
    assert done.stdout.count(most) >= 1
    assert calls(world, " create ") == 1 and not (world / "vm").exists()


def test_flags_that_gcloud_does_not_have_are_refused(world: pathlib.Path) -> None:
    there = ["--project=p", "--zone=z"]
    for arguments, code in (
        (["compute", "tpus", "tpu-vm", "describe", "a", *there], 1),
        (["compute", "tpus", "tpu-vm", "describe", "a"], 1),
        (["compute", "tpus", "tpu-vm", "delete", "a", "--force", *there], 2),
        (["compute", "tpus", "tpu-vm", "create", "a", "--runtime-version=r", *there], 2),
        (["compute", "tpus", "tpu-vm", "create", "a", "--spot=1", *there], 2),
        (["compute", "tpus", "tpu-vm", "start", "a", *there], 2),
        (["storage", "rsync", "--delete", "a", "b"], 2),
    ):
        done = subprocess.run(["gcloud", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert "\nERROR: (gcloud." in done.stderr


def test_the_installed_commit_is_the_one_that_is_checked_out(
    world: pathlib.Path, checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script, there = checkout / "scripts" / "tpu" / "vm.sh", world / "home" / "speculative"
    assert vm("create", script=script).returncode == 0
    for text in ("first", "second"):  # The second time, what was measured must stay.
        (checkout / "file").write_text(text)
        git(checkout, "add", "file")
        git(checkout, "commit", "--quiet", "--message", text)
        done = vm("install", script=script)
        assert done.returncode == 0 and "error" not in done.stderr.lower()
        assert git(there, "describe", "--always") == git(checkout, "describe", "--always")
        assert (there / "file").read_text() == text
        log = there / "results" / "log.txt"
        log.parent.mkdir(exist_ok=True)
        log.write_text(log.read_text() + text if log.exists() else text)
    assert log.read_text() == "firstsecond"
    assert not list(tmp_path.glob("*.bundle"))


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["create"], {"PROJECT": None}, "PROJECT not set; export PROJECT, ZONE and NAME"),
        (["delete"], {"ZONE": "", "NAME": None}, "ZONE, NAME not set"),
        ([], {}, "'' is none of table, train, create, install, ssh and delete"),
        (["destroy"], {}, "'destroy' is none of"),
        (["create", "--keep"], {}, "'--keep' is no option of create"),
        (["table", "2", "3", "--results=gs://b/f"], {}, "'2 3' is no table to measure; give 2, 3"),
        (["table", "1", "--results=gs://b/f"], {}, "'1' is no table to measure"),
        (["table", "--results=gs://b/f"], {}, "'' is no table to measure"),
        (["table", "2"], {}, "'' is no folder of a bucket; give --results=gs://BUCKET/FOLDER."),
        (["table", "2", "--results=/tmp"], {}, "'/tmp' is no folder of a bucket"),
        (["table", "2", "--results=gs://b/"], {}, "'gs://b' is no folder of a bucket"),
        (["table", "2", "--checkpoints", "x"], {}, "'--checkpoints' is no option of table"),
        (["table", "2", "--output_dir=x"], {}, "'--output_dir=x' cannot be given, for --out"),
        ([*TRAIN, "--work_dir=x"], {}, "for --work_dir is set on the VM; leave it out."),
        ([*TRAIN, "--out_dir=x"], {}, "for --out_dir is set on the VM"),
        ([*TRAIN, "--checkpoint_dir=x"], {}, "for --checkpoint_dir is set on the VM"),
        ([*TRAIN, "--distributed=auto"], {}, "'--distributed=auto' cannot be given, for"),
        (["train", "--data_dir=x"], {}, "train lacks --config; add --config=VALUE."),
        (["train", "--config=x", "--data_dir=x"], {}, "'' is no folder of a bucket"),
        ([*TRAIN, "2"], {}, "'2' is no option of train; write --name=value"),
        (["create"], {"ACCELERATOR": "v4-9"}, "'v4-9' is no accelerator type that this script"),
        (["create"], {"ACCELERATOR": "v4_8"}, "'v4_8' is no accelerator type that this script"),
        ([*TABLE], {"ACCELERATOR": "v5e-8"}, "'v5e-8' is no accelerator type that this script"),
        (["create"], {"ACCELERATOR": "v5litepod-2"}, "'v5litepod-2' is no accelerator type"),
        (["create"], {"PATH": "/usr/bin/nowhere:/bin/nowhere"}, "gcloud is not installed"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], changes: Changes, said: str, world: pathlib.Path
) -> None:
    if "PATH" in changes:
        # What the script itself needs, and nothing else.
        programs = world / "few"
        programs.mkdir()
        for name in ("bash", "env", "dirname"):
            (programs / name).symlink_to(str(shutil.which(name)))
        changes = {"PATH": str(programs)}
    done = vm(*arguments, changes=changes)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_help_is_the_header() -> None:
    done = vm("--help", changes={"PROJECT": None})
    assert done.returncode == 0
    assert "scripts/tpu/vm.sh table 2" in done.stdout
    assert "set -euo" not in done.stdout


SHELL = sorted(SCRIPTS.glob("*.sh"))


def test_bash_reads_them() -> None:
    for script in SHELL:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", *SHELL], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def compared(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "compare.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_predictions_stand_beside_measurements(tmp_path: pathlib.Path) -> None:
    names = ("ms_target_step", "ms_verify", "ms_draft_step", "c", "verify_cost")
    row = {"target": "t5_11b", "gamma": 7}
    predictions = [
        {
            **row,
            "draft": draft,
            "task": task,
            "speedup_predicted": 3.0,
            **dict.fromkeys(names, time),
        }
        for draft, task, time in (("t5_small", "x", 1.0), ("t5_small", "y", 2.0))
    ]
    # The second draft has no prediction.
    records = [
        {**row, "draft": draft, "task": "y", "temperature": 1.0, "speedup": 2.5}
        | dict.fromkeys(names, 4.125)
        for draft in ("t5_small", "t5_base")
    ]
    for name, rows in (("predicted", predictions), ("records", records)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = compared(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "t5_" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["y", "t5_small", "1", "7", *["2 / 4.12"] * 5, "3 / 2.5"],
        ["y", "t5_base", "1", "7", *["– / 4.12"] * 5, "– / 2.5"],
    ]


def test_a_comparison_without_predictions(tmp_path: pathlib.Path) -> None:
    done = compared(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "predicted.jsonl: No such file" in done.stderr
