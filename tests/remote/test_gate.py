"""What is counted of messages, whatever becomes of them."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from blockcompact_jax.remote.gate import Gate

from .tiny import TOKEN

PATHS = {"/works", "/fails", "/breaks_off"}


@pytest.fixture
def counted():
    return []


@pytest.fixture
def app(counted):
    app = FastAPI()

    @app.get("/works")
    async def works():
        return 1

    @app.get("/fails")
    async def fails():
        raise RuntimeError("as any fault of the server")

    @app.get("/breaks_off")
    async def breaks_off():
        async def parts():
            yield b"part"
            raise RuntimeError("after the first part")

        return StreamingResponse(parts())

    def count(path, status):
        counted.append((path, str(status)))

    app.add_middleware(Gate, token=TOKEN, paths=PATHS, open_paths=(), count=count)
    return app


def get(app, path, **options):
    async def main():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path, **options)

    return asyncio.run(main()).status_code


@pytest.mark.parametrize(
    ("path", "status"), [("/works", 200), ("/fails", 500), ("/breaks_off", 200), ("/nowhere", 404)]
)
def test_every_answer_is_counted_once(app, counted, path, status):
    assert get(app, path, headers={"authorization": f"Bearer {TOKEN}"}) == status
    assert counted == [(path if path in PATHS else "other", str(status))]


def test_a_stranger_is_counted(app, counted):
    assert get(app, "/fails") == 401
    assert counted == [("/fails", "401")]
