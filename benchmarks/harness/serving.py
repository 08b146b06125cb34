"""The far end of a ``WorkerProcess``: requests and replies are JSON lines on descriptors of their own, because libraries print.

Runs in interpreters that have DeepSpeed and not this package.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Worker(Protocol):
    def describe(self) -> dict[str, Any]: ...


def serve(make: Callable[[], Worker], methods: Sequence[str], request_fd: int, reply_fd: int) -> None:
    """Make the worker, say what it is, and call those of its methods that are asked for, until there are no more requests."""
    worker = functools.cache(make)
    with os.fdopen(request_fd) as requests, os.fdopen(reply_fd, "w") as replies:

        def answer(method: str, arguments: dict[str, Any]) -> bool:
            try:
                reply = {"done": getattr(worker(), method)(**arguments)}
            except Exception as error:
                traceback.print_exc()
                reply = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)
            return "done" in reply

        if not answer("describe", {}):
            return
        for line in requests:
            request = json.loads(line)
            if request["method"] not in methods:
                raise ValueError(f"no such method: {request['method']!r}")
            answer(request["method"], request["arguments"])
