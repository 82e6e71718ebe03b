"""HTTP as bytes over a socket, and what a process holds: for tests of what no client library would send."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Server = Any


def exchange(server: Server, data: bytes, repeat: int = 1) -> tuple[int, int]:
    """Send bytes, `repeat` times, until the server has had enough. (status, bytes sent); status 0 without an answer."""
    sent, received = 0, b""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        try:
            for _ in range(repeat):
                connection.sendall(data)
                sent += len(data)
        except ConnectionError:
            pass
        try:
            while b"\r\n\r\n" not in received and (more := connection.recv(65536)):
                received += more
        except ConnectionError:
            pass
    return (int(received.split()[1]) if received.startswith(b"HTTP/") else 0), sent


def memory_bytes(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) * 1024


def process_tree(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from process_tree(int(child))
