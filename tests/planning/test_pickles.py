"""Static arguments that another process reads back."""

import pickle
import subprocess
import sys

from blockcompact_jax.geometry import TableSupport
from blockcompact_jax.retention import RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy

from . import builders as b

READER = """
import dataclasses, pickle, sys
for read in pickle.load(sys.stdin.buffer):
    made_here = dataclasses.replace(read)
    assert read == made_here
    assert hash(read) == hash(made_here), type(read).__name__
"""


def test_static_arguments_hash_as_those_of_the_process_that_reads_them(tmp_path):
    """Hashes of enums and strings differ from process to process; none travels in a pickle."""
    selection = SelectionPolicy(max_want=8)
    retention = RetentionPolicy(tables=TableSupport.LAYER)
    step = StepPolicy(selection=selection, retention=retention, max_upload=4)
    static = (b.geometry(), selection, step)
    hashes = [hash(each) for each in static]
    subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(static), cwd=tmp_path, check=True
    )
    assert [hash(each) for each in pickle.loads(pickle.dumps(static))] == hashes
