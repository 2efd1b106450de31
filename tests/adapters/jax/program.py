"""A program whose ranks fail, disagree or end in the middle of JAX programs; its argument says how."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable

import jax
import jax.numpy as jnp

import ringcomm as rc
import ringcomm.jax as hvd
from tests.adapters.jax.forms import JIT

ITEMS = 1000
step = JIT(lambda x: hvd.pmean(x * 1.5))


def note(folder: Path, what: str) -> None:
    """Write down what this rank has found."""
    with (folder / f"rank.{hvd.rank()}").open("a") as file:
        file.write(what + "\n")


def kind_of(function: Callable[[], Any]) -> str:
    """The kind and the text of the error that a function raises, in one line."""
    try:
        with hvd.typed_errors():
            function()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "no error"


@JIT
def long(x: Any) -> Any:
    """A program with 30 collectives."""
    return jax.lax.scan(lambda carry, _: (hvd.pmean(carry * 1.1), None), x, None, length=30)[0]


@jax.jit
def slow(x: Any) -> Any:
    """Ones, after some time."""
    return jax.lax.fori_loop(0, 20, lambda _, carry: jnp.tanh(carry @ x), x)[:, 0] * 0 + 1


def in_progress() -> Any:
    """The result of a program that JAX has begun: it waits for its input, while the main thread goes on."""
    x = jnp.eye(ITEMS)
    long(slow(x)).block_until_ready()
    return long(slow(x))


def repeated(times: int, die_at: int = -1) -> Any:
    x = jnp.ones(ITEMS)
    for turn in range(times):
        if turn == die_at and hvd.rank() == 1:
            os._exit(7)
        x = step(x)
    return x


def kill(folder: Path) -> None:
    """Rank 1 is lost while the others are in a program; they cannot go on, in programs or outside."""
    rank = hvd.rank()
    said = [
        kind_of(lambda: repeated(1000, die_at=5)), kind_of(lambda: step(jnp.ones(ITEMS))),
        kind_of(lambda: hvd.psum(jnp.ones(3))),
    ]  # fmt: skip
    (folder / f"rank.{rank}").write_text("\n".join(said))


def disagree(folder: Path) -> None:
    """The ranks' programs have operations of one name with different shapes; afterwards they agree."""
    total, rows = (jax.jit(partial(kind, name="x")) for kind in (hvd.allreduce, hvd.allgather))
    note(folder, kind_of(lambda: total(jnp.ones(ITEMS + hvd.rank()))))
    note(folder, kind_of(lambda: rows(jnp.ones((2 + hvd.rank(), 3)))))
    note(folder, f"{float(step(jnp.ones(3))[0])}")


def out_of_order(folder: Path) -> None:
    """The ranks' programs have other collectives, or other shapes, than that of rank 0."""
    kinds = {"kinds": hvd.allgather, "shapes": hvd.psum, "groups": lambda x: hvd.psum((x[:600], x[600:]))}
    program = JIT(kinds[sys.argv[3]] if hvd.rank() else hvd.psum)
    items = ITEMS + (sys.argv[3] == "shapes" and hvd.rank() > 0)
    note(folder, kind_of(lambda: program(jnp.ones(items))))
    note(folder, kind_of(lambda: step(jnp.ones(3))))
    note(folder, kind_of(lambda: rc.allreduce(jnp.ones(3))))


def end(folder: Path) -> None:
    """The program ends while its last step is in progress."""
    in_progress()


def leave(folder: Path) -> None:
    """The ranks leave the job while a step is in progress, and join the next one; programs stay compiled."""
    result = in_progress()
    hvd.shutdown()
    problem = kind_of(lambda: hvd.psum(jnp.ones(3)))
    hvd.init()
    note(folder, problem)
    note(folder, f"{float(result[0])}")
    note(folder, f"{float(step(jnp.ones(3))[0])}")


if __name__ == "__main__":
    rc.init()
    programs = {"kill": kill, "disagree": disagree, "out_of_order": out_of_order, "end": end, "leave": leave}
    programs[sys.argv[1]](Path(sys.argv[2]))
