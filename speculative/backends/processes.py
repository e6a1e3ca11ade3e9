"""Processes of one program, possibly on several hosts, whose devices a mesh spans."""

import contextlib
import re
import socket
import time
from typing import Any

import jax

MET = b"speculative"  # The greeting of processes when they meet, which other callers lack.


def join(text: str, seconds: int = 120) -> int:
    """Joins this process with others, whose devices it then sees, and returns its number.

    The text is ``auto``, if JAX finds the others itself, as on a Cloud TPU, or an address on the
    first process's host, this one's number and their count: ``host:8476,1/4``. Call this before any
    other use of devices. ValueError is raised if the others do not answer in time.
    """
    arguments: dict[str, Any] = {}
    if text != "auto":
        match = re.fullmatch(r"(\S+:(\d{1,5})),(\d{1,4})/(\d{1,4})", text)
        if match is None or int(match[3]) >= int(match[4]) or int(match[2]) >= 2**16:
            raise ValueError(
                f"{text!r} names no process; write auto, or HOST:PORT,K/N with K from 0 to N - 1 "
                "(--distributed)."
            )
        number, processes = int(match[3]), int(match[4])
        _meet(match[1], number, processes, seconds)
        arguments = {"coordinator_address": match[1], "num_processes": processes}
        arguments["process_id"] = number
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=seconds)
        return jax.process_index()
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"The processes of --distributed={text} cannot meet ({reason})."
        ) from error


def _meet(address: str, number: int, processes: int, seconds: int) -> None:
    """Waits until all processes are there; ValueError names the missing ones.

    JAX's own client ends a process whose coordinator does not answer, without an exception.
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
                with contextlib.suppress(TimeoutError):  # A silent caller is none of them.
                    greeting = caller.recv(len(MET) + 4)
                    other = int.from_bytes(greeting[len(MET) :], "big")
                    if greeting.startswith(MET) and 0 < other < processes:
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
