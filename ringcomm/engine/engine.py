"""Collectives by name: the engine as adapters and :class:`~ringcomm.job.context.Context` use it.

Arrays are flat, contiguous and native here; shapes travel beside them. Every method returns a
:class:`~.request.Handle` at once.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator, Optional, Sequence, Union

from ..collective.call_sites import call_site, note_truncation
from ..collective.mirror import Mirror
from ..collective.options import Options
from ..collective.reduce import kernel
from ..collective.rows import check_rows, cumulative, row_counts, scatter_layout
from ..dtypes import Array, check_weighable, code_of_name, type_names
from ..errors import ConfigError, RingcommError, UnsupportedDtypeError, describe_error
from ..ops import Collective, ReduceOp, codec_number, factor_of, name_of, root_of, weight_of
from ..wire.frames import NO_OP, NO_ROOT
from ..wire.signature import Shape, Signature
from .adasum import check_adasum
from .core import EngineCore
from .process_sets import GLOBAL_SET, ProcessSets
from .request import Handle, Request

Convert = Optional[Callable[[Any], Any]]
Mirrors = Sequence[Optional[Mirror]]
_MAX_KNOWN = 4096
"""Programs that give each step's tensors new names have their options checked every time."""


class Engine(EngineCore):
    """The engine of one rank: :class:`~.core.EngineCore`, and the operations that programs submit to it."""

    def allreduce(
        self,
        arrays: Sequence[Array],
        op: Union[ReduceOp, Options],
        name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        *,
        residuals: Sequence[Array] = (),
        absent: int = 0,
        mirrors: Mirrors = (),
        **options: Any,
    ) -> Handle:
        """Reduce the arrays in place, all of them or none.

        Args:
            op: the reduction; or all options, of which ``name`` and ``process_set`` are replaced.
            residuals: of error feedback, one for each array.
            absent: the parts of the arrays that this rank does not have, a bit for each: a fact about ranks,
                which no weight or codec touches. The handle's ``absent`` has those that no rank has.
            mirrors: of arrays on devices; see :class:`~.request.Request`. Results are stored to them.

        Raises:
            UnsupportedDtypeError: the reduction has no meaning for these elements.
            Misuse: the weight is none, or the reduction is no average.
            DuplicateNameError, UnknownProcessSetError: as the names say.
        """
        chosen = op if isinstance(op, Options) else Options(op, **options)
        request = self._reduction(
            Collective.ALLREDUCE, chosen, arrays, shapes, name, process_set, convert, mirrors
        )
        request.residuals, request.absent = residuals, absent
        return self._submit(request, urgent)

    def _reduction(
        self, kind: Collective, options: Options, arrays: Sequence[Array], shapes: Optional[Sequence[Shape]],
        name: Optional[str], process_set: int, convert: Convert, mirrors: Mirrors, bounds: Sequence[int] = (),
    ) -> Request:  # fmt: skip
        """Return the request of a reduction with these options, checked the first time."""
        op, prescale, postscale = options.op, options.prescale_factor, options.postscale_factor
        shapes = [array.shape for array in arrays] if shapes is None else shapes
        described = (
            kind, name, op, prescale, postscale, options.compression, options.weight is None, process_set,
            *[array.dtype for array in arrays], *shapes, *bounds,
        )  # fmt: skip
        try:
            signature = self._known.get(described)
        except TypeError:  # a shape is a list, say
            signature = None
        if signature is None:
            self._check_reducible(arrays, op, prescale, postscale)
            signature = self._signature(
                kind, arrays, shapes, name, process_set, int(op),
                prescale=factor_of(prescale), postscale=factor_of(postscale), bounds=tuple(bounds),
                codec=codec_number(options.compression), weighted=options.weight is not None,
            )  # fmt: skip
            if signature.name and len(self._known) < _MAX_KNOWN:
                with suppress(TypeError):
                    self._known[described] = signature
        elif process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        request = self._request(signature, arrays, convert, mirrors)
        request.weight = self._weight(options.weight, arrays, op)
        return request

    def reducescatter(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        options: Options,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Reduce the arrays, which become working space; the handle gives this rank's rows of each.

        Args:
            options: of the caller; ``process_set`` is the number of the one that it names.
        """
        layout = scatter_layout(shapes, len(self.sets.check_member(process_set)), options)
        if options.op == ReduceOp.ADASUM:
            raise UnsupportedDtypeError("Adasum exists for allreduce only.")
        request = self._reduction(
            Collective.REDUCESCATTER, options, arrays, shapes, options.name, process_set, convert, mirrors,
            [edge for edges in layout.edges for edge in edges],
        )  # fmt: skip
        return self._submit(request, urgent)

    def allgather(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
        bounds: Sequence[int] = (),
    ) -> Handle:
        """Concatenate every rank's rows; the handle gives a list with the result for each array.

        Args:
            bounds: of the ranks' rows in an array that is completed in place.
        """
        check_rows("allgather", shapes)
        inner = [shape[1:] for shape in shapes]
        signature = self._signature(
            Collective.ALLGATHER, arrays, inner, name, process_set, bounds=tuple(bounds)
        )
        request = self._request(signature, arrays, convert, mirrors)
        request.rows = [shape[0] for shape in shapes]
        return self._submit(request, urgent)

    def broadcast(
        self,
        arrays: Sequence[Array],
        root: int,
        name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Overwrite the arrays with those of the root, which is a rank of the job."""
        members, root = self.sets.check_member(process_set), root_of(root)
        if root not in members:
            owner = "this job" if process_set == GLOBAL_SET else f"process set {process_set}"
            raise ConfigError(f"root_rank={root}: {owner} has the ranks {', '.join(map(str, members))}.")
        signature = self._signature(Collective.BROADCAST, arrays, shapes, name, process_set, root=root)
        return self._submit(self._request(signature, arrays, convert, mirrors), urgent)

    def alltoall(
        self,
        array: Array,
        shape: Shape,
        splits: Optional[Sequence[int]],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
        in_place: bool = False,
    ) -> Handle:
        """Send ``splits[i]`` rows to the i-th member; the handle gives rows, and the count from each rank.

        Args:
            splits: None: the same number to every member.
            in_place: whether the rows replace those that were sent, so that all members have as many.

        Raises:
            ShapeError: the array has no first dimension.
            ConfigError: the splits do not match its rows or the members.
            DuplicateNameError, UnknownProcessSetError: as the names say.
        """
        check_rows("alltoall", [shape])
        counts = row_counts(shape[0], splits, len(self.sets.check_member(process_set)))
        bounds = cumulative(counts) if in_place else ()
        signature = self._signature(
            Collective.ALLTOALL, [array], [shape[1:]], name, process_set, bounds=bounds
        )
        request = self._request(signature, [array], convert, mirrors)
        request.splits = counts
        return self._submit(request, urgent)

    def barrier(
        self, name: Optional[str] = None, process_set: int = GLOBAL_SET, urgent: bool = True
    ) -> Handle:
        """Done once every member has called it."""
        signature = self._signature(Collective.BARRIER, [], None, name, process_set)
        return self._submit(self._request(signature, []), urgent)

    def join(self) -> Handle:
        """Say that this rank has no more data; done when all ranks have, giving the last one's number."""
        if self._thread is None:
            handle = Handle("join")
            handle.finish(0)
            return handle
        return self._thread.join()

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """See :func:`ringcomm.pause`."""
        if self._thread is None:
            yield
            return
        self._thread.pause(reason)
        try:
            yield
        except BaseException:
            # What ended the block is raised; a failure of the job is raised by the next call.
            with suppress(RingcommError):
                self._thread.resume()
            raise
        self._thread.resume()

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks; every rank of the job must call it. Its number.

        Raises:
            ConfigError: such a group cannot be, or exists already.
        """
        change = ProcessSets.change("add", self.sets.check_new(ranks))
        number: int = self._change_sets(change)
        return number

    def remove_process_set(self, number: int) -> bool:
        """Dissolve a group; every rank of the job must call it. Whether there was one."""
        if number == GLOBAL_SET or number not in self.sets.numbers():
            return False
        self._change_sets(ProcessSets.change("remove", self.sets.members(number)))
        return True

    def _change_sets(self, change: str) -> int:
        signature = self._signature(Collective.PROCESS_SET, [], None, change, GLOBAL_SET)
        number: int = self._submit(self._request(signature, []), urgent=True).wait()
        return number

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """A ``with`` block from the first wait of a call in several operations to the end of the last one.

        If an exception (Ctrl-C, say) ends it, no other rank could find out; so the job ends.
        """
        try:
            yield
        except BaseException as problem:
            if self._thread is not None and not isinstance(problem, RingcommError):
                self._thread.abandon(describe_error(problem))
            raise

    def _weight(self, weight: Optional[float], arrays: Sequence[Array], op: ReduceOp) -> float:
        if weight is None:
            return 1.0
        for array in arrays:
            check_weighable(array.dtype, op)
        return weight_of(weight)

    # ---- the way in --------------------------------------------------------------------------

    def _check_reducible(
        self, arrays: Sequence[Array], op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        for array in arrays:
            if self.rank == 0:
                note_truncation(op, array.dtype)
            if op == ReduceOp.ADASUM:
                check_adasum(array.dtype)
            else:
                kernel(op, array.dtype, self.size, factor_of(prescale), factor_of(postscale))

    def _signature(
        self,
        kind: Collective,
        arrays: Sequence[Array],
        shapes: Optional[Sequence[Shape]],
        name: Optional[str],
        process_set: int,
        op: int = NO_OP,
        root: int = NO_ROOT,
        **agreed: Any,
    ) -> Signature:
        """Describe an operation; ``agreed`` are further fields."""
        if process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        dtypes = [type_names(array.dtype)[0] for array in arrays]
        for dtype in dtypes:
            code_of_name(dtype)
        return Signature(
            name_of(name), process_set, int(kind), op, root, tuple(dtypes),
            tuple(array.shape for array in arrays) if shapes is None else tuple(map(tuple, shapes)),
            **agreed,
        )  # fmt: skip

    def _request(
        self, signature: Signature, arrays: Sequence[Array], convert: Convert = None, mirrors: Mirrors = ()
    ) -> Request:
        """Return an operation that is called now."""
        name, thread = signature.name, self._thread
        if name:
            self.repeated.add(name)
        handle = Handle(name or signature.verb, None if thread is None else thread.wait, convert)
        request = Request(signature, arrays, handle, site=call_site())
        request.mirrors = mirrors
        return request

    def _submit(self, request: Request, urgent: bool) -> Handle:
        if self._thread is not None:
            return self._thread.submit(request, urgent)
        result = self._single.run(request)
        request.handle.absent = request.absent
        request.handle.finish(result)
        return request.handle
