"""The compressors for ``compression=``, for every framework, error feedback, and the automatic choice.

Error feedback adds the compression error of each gradient to the next one. These residuals belong to
parameters by name, so they survive new buckets, and a program can save them. Every rank has other residuals.
"""

from __future__ import annotations

import logging
import time
from math import prod
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, number_of, size_of
from ..collective.measure import CHOSEN_CODECS, Rates, code_s, measured_rates
from ..configuration.settings import use
from ..dtypes import Array
from ..errors import ConfigError
from ..ops import BLOCKWISE, ENCODED, HALVES, ReduceOp
from ..schedule.cost import CostModel, best_allreduce, grid

logger = logging.getLogger(__name__)

__all__ = [
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
    "NoneCompressor",
]  # fmt: skip

_WIDE = ("float32", "float64")


def wire_dtype(compression: str, dtype: str) -> Optional[str]:
    """Return the dtype in which float32 and float64 are sent; None: their own."""
    return HALVES.get(compression) if dtype in _WIDE else None


def dtype_name(tensor: Any) -> str:
    dtype = tensor.dtype
    if isinstance(dtype, type):  # MXNet's: numpy.float32 itself
        return dtype.__name__
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


Cast = Callable[[Any, Any], Any]

_casts: List[Tuple[type, Cast]] = []


def register_cast(kind: type, cast: Cast) -> None:
    """Register a conversion to another dtype for tensors that have no ``astype()`` as NumPy's arrays do."""
    _casts.append((kind, cast))


def _cast(tensor: Any, dtype: Any) -> Any:
    for kind, cast in _casts:
        if isinstance(tensor, kind):
            return cast(tensor, dtype)
    return tensor.astype(dtype)


