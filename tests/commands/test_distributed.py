"""Several processes decode one text on a mesh of all their devices."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from speculative import cli, load
from speculative.backends import processes

pytestmark = pytest.mark.long

TEXT = "translate English to German: This package contains a small editor."
LENGTH = 12


def free_port() -> int:
    with socket.create_server(("", 0)) as one:
        return one.getsockname()[1]


def test_two_processes_decode_what_one_does() -> None:
    port = free_port()
    given = ["generate", TEXT, "--json", "--mesh=model:4", f"--max_length={LENGTH}", "--tree=7"]
    flags = os.environ.get("XLA_FLAGS", "").replace("device_count=4", "device_count=2")
    flags += " --xla_force_host_platform_device_count=2" * ("device_count" not in flags)
    command = [sys.executable, "-m", "speculative.cli", *given]
    running = [
        subprocess.Popen(
            [*command, f"--distributed=localhost:{port},{k}/2"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"XLA_FLAGS": flags},
        )
        for k in (1, 0)
    ]  # fmt: skip
    (second, _), (first, said) = (one.communicate(timeout=200) for one in running)
    assert [one.returncode for one in running] == [0, 0], said
    assert second == ""
    own = load().generate(TEXT, max_length=LENGTH, tree=7)
    assert json.loads(first)["tokens"] == own.tokens


@pytest.mark.parametrize("number", [0, 1])
def test_processes_that_do_not_come(number: int) -> None:
    lacking = (
        "process 1 of 2 did not come to" if number == 0 else "process 1 does not hear of all others"
    )
    with pytest.raises(ValueError, match=f"After 1 seconds {lacking}.* localhost:.*start all of"):
        processes.join(f"localhost:{free_port()},{number}/2", seconds=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["x", "--distributed=auto"], "--distributed is for a mesh; add --mesh."),
        (["--mesh=model:2", "--distributed=auto"], "need the same texts at once"),
        (["x", "--mesh=model:2", "--distributed=auto", "--trace"], "for one process"),
        (["x", "--mesh=model:2", "--distributed=here:1,2/2"], "'here:1,2/2' names no process"),
        (["x", "--mesh=model:2", "--distributed=here"], "'here' names no process"),
        (["x", "--mesh=model:2", "--distributed=here:99999,0/2"], "names no process"),
    ],
)
def test_what_processes_cannot_share(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *options]) == 2
    found = capsys.readouterr().err
    assert said in found and found.startswith("error: ")


@pytest.mark.parametrize("there", [(0, 1, 2), (0, 1)])
def test_all_meet_or_none(there: tuple[int, ...]) -> None:
    """Whoever else calls, as JAX's own client does at the same port, is none of them."""
    port, ends = free_port(), time.monotonic() + 1
    address = f"localhost:{port}"

    def stranger() -> None:
        with contextlib.suppress(OSError), processes._called("localhost", port, ends) as one:
            one.sendall(b"PRI * HTTP/2.0\r\n")

    with ThreadPoolExecutor() as pool:
        pool.submit(stranger)
        met = [pool.submit(processes._meet, address, number, 3, 3) for number in there]
        failed = [isinstance(one.exception(), ValueError) for one in met]
    assert failed == [len(there) < 3] * len(there)
