import os
import subprocess
import sys

import numpy as np
import pytest

from blockcompact_jax.kernels import NativeModuleError, build_info
from blockcompact_jax.kernels.native import load_native
from blockcompact_jax.kernels.status import KernelCode, KernelStatusError, raise_for_status


def run_forced(name, directory):
    code = "from blockcompact_jax.kernels import build_info; print(build_info()['simd_chosen'])"
    environment = os.environ | {"BLOCKCOMPACT_FORCE_IMPL": name}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=directory,  # beside the sources they would hide the installed package
        capture_output=True,
        text=True,
        check=False,
    )


def test_build_info_names_every_fact():
    info = build_info()
    assert set(info) == {
        "version",
        "compiler",
        "simd_compiled",
        "simd_available",
        "simd_chosen",
        "cuda",
    }
    assert info["simd_compiled"][0] == "scalar"
    assert set(info["simd_available"]) <= set(info["simd_compiled"])
    assert info["cuda"].startswith(("compiled: CUDA", "not compiled: "))


def test_the_best_available_implementation_is_chosen():
    if "BLOCKCOMPACT_FORCE_IMPL" in os.environ:
        pytest.skip("an implementation is forced")
    assert build_info()["simd_chosen"] == build_info()["simd_available"][-1]


def test_a_forced_implementation_is_used(tmp_path):
    assert run_forced("scalar", tmp_path).stdout.strip() == "scalar"


def test_an_unknown_forced_implementation_is_refused_with_a_sentence(tmp_path):
    result = run_forced("avx1024", tmp_path)
    assert result.returncode != 0
    assert "BLOCKCOMPACT_FORCE_IMPL names the unknown implementation 'avx1024'" in result.stderr
    assert "scalar" in result.stderr


def test_force_impl_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="unknown implementation 'neon'"):
        load_native().force_impl("neon")


def test_a_missing_module_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "blockcompact_jax._native", None)
    with pytest.raises(NativeModuleError, match="pip install"):
        load_native.__wrapped__()


def test_every_code_has_a_sentence():
    for code in KernelCode:
        assert code.sentence.endswith(".")


def test_raise_for_status_names_call_row_and_values():
    status = np.array([KernelCode.TO_BLOCK_OUT_OF_RANGE, 1], np.int32)
    with pytest.raises(
        KernelStatusError, match=r"pool_upload: .*Row 1 has physical_block = 9\."
    ) as e:
        raise_for_status(status, call="pool_upload", physical_block=np.array([3, 9], np.int32))
    assert e.value.code is KernelCode.TO_BLOCK_OUT_OF_RANGE
    assert e.value.row == 1


def test_raise_for_status_lets_ok_pass_and_refuses_other_arrays():
    raise_for_status(np.array([0, -1], np.int32))
    with pytest.raises(ValueError, match="status"):
        raise_for_status(np.zeros(2, np.int64))
