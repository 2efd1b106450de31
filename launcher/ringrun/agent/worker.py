"""The program of a rank for :func:`ringrun.function.run`: read a function, call it, send the result.

``python -m ringrun.agent.worker PAYLOAD_DESCRIPTOR RESULT_DESCRIPTOR``: both are inherited from the agent.
The data in them is signed with the job's key.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import cloudpickle

from ringcomm.calls.objects import NOT_SENT, pack_error, pack_value, unpickled
from ringcomm.config import key_from_environment, place_from_environment
from ringcomm.errors import ConfigError, Misuse
from ringcomm.wire.auth import Signer

from ..plan.job import signed, verified


class Call(NamedTuple):
    """A function and its arguments."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def pack_call(call: Call, path: Sequence[str]) -> bytes:
    """Return a line of JSON with ``sys.path`` entries, then the pickle; ConfigError if that is impossible."""
    try:
        pickled: bytes = cloudpickle.dumps(tuple(call))
    except NOT_SENT as problem:
        raise ConfigError(
            f"{_unpicklable(call)} cannot be sent to other processes: {problem}. Make it inside the function."
        ) from None
    return json.dumps({"path": list(path)}).encode() + b"\n" + pickled


def _unpicklable(call: Call) -> str:
    """Return the part of a call that cannot be pickled, for a message."""
    parts = [(f"args[{index}]", value) for index, value in enumerate(call.args)]
    for name, value in (*parts, *call.kwargs.items()):
        try:
            cloudpickle.dumps(value)
        except NOT_SENT:
            return f"The function's argument {name}, a {type(value).__name__},"
    return "The function, or something that it uses,"


def main(payload_descriptor: int, result_descriptor: int) -> None:
    """Run the call. An exception is sent as the result, and then ends this process."""
    for descriptor in (payload_descriptor, result_descriptor):
        os.set_inheritable(descriptor, False)  # processes that the function starts must not keep them open
    key = key_from_environment()
    if key is None:
        raise ConfigError("The job's key is missing: ringrun.agent.worker can be started by ringrun only.")
    job, place = place_from_environment()
    signer, about = Signer(key[0], job), ("result", *(place or ()))
    with open(payload_descriptor, "rb") as file:
        payload = verified(file.read(), signer, "function")
    if payload is None:
        raise Misuse("The function that this process received is not signed with the job's key.")
    head, _, pickled = payload.partition(b"\n")
    sys.path += [item for item in json.loads(head.decode())["path"] if item not in sys.path]
    with open(result_descriptor, "wb") as results:
        try:
            call = Call(*unpickled(pickled))
            results.write(signed(pack_value(call.fn(*call.args, **call.kwargs)), signer, *about))
        except Exception as error:
            results.write(signed(pack_error(error, skip=1), signer, *about))
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            raise


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