class Compressor:
    """Base class of compressors, which convert a tensor before it is sent and back after it was received."""

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Return the tensor to send, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original dtype; ``ctx`` is from :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors in their own dtype."""

    kind = "none"

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Return a float32 or float64 tensor as this compressor's dtype, and its dtype or None."""
        smaller = wire_dtype(cls.kind, dtype_name(tensor))
        return (tensor, None) if smaller is None else (_cast(tensor, smaller), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Convert a tensor back to its original dtype ``ctx``; None: leave it."""
        return tensor if ctx is None else _cast(tensor, ctx)


class FP16Compressor(NoneCompressor):
    """Send float32 and float64 as float16: 11 bits of precision, largest value 65504."""

    kind = "fp16"


class BF16Compressor(NoneCompressor):
    """Send float32 and float64 as bfloat16: 8 bits of precision, the range of float32."""

    kind = "bf16"


class _GradientCompressor(NoneCompressor):
    """A compression that the reduction itself executes, because sums of what is sent have no meaning."""

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        """Raise ConfigError: the compressor must be passed to a reduction."""
        raise ConfigError(
            f"Compression {cls.kind} has no compress(): codes cannot be added. Pass it as compression= to "
            "allreduce(), reducescatter(), DistributedOptimizer or DistributedGradientTape."
        )


class Int8Compressor(_GradientCompressor):
    """Send gradients of matrices as int8 (a scale per 256), others as bfloat16, with error feedback."""

    kind = "int8"


class Int4Compressor(_GradientCompressor):
    """Send gradients of matrices as int4 (a scale per 256), others as bfloat16, with error feedback."""

    kind = "int4"


class Compression:
    """The compressors for ``compression=``.

    Attributes:
        none: sends tensors in their own dtype.
        fp16: sends float32 and float64 as float16.
        bf16: sends float32 and float64 as bfloat16.
        int8: sends gradients of matrices in a quarter of the bytes of float32, with error feedback.
        int4: sends gradients of matrices in an eighth of the bytes, with error feedback.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor


_NAMED: Dict[str, Any] = {
    kind.kind: kind
    for kind in (NoneCompressor, FP16Compressor, BF16Compressor, Int8Compressor, Int4Compressor)
}
for _codec in ENCODED.difference(_NAMED):
    _NAMED[_codec] = type(f"{_codec.title()}Compressor", (_GradientCompressor,), {"kind": _codec})
    setattr(Compression, _codec, _NAMED[_codec])

# Smaller gradients are sent as bfloat16: they have few bytes, and biases and scales of normalization lose
# most by coarse rounding.
MIN_ITEMS = 4096


def compressor_of(compression: Any) -> Any:
    """Return the compressor for ``compression=``: a compressor, a name, or None; else ConfigError."""
    if compression is None:
        return NoneCompressor
    if hasattr(compression, "compress") or hasattr(compression, "kind"):
        return compression
    if not isinstance(compression, str) or compression not in _NAMED:
        raise ConfigError(
            f"compression={compression!r}: there are {', '.join(map(repr, _NAMED))}, and objects with "
            "compress() and decompress(), such as Compression.fp16."
        )
    return _NAMED[compression]


def codec_for(compression: Any, dtype: str, shape: Sequence[int]) -> str:
    """Return the codec of a gradient, or ``"none"`` if the reduction does not encode it."""
    kind = getattr(compression, "kind", "")
    if kind not in ENCODED or dtype not in _WIDE:
        return "none"
    is_small = len(shape) < 2 or prod(shape) < MIN_ITEMS
    return "bf16" if kind in BLOCKWISE and is_small else str(kind)


def is_elementwise(compression: Any) -> bool:
    """Return whether a compressor can be applied to several concatenated tensors: all of ringcomm's can."""
    return compression in _NAMED.values()


class Residuals:
    """The residuals of one rank, float32, by parameter name."""

    def __init__(self) -> None:
        self._arrays: Dict[str, Array] = {}

    def of(self, name: str, items: int) -> Array:
        """Return the flat residual of a parameter; zeros at first."""
        known = self._arrays.get(name)
        if known is None or known.size != items:
            known = self._arrays[name] = np.zeros(items, np.float32)
        return known

    def side_by_side(
        self, names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], count: int
    ) -> Array:
        """Return residuals in one array of ``count`` elements, which replaces the separate ones."""
        whole = np.zeros(count, np.float32)
        for name, items, start in zip(names, sizes, starts):
            part = whole[start : start + items]
            part[:] = self.of(name, items)
            self._arrays[name] = part
        return whole

    def drop(self, names: Sequence[str]) -> None:
        """Forget the residuals of some parameters."""
        for name in names:
            self._arrays.pop(name, None)

    def reset(self, why: str) -> None:
        """Forget all residuals, and log that in one line if there were any."""
        reset_all([self], why)

    def scale(self, factor: float) -> None:
        """Multiply all residuals, for example after the scale of losses has changed by that factor."""
        for array in self._arrays.values():
            np.multiply(array, np.float32(factor), out=array)

    def state(self) -> Dict[str, Array]:
        """Return copies by parameter name, for a checkpoint of this rank."""
        return {name: array.copy() for name, array in self._arrays.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Continue with the residuals of :meth:`state`; parameters that are not in it start with zeros."""
        for name, array in self._arrays.items():
            array[:] = state[name] if name in state and state[name].size == array.size else 0
        for name, given in state.items():
            if name not in self._arrays:
                self._arrays[name] = np.array(given, np.float32).reshape(-1)


def reset_all(residuals: Sequence[Residuals], why: str) -> None:
    """Forget the residuals of several groups of parameters, and log that in one line if there were any."""
    arrays = [array for item in residuals for array in item._arrays.values()]
    lost = sum(1 for array in arrays if array.any())
    for array in arrays:
        array[:] = 0
    if lost:
        logger.info("error feedback of %d parameters is dropped: %s", lost, why)


# ---- compression="auto" ------------------------------------------------------------------------------------

# It predicts from measurements which compression makes a training step shortest. All ranks first train some
# steps without compression and time them. Then they exchange the slowest rank's times, so all have the same
# numbers and make the same choice. The predictions are
#
#     wait    = time of sending beyond the backward pass, from which each reduction's start is known
#     step    = computing + encoding and decoding + wait
#
# with codec rates measured here and the link rates measured when the job started, corrected so that they
# explain the wait of the timed steps. Compression is chosen only for a predicted gain of at least 5 %, and
# nothing lossier than int8 with error feedback.
#
# Later all ranks check now and then how fast the links are, from the time that the reductions of a step took.
# If that has changed they choose again. In a new view of an elastic job they start over.

MIN_GAIN = 0.05
STEPS = 6  # steps without compression before the choice; the first is not timed
AGAIN = 50  # steps between two checks of the links, after the choice
FAR_S, FAR_BYTE_S = 0.005, 1 / 6.25e6  # latency, and time of a byte, of links that leave a building
_MUCH = 0.7  # a step must be this part of what it was for users to be told
CHANGED = 1.5  # least factor of a change of the links for another choice
COMPRESSORS = {name: _NAMED[name] for name in ("none", *CHOSEN_CODECS)}
_MAX_CHANGE = 4096.0
_MAX_ERROR = 2.0  # largest error of the links' calibration; a longer wait is not due to bytes


class StepTime(NamedTuple):
    """A training step without compression, in seconds."""

    period_s: float  # from the end of one step to the end of the next
    wait_s: float  # of that, waiting for reductions after the backward pass
    overlap_s: float  # from the first reduction's start to the end of the backward pass
    # of each reduction: seconds after the first one, and float32 bytes; empty: all at once
    arrivals: Tuple[Tuple[float, float], ...] = ()


class Links(NamedTuple):
    """The network as a gradient sees it."""

    size: int
    local_size: int  # ranks per host
    byte_s: float  # per byte of the slowest interface, each way
    latency_s: float  # of a message


class Choice(NamedTuple):
    """The chosen compression, and the predicted seconds per step."""

    name: str
    steps_s: Dict[str, float]  # by name

    def describe(self) -> str:
        """Return the choice in one line, like ``int8: step 1.90 s -> 1.10 s predicted``."""
        plain, others = self.steps_s["none"], {k: v for k, v in self.steps_s.items() if k != "none"}
        best = min(others, key=lambda name: others[name])
        if self.name == "none":
            return f"none: step {plain:.3g} s, {best} {others[best]:.3g} s predicted, a gain of less than 5 %"
        return f"{self.name}: step {plain:.3g} s -> {self.steps_s[self.name]:.3g} s predicted"


def links_of(model: Optional[CostModel], size: int) -> Links:
    """Return the network of a job, from its calibration; a fast one if nothing was measured."""
    if model is None or size < 2:
        return Links(size, 1, 0.25e-9, 20e-6)
    if not model.hosts:
        return Links(size, size, model.byte_s, model.latency_s)
    local = max(model.hosts.count(host) for host in set(model.hosts))
    return Links(size, local, max(model.wire_byte_s), model.wire_latency_s)


def send_s(name: str, nbytes: float, links: Links) -> float:
    """Return the seconds of an all-reduce of gradients of ``nbytes`` in float32."""
    hosts = grid(links.size, links.local_size)
    model = CostModel(
        links.latency_s, links.byte_s, 0.0, wire_latency_s=links.latency_s,
        wire_byte_s=(links.byte_s,) * len(hosts),
    )  # fmt: skip
    return best_allreduce(nbytes, model, hosts, "float32" if name == "none" else name)[1]


def exposed_s(name: str, nbytes: float, step: StepTime, links: Links) -> float:
    """Return the time of sending beyond the backward pass; reductions run one after the other."""
    return _exposed_s(step, _reductions(name, nbytes, step, links))


def _reductions(name: str, nbytes: float, step: StepTime, links: Links) -> List[Tuple[float, float]]:
    """Return the start of each reduction of a step, and the seconds that the network needs for it."""
    return [(at_s, send_s(name, part, links)) for at_s, part in step.arrivals or ((0.0, nbytes),)]


def _exposed_s(step: StepTime, reductions: Sequence[Tuple[float, float]], factor: float = 1.0) -> float:
    """Return the wait for these reductions if links take ``factor`` times as long."""
    end_s = 0.0
    for started_s, sent_s in reductions:
        end_s = max(end_s, started_s) + factor * sent_s
    return max(0.0, end_s - step.overlap_s)


def fitted(name: str, nbytes: int, step: StepTime, links: Links, most: float = _MAX_CHANGE) -> Links:
    """Return the links with which a step with this compression waits as long as it did; the present ones if
    they explain the wait to 5 % of the step. Without a wait: the slowest links with which it would not have
    waited. So from a compression that hides everything there is no way back to float32, which may not.
    """
    reductions = _reductions(name, nbytes, step, links)
    if abs(_exposed_s(step, reductions) - step.wait_s) <= 0.05 * step.period_s:
        return links
    low, high = 1 / most, most
    for _ in range(40):
        middle = (low * high) ** 0.5
        if _exposed_s(step, reductions, middle) <= step.wait_s:
            low = middle
        else:
            high = middle
    return links._replace(byte_s=links.byte_s * low, latency_s=links.latency_s * low)


def choose(nbytes: int, step: StepTime, links: Links, rates: Dict[str, Rates]) -> Choice:
    """Return the compression with the shortest predicted step; ``nbytes`` is that of float32."""
    computing_s = max(0.0, step.period_s - step.wait_s)
    steps_s = {}
    for name in COMPRESSORS:
        coding_s = code_s(nbytes, links.size, rates.get(name))
        steps_s[name] = computing_s + coding_s + exposed_s(name, nbytes, step, links)
    best = min(steps_s, key=lambda name: steps_s[name])
    gains = steps_s[best] <= (1 - MIN_GAIN) * steps_s["none"]
    return Choice(best if gains else "none", steps_s)


def choose_again(
    name: str, nbytes: int, step: StepTime, links: Links, rates: Dict[str, Rates]
) -> Tuple[Links, Optional[Choice]]:
    """Return the links that a step with a compression shows, and another choice if they have changed."""
    changed = fitted(name, nbytes, step, links)
    if links.byte_s / CHANGED <= changed.byte_s <= links.byte_s * CHANGED:
        return links, None
    plain = step._replace(period_s=step.period_s - code_s(nbytes, links.size, rates.get(name)))
    choice = choose(nbytes, plain, changed, rates)
    return changed, choice if choice.name != name else None


class AutoCompression:
    """Time the first steps of an optimizer, then choose for all ranks; ``advises``: only tell the user."""

    kind = "auto"

    def __init__(self, process_set: ProcessSet, advises: bool = False) -> None:
        self.advises = advises
        self.chosen: Any = Compression.none
        self.choice: Optional[Choice] = None  # the prediction, once it is chosen
        self._process_set = process_set
        self._steps: List[StepTime] = []
        self._first_s = 0.0
        self._last_end_s = 0.0
        self._arrivals: List[Tuple[float, float]] = []
        self._context: Any = None
        self._joins = 0
        self._links = Links(1, 1, 0.0, 0.0)
        self._rates: Dict[str, Rates] = {}
        self._other_s = 0.0  # of a step's wait what does not depend on the bytes

    def current(self) -> Any:
        """Return the compressor in use; none until all ranks have chosen again, in a new view of the job and
        after join(), before which ranks have made different numbers of steps.
        """
        context = api.context()
        if context is not self._context or context.engine.joins != self._joins:
            if self._context is not None:
                self.restart()
            self._context, self._joins = context, context.engine.joins
        return self.chosen

    def submitting(self, nbytes: float) -> None:
        """Record that a reduction of ``nbytes`` of float32 is about to start."""
        if self.advises and self.choice is not None:
            return
        now_s = time.perf_counter()
        if not self._first_s:
            self._first_s = now_s
            self._arrivals.clear()
        self._arrivals.append((now_s - self._first_s, nbytes))

    def finished(self, nbytes: int, waited_from_s: float) -> bool:
        """Take the end of a step's reductions of ``nbytes`` of float32; return whether the choice changes."""
        if self.advises and self.choice is not None:
            return False
        now_s = time.perf_counter()
        if self._last_end_s:  # also a step in which this rank reduced nothing: all ranks count the same steps
            overlap_s = max(0.0, waited_from_s - self._first_s) if self._first_s else 0.0
            arrivals = tuple(self._arrivals) if self._first_s else ()
            self._steps.append(StepTime(now_s - self._last_end_s, now_s - waited_from_s, overlap_s, arrivals))
        self._first_s, self._last_end_s = 0.0, now_s
        if len(self._steps) < (STEPS if self.choice is None else AGAIN):
            return False
        step, nbytes = self._agree(nbytes)
        self._steps.clear()
        self._last_end_s = time.perf_counter()
        return self._look_again(nbytes, step) if self.choice is not None else self._choose(nbytes, step)

    def _choose(self, nbytes: int, step: StepTime) -> bool:
        measured = links_of(api.context().cost_model, size_of(self._process_set))
        self._links = fitted("none", nbytes, step, measured, _MAX_ERROR)
        self._other_s = max(0.0, step.wait_s - exposed_s("none", nbytes, step, self._links))
        step = step._replace(wait_s=step.wait_s - self._other_s)
        choice = self.choice = choose(nbytes, step, self._links, self._rates)
        if self.advises:
            self._advise(step, choice)
            return False
        self.chosen = COMPRESSORS[choice.name]
        if api.rank() == 0:
            logger.warning("compression=auto chooses %s", choice.describe())
        return choice.name != "none"

    def _advise(self, step: StepTime, choice: Choice) -> None:
        least_s = step.period_s - step.wait_s
        if min(least_s, choice.steps_s[choice.name]) < _MUCH * choice.steps_s["none"]:
            text = (
                f"the links between hosts are slow: ranks wait for {step.wait_s:.2g} s in each step. With "
                f"--compress auto they would choose {choice.describe()}. With --local-steps auto they would "
                f"exchange less often: down to {least_s:.2g} s per step. Both change "
                "results a little (docs/slow_links.md); --compress none ends this advice."
            )
            api.context().announce("slow links", text)

    def _look_again(self, nbytes: int, step: StepTime) -> bool:
        step = step._replace(wait_s=max(0.0, step.wait_s - self._other_s))
        links, choice = choose_again(self.chosen.kind, nbytes, step, self._links, self._rates)
        faster, self._links = links.byte_s < self._links.byte_s, links
        if choice is None:
            return False
        self.choice, self.chosen = choice, COMPRESSORS[choice.name]
        if api.rank() == 0:
            what = "faster" if faster else "slower"
            logger.warning("compression=auto: links are %s now, and it chooses %s", what, choice.describe())
        return True

    def restart(self) -> None:
        """Measure and choose again; on all ranks, before the same step."""
        self.chosen, self.choice = Compression.none, None
        self._steps, self._first_s, self._last_end_s = [], 0.0, 0.0

    def _agree(self, nbytes: int) -> Tuple[StepTime, int]:
        """Return the slowest rank's times and the most bytes, and keep its codecs' rates: alike on all."""
        own = [sorted(item)[len(self._steps) // 2] for item in zip(*(step[:3] for step in self._steps))]
        arrivals: Sequence[Tuple[float, float]] = self._steps[-1].arrivals
        rates = measured_rates() if self.choice is None else self._rates
        flat = [value for name in sorted(rates) for value in rates[name]]
        # A rank that had no gradient for a bucket, or divided one, had another number of reductions.
        most, nbytes = map(int, self._maximum([len(arrivals), nbytes], "ringcomm.auto.reductions"))
        if arrivals:
            arrivals = [arrivals[place * len(arrivals) // most] for place in range(most)]
        else:
            arrivals = [(0.0, 0.0)] * most
        # The shortest overlap and the shortest wait count: the rank that waits longest has computed least.
        starts, sizes = ([item[place] for item in arrivals] for place in (0, 1))
        numbers = self._maximum([own[0], -own[1], -own[2], *flat, *starts, *sizes], "ringcomm.auto")
        last = 3 + len(flat)
        pairs = zip(numbers[3:last:2], numbers[4:last:2])
        self._rates = {name: Rates(*pair) for name, pair in zip(sorted(rates), pairs)}
        together = zip(numbers[last : last + most], numbers[last + most :])
        return StepTime(numbers[0], -numbers[1], -numbers[2], tuple(together)), nbytes

    def _maximum(self, numbers: Sequence[float], name: str) -> List[float]:
        """Return the largest of each number over the ranks, which must give equally many. Advice is by the
        numbers of rank 0 alone: others need not come here in the same step, nor at all.
        """
        if self.advises:
            return list(map(float, numbers))
        array = np.array(numbers, np.float64)
        api.context().engine.allreduce(
            [array], ReduceOp.MAX, name, process_set=number_of(self._process_set), urgent=True
        ).wait()
        return [float(number) for number in array]


def adviser(compression: Any, process_set: ProcessSet) -> Optional[AutoCompression]:
    """Return what tells the user of slow links, if these are and nothing says how gradients are sent."""
    links = links_of(api.context().cost_model, size_of(process_set))
    if compression is not Compression.none or api.placed().settings.compression:
        return None
    is_far = links.latency_s > FAR_S or links.byte_s > FAR_BYTE_S
    return AutoCompression(process_set, advises=True) if is_far and api.rank() == 0 else None


def configured(compression: Any, process_set: ProcessSet) -> Any:
    """Return the compressor for a program's argument; for ``Compression.none`` the settings decide."""
    if compression is Compression.none and api.is_initialized():
        compression = api.placed().settings.compression or compression
        use("compression")
    if compression == "auto":
        return AutoCompression(process_set)
    return compressor_of(compression)


def refuse_local_steps() -> None:
    """Raise ConfigError if the settings ask for local steps, which the optimizer cannot make."""
    if api.is_initialized() and api.placed().settings.local_steps:
        raise ConfigError(
            "--local-steps (RINGCOMM_LOCAL_STEPS) works with PyTorch's DistributedOptimizer only. Leave it "
            "out."
        )
