"""Result files whose times are none."""

import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.outcomes import read_outcomes


@pytest.mark.parametrize(
    ("timestamp", "time", "said"),
    [
        ("bad", "0.1", "timestamp is 'bad', expected an ISO 8601 time"),
        ("2026-01-02T03:04:05", "z", "'test_a' took 'z', expected seconds"),
        ("2026-01-02T03:04:05", "nan", "'test_a' took 'nan', expected seconds"),
    ],
)
def test_a_time_that_is_none_is_refused_with_its_file(tmp_path, timestamp, time, said):
    path = tmp_path / "b.xml"
    case = f'<testcase classname="m" name="test_a" time="{time}"/>'
    path.write_text(f'<testsuite timestamp="{timestamp}">{case}</testsuite>')
    with pytest.raises(CompactionError, match=said) as caught:
        read_outcomes([path], [], {})
    assert "b.xml" in str(caught.value)
