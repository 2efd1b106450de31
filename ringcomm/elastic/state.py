"""State that survives the loss of a rank, and the loop that starts again from it."""

from __future__ import annotations

import copy
import functools
import queue
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .. import api
from .._adapter.causes import cause_of
from .._adapter.objects import broadcast_object
from ..errors import HostsUpdatedInterrupt, Recoverable, RingcommError

REMOVED = 2
"""What :meth:`State.on_hosts_updated` is told if hosts are only going (1: some come; 3: both)."""


class State:
    """What training goes on from. Derive from it, or use :class:`ObjectState` or an adapter's own kind.

    Args:
        bcast_object: sends an object from rank 0 to all.
        get_rank: tells this process's rank.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = api.rank,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[Tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: List[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these after ranks have come or gone, for example to scale learning rates."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """There is a new job, perhaps of another size."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have come or are going; any thread may say so."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the present state as the one to go back to, and look whether hosts have changed.

        Raises:
            HostsUpdatedInterrupt: they have.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, if rank 0 has heard that hosts have changed."""
        before = newest = self._last_updated_timestamp
        changes = 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                changes |= change
        before, newest, changes = self._bcast_object((before, newest, changes))
        self._last_updated_timestamp = newest
        if newest > before:
            raise HostsUpdatedInterrupt(changes == REMOVED)

    def save(self) -> None:
        """Keep the present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the state that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and keep it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for a job of another size, before :meth:`sync`."""


class ObjectState(State):
    """Plain Python values, which are attributes of the state: ``ObjectState(epoch=0, batch=0)``."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = api.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: Dict[str, Any] = kwargs
        self._show()

    def save(self) -> None:
        """See :meth:`State.save`."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """See :meth:`State.restore`."""
        self._show()

    def sync(self) -> None:
        """See :meth:`State.sync`."""
        if self._saved_state:
            # What is now, not what was kept: ranks that go on have not made everything undone.
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._show()

    def _show(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class Part:
    """Something in a state that is kept and made the same in its own way.

    Args:
        value: the thing itself.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep how it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make it as it was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make it as it is on rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another thing takes its place."""
        self.value = value
        self.save()


class DictPart(Part):
    """A thing with ``state_dict()`` and ``load_state_dict()``.

    Args:
        send: makes every rank's thing that of rank 0.
    """

    def __init__(self, value: Any, send: Optional[Callable[[Any], None]] = None) -> None:
        super().__init__(value)
        self._send = send
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """See :meth:`Part.save`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See :meth:`Part.restore`."""
        # A copy, because what is loaded may be trained on in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """See :meth:`Part.sync`."""
        if self._send is None:
            self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        else:
            self._send(self.value)
        self.save()


def run(func: Callable[..., Any], reset: Optional[Callable[[], None]] = None) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a :class:`State`, to go on after a loss.

    If a rank is lost, the state goes back to the last commit, and if hosts have changed it stays as it
    is; the job is put together again, rank 0's state goes to all, and the function is called again.
    Mistakes of the program itself (:class:`~ringcomm.errors.Misuse`) are raised: they would come back.
    """
    restart = _restart if reset is None else reset

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return _with_causes(func, state, *args, **kwargs)
            except Recoverable:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as news:
                skip_sync = news.skip_sync
            restart()
            state.on_reset()

    return wrapper


def _with_causes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it; an error of a framework in whose graph a collective failed becomes that collective's."""
    try:
        return func(*args, **kwargs)
    except (RingcommError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        cause = cause_of(error)
        if cause is None:
            raise
        raise cause from error


def _restart() -> None:
    api.shutdown()
    api.init()
