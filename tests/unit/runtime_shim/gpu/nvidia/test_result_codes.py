"""Every result of CUDA and NVML becomes one of our exceptions, in words that Podman passes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import GpusnapError, with_code
from gpusnap.runtime_shim.gpu.api import errors
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed, GpuError
from gpusnap.runtime_shim.gpu.nvidia import result_codes

CUDA_H = Path("/usr/local/cuda/include/cuda.h")

# Podman turns a message with any of these into one of its own (libpod, getOCIRuntimeError).
SWALLOWED = re.compile(
    r"permission denied|no such file or directory|executable file not found", re.IGNORECASE
)

CLASSES = [v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(kind.__name__ for kind in CLASSES)
    for kind in CLASSES:
        assert issubclass(kind, GpuError)
        assert issubclass(kind, GpusnapError)


@pytest.mark.parametrize("kind", CLASSES)
def test_words_of_each_class(kind: type[GpuError]) -> None:
    assert kind.because
    assert kind.advice
    assert not SWALLOWED.search(kind.because + kind.advice)
    error = kind("what happened", hint="do this", code_name="CUDA_ERROR_X", pid=7)
    assert (error.code_name, error.pid) == ("CUDA_ERROR_X", 7)
    assert error.sentence() == with_code("what happened; do this", kind.code)
    assert bool(kind.code) is (kind is not GpuError)
    assert kind("what happened").code_name == ""


def test_no_result_of_cuda_bindings_is_left_out() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    theirs = {int(m): m.name for m in driver.CUresult if m.name != "CUDA_SUCCESS"}
    ours = {number: name for number, (name, _) in result_codes.CUDA_RESULTS.items()}
    # An older cuda-bindings may know fewer; what it knows, we have under the same name.
    assert theirs.items() <= ours.items()


@pytest.mark.skipif(not CUDA_H.exists(), reason="needs the CUDA toolkit's cuda.h")
def test_no_result_of_cuda_h_is_left_out() -> None:
    theirs = {
        int(number): name
        for name, number in re.findall(r"^\s+(CUDA_ERROR_\w+)\s*=\s*(\d+)", CUDA_H.read_text(), re.MULTILINE)
    }
    assert len(theirs) >= 100
    assert theirs.items() <= {n: name for n, (name, _) in result_codes.CUDA_RESULTS.items()}.items()


def test_no_nvml_error_is_left_out() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    theirs = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert theirs.items() <= {n: name for n, (name, _) in result_codes.NVML_RESULTS.items()}.items()


@pytest.mark.parametrize("result", sorted(result_codes.CUDA_RESULTS))
def test_cuda_error_says_what_who_and_why(result: int) -> None:
    name, kind = result_codes.CUDA_RESULTS[result]
    error = result_codes.cuda_error(result, "lock process 7 (python3)", pid=7)
    assert type(error) is kind
    assert (error.code_name, error.pid) == (name, 7)
    assert (
        str(error) == f"the GPU driver could not lock process 7 (python3): {kind.because} ({name}, {result})"
    )
    assert error.hint


@pytest.mark.parametrize("value", sorted(result_codes.NVML_RESULTS))
def test_nvml_error_says_what_and_why(value: int) -> None:
    name, kind = result_codes.NVML_RESULTS[value]
    error = result_codes.nvml_error(value, "count the GPUs")
    assert type(error) is kind
    assert error.code_name == name
    assert str(error).startswith("NVML could not count the GPUs: ")
    assert error.hint


def test_a_number_of_a_driver_to_come() -> None:
    error = result_codes.cuda_error(4242, "lock process 7 (x)")
    assert type(error) is DriverFailed
    assert "4242" in str(error)
    named = result_codes.cuda_error(4242, "lock process 7 (x)", name="CUDA_ERROR_NEW")
    assert named.code_name == "CUDA_ERROR_NEW"
    assert "(CUDA_ERROR_NEW, 4242)" in str(named)
    assert type(result_codes.nvml_error(4242, "start")) is DriverFailed
    assert "4242" in str(result_codes.nvml_error(4242, "start"))


def test_the_caller_may_know_better() -> None:
    kind = result_codes.CUDA_RESULTS[801][1]
    error = result_codes.cuda_error(801, "checkpoint it", because={kind: "of this"}, hints={kind: "do that"})
    assert str(error) == "the GPU driver could not checkpoint it: of this (CUDA_ERROR_NOT_SUPPORTED, 801)"
    assert error.hint == "do that"
