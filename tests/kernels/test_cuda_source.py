"""The text for GPUs: as agreed, and such that NVIDIA's compiler makes of it what IEEE 754 says."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.kernels import Rule, Spans, build
from aiops.kernels.cuda_fragments import KEYWORDS, OPTIONS, spelt
from aiops.kernels.cuda_source import ArrayTypes, text
from aiops.kernels.device import Device, KernelSource
from aiops.kernels.device_operations import narrow_text, spread_text, squares_text
from aiops.kernels.rule_parser import parse
from aiops.kernels.trimmed_mean import trimmed_mean
from aiops.kernels.vocabulary import where
from benchmarks.kernels import rules
from tests.kernels.lifted import Lifted
from tests.kernels.rules import EVERYTHING, FASGD, bits
from tests.rows import each_row

FOLDER = Path(__file__).parent / "golden"
SINGLE = ArrayTypes("float32", "float32", "float32")
SPECIAL = {
    "float64": ArrayTypes("float64", "float64", "float64"),
    "float16": ArrayTypes("float32", "float16", "float16"),
    "bfloat16": ArrayTypes("float32", "bfloat16", "bfloat16"),
    **{
        name: ArrayTypes("float32", "float32", name, packed=True)
        for name in ("raw", "fp16", "bf16", "int8", "onebit")
    },
}


def agreed() -> dict[str, KernelSource]:
    """Every built-in rule over float32, and what shows all else, by the name of its file."""
    found = {f"{name}_float32": text(parse(rule), SINGLE) for name, rule in rules().items()}
    fasgd = rules()["fasgd"]
    found |= {f"fasgd_{name}": text(parse(fasgd), kinds) for name, kinds in SPECIAL.items()}
    found["trimmed_mean_5_1_float32"] = text(parse(trimmed_mean(5, 1)), SINGLE)
    found["everything_float16"] = text(parse(EVERYTHING), SPECIAL["float16"])
    found |= {f"squares_{name}": squares_text(name) for name in ("float32", "bfloat16")}
    found |= {f"narrow_{name}": narrow_text(name) for name in ("float16", "bfloat16")}
    for form in ("int8", "bf16"):
        found[f"topk_{form}_count"], found[f"topk_{form}"] = spread_text(form)
    return found


AGREED = agreed()


@each_row("name", AGREED)
def test_the_text_is_as_agreed(name: str) -> None:
    """Read the difference; if it is meant, run ``make golden``."""
    assert AGREED[name].source == (FOLDER / f"{name}.cu").read_text()


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(AGREED)


def test_the_text_is_the_same_for_other_values_of_the_constants() -> None:
    other = Rule(FASGD.function, FASGD.state, dict.fromkeys(FASGD.constants, 0.5), "v")
    assert text(parse(other), SINGLE) == text(parse(FASGD), SINGLE)


def names(w, g, new, γ, real, step, threadIdx, double, NAN):
    short = g * new
    signed = short < double
    delete = where(signed, γ, double)
    signed = short - delete
    return w - step * signed * threadIdx * NAN, new + double, γ, real


def test_names_that_c_gives_another_meaning(device: Device) -> None:
    """A name may even be a comparison first and a number afterwards."""
    state = {"new": 0.5, "γ": 2.0, "real": 3.0}
    constants = {"threadIdx": 0.3, "double": 0.7, "NAN": 1.1}
    rule = Rule(names, state, constants)
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(70).astype(np.float32) for _ in range(5)]
    found = []
    for kernel in (build(rule, np.float32, "numpy"), Lifted(rule, np.float32, device)):
        w, g, *kept = (array.copy() for array in arrays)
        kernel(Spans.whole(70, 0.1), 1.0, w, g, w, kept)
        found.append([bits(array) for array in (w, *kept)])
    assert found[0] == found[1]


def test_a_name_stays_as_it_is_where_it_can() -> None:
    assert {spelt(name) for name in ("gamma", "n", "step")} == {"gamma", "n", "step"}
    mangled = {spelt(name) for name in (*KEYWORDS, "γ", "NULL")}
    assert len(mangled) == len(KEYWORDS) + 2
    assert all(re.fullmatch("_x[0-9a-f]+", name) for name in mangled)


# ---------------------------------------------------------------- NVIDIA's compiler


def library() -> Path | None:
    """Where NVRTC lies, if a package has brought it (``pip install nvidia-cuda-nvrtc-cu12``)."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for found in Path(place).glob("*/lib/libnvrtc.so.*"):
            if "builtins" not in found.name and "alt" not in found.name:
                return found
    return None


NVRTC = library()
needs_nvrtc = pytest.mark.skipif(
    NVRTC is None, reason="there is no NVRTC here: pip install nvidia-cuda-nvrtc-cu12"
)


class Nvrtc:
    """The compiler, which needs no GPU."""

    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(str(path))

    def ptx(self, source: str, architecture: int) -> str:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        call: Any = self._calls
        given = [*OPTIONS, f"--gpu-architecture=compute_{architecture}"]
        options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        encoded = source.encode()
        assert not call.nvrtcCreateProgram(ctypes.byref(program), encoded, b"", 0, None, None)
        failed = call.nvrtcCompileProgram(program, len(given), options)
        call.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call.nvrtcGetProgramLog(program, log)
        assert not failed, f"{log.value.decode()}\n{source}"
        call.nvrtcGetPTXSize(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        call.nvrtcGetPTX(program, found)
        call.nvrtcDestroyProgram(ctypes.byref(program))
        return found.value.decode()


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    assert NVRTC is not None
    return Nvrtc(NVRTC)


@needs_nvrtc
@each_row("architecture", [75, 80, 86, 89, 90])
@each_row("name", AGREED)
def test_nvidia_compiles_it_exactly(nvrtc: Nvrtc, name: str, architecture: int) -> None:
    """Nothing is contracted, approximated or flushed, and float32 is nowhere widened."""
    code = nvrtc.ptx(AGREED[name].source, architecture)
    assert not re.search(r"\bfma\.|\bmad\.f|\.approx|\.ftz|\brcp\.|\brsqrt\.|\.full\.", code)
    for word in ("div", "sqrt"):
        assert all(kind == "rn" for kind in re.findall(rf"\b{word}\.(\w+)\.f\d\d", code))
    if "typedef float" in AGREED[name].source:
        assert not re.search(r"\b(add|sub|mul|div|sqrt|setp\.\w+)(\.rn)?\.f64", code)
    if name == "fasgd_float32":
        assert {"div.rn.f32", "sqrt.rn.f32"} <= set(re.findall(r"\b[a-z]+\.rn\.f32", code))


if __name__ == "__main__":
    for path in FOLDER.glob("*.cu"):
        path.unlink()
    for name, each in AGREED.items():
        (FOLDER / f"{name}.cu").write_text(each.source)
