"""What uploads in flight keep alive: leases, pools, staging buffers, and the process itself."""

import gc
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest

from blockcompact_jax.kernels import Layout, StagingBuffer, StagingInUseError

from .helpers import assert_same_bytes, random_blocks
from .pool_memory import plain_memory, register_packed, register_plain
from .uploads import Lease, after_upload, start


def test_UPL_4_the_lease_is_held_until_the_event_though_nobody_else_holds_it(pair, held):
    """UPL-4: also where the event itself was dropped."""
    lease, second_lease = Lease(), Lease()
    seen, second_seen = weakref.ref(lease), weakref.ref(second_lease)
    event = start(pair, lease=lease)
    start(pair, source=(1,), target=(2,), lease=second_lease)  # its event is dropped
    del lease, second_lease
    gc.collect()
    assert seen() is not None
    assert second_seen() is not None
    held()
    event.wait()
    assert seen() is None
    start(pair, target=(3,)).wait()  # uploads run in order, so the second one is done
    assert second_seen() is None


def test_UPL_4_pools_closed_in_flight_keep_their_memory_until_the_event(rng, held):
    """UPL-4: closing neither waits nor frees; the upload writes memory that is still there."""

    class Owner:
        def __init__(self, memory):
            self.memory = memory

    memory, view = plain_memory(random_blocks(rng, (1, 2, 2, 1, 32, 32), np.uint16), "nhd")
    store = random_blocks(rng, (1, 1, 1, 64, 32), np.uint16)
    expected = after_upload((None, None, memory, store), (0,), (1,))
    owner = Owner(memory)
    seen = weakref.ref(owner)
    plain = register_plain(memory, view, keepalive=owner)
    packed = register_packed(store, Layout.AMX)
    del owner
    event = start((plain, packed, memory, store))
    plain.close()
    packed.close()
    assert seen() is not None
    held()
    event.wait()
    assert seen() is None
    assert_same_bytes(memory, expected)


def staging(name="left"):
    return StagingBuffer(
        name,
        layout=Layout.AMX,
        num_layers=2,
        num_blocks=3,
        num_kv_heads=1,
        block_tokens=32,
        head_dim=32,
        dtype=np.uint16,
    )


def test_UPL_4_a_staging_buffer_in_use_is_named_and_refused(pair, rng, held):
    """UPL-4: not handed out for writing and not closed before the event of its upload."""
    plain, _, memory, _ = pair
    with staging() as buffer, staging("right") as other:
        staged = random_blocks(rng, buffer.rows().shape, np.uint16)
        buffer.rows()[...] = staged
        expected = after_upload((plain, buffer.pool, memory, staged), (2,), (1,))
        event = start((plain, buffer.pool, memory, staged), source=(2,), target=(1,))
        assert buffer.is_in_use
        with pytest.raises(StagingInUseError, match="`left`"):
            buffer.rows()
        with pytest.raises(StagingInUseError, match="`left`"):
            buffer.close()
        other.rows()[...] = 0
        held()
        event.wait()
        assert_same_bytes(memory, expected)
        buffer.rows()[...] = 0
        assert_same_bytes(memory, expected)


def test_staging_rows_are_aligned_and_writable():
    with staging() as buffer:
        rows = buffer.rows()
        assert rows.ctypes.data % 64 == 0
        assert rows.shape == (2, 3, 1, 64, 32)
        assert not rows.any()


def run_script(body, directory):
    script = textwrap.dedent(
        """
        import os
        import numpy as np
        from blockcompact_jax import kernels
        from blockcompact_jax.kernels.native import load_native

        shape = dict(num_layers=1, num_blocks=2, num_kv_heads=1, block_tokens=32, head_dim=32)
        buffer = kernels.StagingBuffer(
            "only", layout=kernels.Layout.VEC, dtype=np.uint16, **shape
        )
        buffer.rows()[...] = 7
        memory = np.zeros((2, 2, 32, 32), np.uint16)
        plain = kernels.RegisteredPool.register_plain(
            memory.ctypes.data,
            element_bytes=2,
            strides=kernels.PlainStrides(layer=4096, kv=1024, block=2048, head=1024, token=32),
            size_bytes=memory.nbytes,
            keepalive=memory,
            **shape,
        )
        one = np.ones(1, np.int32)
        load_native().hold_uploads(True)
        event = kernels.start_pool_upload(
            buffer.pool.current_ord(), plain.current_ord(), 0, one, one,
            packed_pool=buffer.pool, plain_pool=plain,
        )
        """
    ) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_process_ends_with_an_upload_in_flight(tmp_path):
    result = run_script("print('end')", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "end\n"


def test_an_event_in_a_forked_child_says_that_it_runs_elsewhere(tmp_path):
    result = run_script(
        """
        child = os.fork()
        if child == 0:
            try:
                event.wait()
            except kernels.UploadFailedError as error:
                os.write(1, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        load_native().hold_uploads(False)
        event.wait()
        assert (memory[1] == 7).all()
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "runs only there" in result.stdout
