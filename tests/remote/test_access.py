"""What each side says about tokens and addresses before a server is there."""

import sys

import httpx
import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.remote.access import create_or_read_token, read_token
from blockcompact_jax.remote.client import check_url
from blockcompact_jax.remote.listen import listen, url_of


def test_each_side_is_told_what_it_can_do_about_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKCOMPACT_TOKEN", raising=False)
    new = tmp_path / "new"
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_bytes(b"\xff")
    for path, words in (
        (None, "BLOCKCOMPACT_TOKEN has no token"),
        (tmp_path, "is no file"),
        (short, "has no token"),
    ):
        with pytest.raises(CompactionError, match=words) as client:
            read_token(path)
        with pytest.raises(CompactionError, match=words) as server:
            create_or_read_token(path)
        assert "file that `blockcompact serve` was started with" in str(client.value)
        assert "new path" not in str(client.value)
        assert "new path, and the server makes one" in str(server.value)
    with pytest.raises(CompactionError, match=r"does not exist; .* `blockcompact serve` was"):
        read_token(new)
    assert not new.exists()


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.1"])
def test_the_printed_url_is_one_that_clients_take(host):
    try:
        listening = listen(host, 0)
    except CompactionError as error:
        pytest.skip(f"needs IPv6 on this machine: {error}")
    with listening:
        url = url_of(listening)
        check_url(url)
        assert httpx.URL(url).port == listening.getsockname()[1]
        assert httpx.URL(url).host == listening.getsockname()[0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://127.0.0.1:1?a", "http://a@[::1]"])
def test_a_url_that_says_more_than_where_is_refused(url):
    with pytest.raises(CompactionError, match="only a host and a port"):
        check_url(url)
    check_url("http://127.0.0.1:1/")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--remote", "http://127.0.0.1:1/v1"], "only a host and a port"),
        (["--remote", "http://192.0.2.1:80"], "loopback"),
        (["--remote", "http://127.0.0.1:1", "--token-file", "nowhere"], "does not exist"),
    ],
)
def test_a_wrong_server_is_refused_before_the_engine_is_imported(options, words, monkeypatch):
    def check(command, *_, **__):
        if command != "blockcompact run --remote":
            too_late()

    monkeypatch.setattr(sys.modules["blockcompact_jax.cli.run"], "require_modules", check)
    done = CliRunner().invoke(app, ["run", *options])
    assert isinstance(done.exception, CompactionError), done.exception
    assert words in str(done.exception)


@pytest.mark.parametrize("lease", ["inf", "nan", "1e9"])
def test_a_lease_without_an_end_is_refused(lease, monkeypatch):
    monkeypatch.setattr(sys.modules["blockcompact_jax.cli.serve"], "require_modules", too_late)
    done = CliRunner().invoke(app, ["serve", "--lease", lease])
    assert done.exit_code == 2
    assert "--lease" in done.output


def too_late(*_, **__):
    raise AssertionError("the command went on")
