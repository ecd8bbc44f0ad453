"""A rank that misbehaves: `python faulty_rank.py FAULT FD`.

doubled: says everything twice. wordless: moves the bytes of a transfer, then says nothing.
garbled: answers with something else than messages. partial: half an answer, then sleeps.
killed:PATH: unless PATH exists, makes it, moves half of the rows of a transfer and dies by SIGKILL.
"""

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from blockcompact_jax.ranks import worker


class FaultyConnection(Connection):
    fault = "none"

    def send_bytes(self, body):
        is_transfer = json.loads(body).get("key") is not None
        if self.fault == "wordless" and is_transfer:
            return
        if self.fault == "garbled" and is_transfer:
            body = b'{"no": "answer"}'
        if self.fault == "partial" and is_transfer:
            self._send((len(body)).to_bytes(4, "big") + body[:5])
            time.sleep(60)
        super().send_bytes(body)
        if self.fault == "doubled":
            super().send_bytes(body)


def die_in_mid_transfer(path):
    upload = worker.host_pool_upload

    def half_an_upload(ord_packed, ord_plain, *columns, **pools):
        try:
            path.touch(exist_ok=False)
            columns = [each[: len(each) // 2] for each in columns]
        except FileExistsError:
            return upload(ord_packed, ord_plain, *columns, **pools)
        upload(ord_packed, ord_plain, *columns, **pools)
        return os.kill(os.getpid(), signal.SIGKILL)

    worker.host_pool_upload = half_an_upload


if __name__ == "__main__":
    fault, _, path = sys.argv[1].partition(":")
    if fault == "killed":
        die_in_mid_transfer(Path(path))
    connection = FaultyConnection(int(sys.argv[2]))
    connection.fault = fault
    worker.serve_rank(connection)
