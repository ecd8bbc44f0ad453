"""The CUDA component as far as a machine without a device shows it: lowering, import, refusals.

What the kernels compute is tested in C++ (`grid_test.cc`), on the CPU. On a device, the `gpu` tests
here and `benchmarks/gpu_check.py` run them.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockcompact_jax import kernels
from blockcompact_jax.kernels import Layout, NativeModuleError, build_info
from blockcompact_jax.kernels.native import load_cuda, load_native
from blockcompact_jax.scores import BlockReduction

from .helpers import assert_same_bytes, column, random_blocks

BLOCKS = jax.ShapeDtypeStruct((3, 8, 2, 2, 32, 64), np.uint16)
ROWS = jax.ShapeDtypeStruct((3, 5, 2, 64, 64), np.uint16)
QUERIES = jax.ShapeDtypeStruct((4, 3, 64), jnp.bfloat16)
KEYS = jax.ShapeDtypeStruct(ROWS.shape, jnp.bfloat16)
NUMBER = jax.ShapeDtypeStruct((1,), np.int32)
COLUMN = jax.ShapeDtypeStruct((4,), np.int32)
LAYOUTS = {"layout": Layout.AMX, "pool_layout": Layout.PLAIN_HND}
IS_COMPILED = build_info()["cuda"].startswith("compiled")
GPU_CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"

needs_component = pytest.mark.skipif(not IS_COMPILED, reason=f"CUDA is {build_info()['cuda']}")


def upload(pool, packed, *columns):
    layer, source, target, valid = columns
    return kernels.unpack_scatter(pool, packed, source, target, valid, layer=layer, **LAYOUTS)


def move(pool, layer, source, target):
    return kernels.block_move(pool, source, target, layer=layer)


def gather(pool, layer, source):
    return kernels.gather(pool, source, layer=layer, pool_layout=Layout.PLAIN_HND)


def pack(plain):
    return kernels.pack(plain, layout=Layout.AMX, plain_layout=Layout.PLAIN_HND)


def unpack(packed):
    return kernels.unpack(packed, layout=Layout.AMX, plain_layout=Layout.PLAIN_HND)


def score(queries, blocks, table, num_keys, layer):
    return kernels.score_blocks(
        queries,
        blocks,
        table,
        num_keys,
        layout=Layout.AMX,
        block_reduction=BlockReduction.MAX,
        layer=layer,
        scale=0.5,
    )


CASES = {
    "unpack_scatter": (upload, (BLOCKS, ROWS, COLUMN, COLUMN, COLUMN, COLUMN), True),
    "block_move": (move, (BLOCKS, COLUMN, COLUMN, COLUMN), True),
    "gather": (gather, (BLOCKS, COLUMN, COLUMN), False),
    "pack": (pack, (BLOCKS,), False),
    "unpack": (unpack, (ROWS,), False),
    "score_blocks": (score, (QUERIES, KEYS, COLUMN, NUMBER, NUMBER), False),
}


def lowered(name, platform):
    """The program that `platform` gets."""
    function, arguments, is_writer = CASES[name]
    jitted = jax.jit(function, donate_argnums=0 if is_writer else ())
    return jitted.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def lowered_call(name, platform):
    """The one custom call in the program that `platform` gets."""
    text = lowered(name, platform)
    calls = [line.strip() for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize("name", CASES)
def test_each_call_lowers_for_cuda_to_the_same_target_and_attributes(name):
    call = lowered_call(name, "cuda")
    assert f"@blockcompact_{name}(" in call
    config = r"(mhlo.backend_config|backend_config) = \{[^}]*\}"
    on_cuda, on_cpu = (re.search(config, lowered_call(name, p)) for p in ("cuda", "cpu"))
    assert on_cuda.group() == on_cpu.group()


@pytest.mark.parametrize("name", CASES)
def test_writers_alias_the_pool_on_cuda_and_readers_do_not(name):
    alias = r"output_operand_alias<output_tuple_indices = \[0\], operand_index = 0"
    is_writer = CASES[name][2]
    assert bool(re.search(alias, lowered_call(name, "cuda"))) is is_writer
    assert ("tf.aliasing_output = 0" in lowered(name, "cuda")) is is_writer  # donated as well


def test_the_account_says_whether_it_was_compiled_and_how_to():
    account = build_info()["cuda"]
    if IS_COMPILED:
        assert "sm_80 and sm_90" in account
    else:
        assert account.endswith(("nvcc not found", "does not work", "BLOCKCOMPACT_CUDA=ON"))
        with pytest.raises(NativeModuleError, match="not compiled"):
            load_cuda()


@needs_component
def test_the_cuda_handlers_have_the_names_of_the_cpu_ones():
    on_cuda = set(load_cuda().ffi_targets())
    assert on_cuda == {f"blockcompact_{name}" for name in CASES}
    assert on_cuda <= set(load_native().ffi_targets())


@needs_component
def test_importing_the_component_starts_no_driver(tmp_path):
    script = (
        "import blockcompact_jax.kernels.native as n; n.load_cuda(); "
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)


@needs_component
def test_a_wrong_device_check_is_refused():
    check = functools.partial(load_cuda().DeviceCheck, layout=0, num_layers=2, num_blocks=4)
    check(shape=(1, 32, 32, 2), num_rows=8)
    with pytest.raises(ValueError, match="block_tokens"):
        check(shape=(1, 16, 32, 2), num_rows=8)
    with pytest.raises(ValueError, match="num_rows"):
        check(shape=(1, 32, 32, 2), num_rows=9)


def has_device():
    return IS_COMPILED and load_cuda().num_devices() > 0


@pytest.mark.skipif(has_device(), reason="this machine has a CUDA device")
def test_the_gpu_check_says_that_it_did_not_run(tmp_path):
    result = subprocess.run(
        [sys.executable, GPU_CHECK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 3
    assert result.stdout == ""
    if IS_COMPILED:
        assert result.stderr == "no CUDA device: not run\n"
    else:
        assert result.stderr.endswith(": not run\n")


@pytest.mark.gpu
@pytest.mark.skipif(not has_device(), reason="no CUDA device, or CUDA not compiled: not run")
def test_UPL_6_jitted_calls_on_a_device_move_the_bytes_that_the_cpu_moves(rng):
    """UPL-6: upload, move and gather of JAX arrays on the device, in place."""
    pool, store = (
        random_blocks(rng, BLOCKS.shape, "uint16"),
        random_blocks(rng, ROWS.shape, "uint16"),
    )
    layer, source, target = column(0, 2, 1, -1), column(4, 0, 2, -1), column(1, 7, 0, -1)
    valid = column(32, 5, 0, 1)
    results = []
    for platform in ("cuda", "cpu"):
        device = jax.devices(platform)[0]
        on_device = functools.partial(jax.device_put, device=device)
        uploaded = upload(
            on_device(pool), on_device(store), *map(on_device, (layer, source, target, valid))
        )
        moved = move(uploaded.pool, *map(on_device, (layer, target, source)))
        gathered = gather(moved.pool, *map(on_device, (layer, source)))
        results.append([uploaded.status, moved.status, *gathered, moved.pool])
    for on_cuda, on_cpu in zip(*results, strict=True):
        assert_same_bytes(on_cuda, on_cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not has_device(), reason="no CUDA device, or CUDA not compiled: not run")
def test_SEL_9_jitted_scores_on_a_device_are_those_of_the_cpu(rng):
    """SEL-9: score_blocks of JAX arrays on the device, within rounding; its statuses too."""
    queries = rng.standard_normal(QUERIES.shape).astype(jnp.bfloat16)
    keys = rng.standard_normal(KEYS.shape).astype(jnp.bfloat16)
    table, layer = column(4, 0, 2, -1), column(1)
    for num_keys in (70, 97, 200):
        results = []
        for platform in ("cuda", "cpu"):
            on_device = functools.partial(jax.device_put, device=jax.devices(platform)[0])
            operands = (queries, keys, table, column(num_keys), layer)
            results.append(score(*map(on_device, operands)))
        np.testing.assert_array_equal(*(result.status for result in results))
        np.testing.assert_allclose(*(result.scores for result in results), 1e-4, 1e-4)
