"""Arrays of the libraries that use a GPU, for the suite of `tests.support.device_contract`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.device_contract import Lab


class TorchLab(Lab):
    """CUDA tensors."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("torch has no CUDA device here")

    def array(self, values):
        values = np.array(values)
        if values.dtype.name == "bfloat16":
            return self.torch.from_numpy(values.view(np.int16)).view(self.torch.bfloat16).cuda()
        return self.torch.from_numpy(values).cuda()

    def numpy(self, array):
        if array.dtype == self.torch.bfloat16:
            import ml_dtypes

            return array.view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()

    def add_slowly(self, array, number):
        self.torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        array.add_(number)

    def strided(self, values):
        return self.array(np.ascontiguousarray(values.T)).t()


class CupyLab(Lab):
    """CuPy's arrays; it has no bfloat16."""

    dtypes = ("float32", "float64", "float16", "int32", "int64", "uint8")

    def __init__(self):
        self.cupy = pytest.importorskip("cupy")
        try:
            self.cupy.cuda.runtime.getDeviceCount()
        except self.cupy.cuda.runtime.CUDARuntimeError as problem:
            pytest.skip(f"CuPy has no CUDA device here: {problem}")
        self._spin = self.cupy.RawKernel(
            'extern "C" __global__ void spin()'
            "{ long long t = clock64(); while (clock64() - t < 100000000); }",
            "spin",
        )

    def array(self, values):
        return self.cupy.asarray(values)

    def numpy(self, array):
        return array.get()

    def add_slowly(self, array, number):
        self._spin((1,), (1,), ())
        array += array.dtype.type(number)

    def strided(self, values):
        return self.array(np.ascontiguousarray(values.T)).T


class Exported:
    """An array of which only DLPack is known, as of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __getitem__(self, index):
        return Exported(self.array[index])


class DlpackLab(Lab):
    """CUDA tensors that are known by DLPack only. Results are arrays of CuPy or PyTorch."""

    dtypes = ("float32", "int64")

    def __init__(self):
        self._torch = TorchLab()

    def array(self, values):
        return Exported(self._torch.array(values))

    def numpy(self, array):
        array = getattr(array, "array", array)
        return array.get() if hasattr(array, "get") else self._torch.numpy(array)

    def add_slowly(self, array, number):
        self._torch.add_slowly(array.array, number)

    def strided(self, values):
        return Exported(self._torch.strided(values))


LABS = (TorchLab, CupyLab, DlpackLab)
