"""Processes of one program, maybe on several hosts, whose devices a mesh spans."""

import contextlib
import re
import socket
import time
from typing import Any

import jax

MET = b"speculative"  # What processes say when they meet, so that others are not taken for one.


def join(text: str, seconds: int = 120) -> int:
    """Makes one program's process of this one, with others whose devices it then sees.

    The text is ``auto``, where JAX finds the others itself, as on a Cloud TPU, or an address on the
    first one's host and this one's number of how many: ``host:8476,1/4``. Comes before any other
    use of devices; gives this one's number. ValueError if the others do not answer in time.
    """
    given: dict[str, Any] = {}
    if text != "auto":
        found = re.fullmatch(r"(\S+:(\d{1,5})),(\d{1,4})/(\d{1,4})", text)
        if found is None or int(found[3]) >= int(found[4]) or int(found[2]) >= 2**16:
            raise ValueError(
                f"{text!r} names no process; write auto, or HOST:PORT,K/N with K from 0 to N - 1 "
                "(--distributed)."
            )
        number, processes = int(found[3]), int(found[4])
        _meet(found[1], number, processes, seconds)
        given = {"coordinator_address": found[1], "num_processes": processes, "process_id": number}
    try:
        jax.distributed.initialize(**given, initialization_timeout=seconds)
        return jax.process_index()
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"The processes of --distributed={text} cannot meet ({said}).") from error


def _meet(address: str, number: int, processes: int, seconds: int) -> None:
    """Waits until all processes are there; ValueError names what is missing.

    JAX's own client would end a process whose coordinator does not answer, without an exception.
    """
    host, _, port = address.rpartition(":")
    ends, there = time.monotonic() + seconds, set[int]({0})
    callers: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        try:
            if number:
                calling = stack.enter_context(_called(host, int(port), ends))
                calling.sendall(MET + number.to_bytes(4, "big"))
                calling.settimeout(max(0.1, ends - time.monotonic()))
                if calling.recv(len(MET)) != MET:  # The first process answers when all are there.
                    raise OSError("it ended")
                return
            listening = stack.enter_context(socket.create_server(("", int(port))))
            while len(there) < processes:
                listening.settimeout(max(0.1, ends - time.monotonic()))
                caller = stack.enter_context(listening.accept()[0])
                caller.settimeout(1)
                with contextlib.suppress(TimeoutError):  # Whoever says nothing is none of them.
                    said = caller.recv(len(MET) + 4)
                    other = int.from_bytes(said[len(MET) :], "big")
                    if said.startswith(MET) and 0 < other < processes:
                        there.add(other)
                        callers.append(caller)
            for caller in callers:
                caller.sendall(MET)
        except OSError as error:
            lacking = f"process {number} does not hear of all others from process 0 at {address}"
            if number == 0:
                missing = ", ".join(str(one) for one in range(processes) if one not in there)
                lacking = f"process {missing} of {processes} did not come to {address}"
            raise ValueError(
                f"After {seconds} seconds {lacking} ({error.strerror or error}); start all of "
                "them, on hosts that reach one another (--distributed)."
            ) from error


def _called(host: str, port: int, ends: float) -> socket.socket:
    """A connection to a process that may not listen yet."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=1)
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)
