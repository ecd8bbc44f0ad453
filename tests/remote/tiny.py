"""A tiny random model of each family, and a server process that serves it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

TOKEN = "t" * 40


def tiny_model(family):
    import torch
    import transformers

    torch.manual_seed(1)
    common = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 97,
        "max_position_embeddings": 2048,
    }
    if family == "uneven":  # Three KV heads, for two ranks.
        common |= {"num_attention_heads": 6, "num_key_value_heads": 3}
    if family in {"llama", "uneven"}:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).eval()
    config = transformers.Gemma3TextConfig(
        **common,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


class Server:
    """A running server process."""

    def __init__(self, process, url):
        self.process = process
        self.url = url

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def segments(self):
        """Links of all segments that the process has open."""
        found = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{self.pid}/fd/{fd}")
            except OSError:
                continue
            if "blockcompact-" in target:
                found.append(target)
        return found


def start(family="llama", *, port=0, memory_bytes=1 << 30, lease_seconds=60.0, copy_blocks=0):
    command = [sys.executable, "-P", __file__, family, str(port)]
    command += [str(memory_bytes), str(lease_seconds), str(copy_blocks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the server ended with {process.wait()}")
    return Server(process, json.loads(line)["url"])


@contextmanager
def serving(family="llama", **options):
    server = start(family, **options)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(20)


def _main(family, port, memory_bytes, lease_seconds, copy_blocks):
    from blockcompact_jax.kernels import Layout
    from blockcompact_jax.remote.access import new_process_epoch
    from blockcompact_jax.remote.app import create_app
    from blockcompact_jax.remote.listen import listen, run_until_stopped
    from blockcompact_jax.remote.service import ServiceLimits, VerifierService
    from torch_bridge.huggingface.serve import ModelEngine

    engine = ModelEngine(
        model=tiny_model(family),
        block_tokens=32,
        layout=Layout.AMX,
        attention="blocks",
        max_tokens=1024,
    )
    limits = ServiceLimits(
        max_requests=2000,
        memory_bytes=int(memory_bytes),
        lease_seconds=float(lease_seconds),
        max_copy_blocks=int(copy_blocks),
    )
    service = VerifierService(engine, limits, process_epoch=new_process_epoch())
    listening = listen("127.0.0.1", int(port))
    print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
    run_until_stopped(create_app(service, token=TOKEN), listening)


if __name__ == "__main__":
    _main(*sys.argv[1:])
