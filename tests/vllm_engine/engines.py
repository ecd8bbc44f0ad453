"""Tiny random models, saved as vLLM loads them, and engines of them inside this process."""

import collections
import contextlib
import gc
import itertools
import os

import torch
from attend_policy.packed import packed_places

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

B = 32
VOCAB = 128
OURS = "torch_bridge.vllm.backend.BlockCompactAttentionBackend"
STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_names = itertools.count()


def save_llama(directory, max_positions=1024):
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def save_gemma(directory, layer_types=("sliding_attention", "full_attention") * 2):
    import transformers

    torch.manual_seed(2)
    config = transformers.Gemma3TextConfig(
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        sliding_window=48,
        layer_types=list(layer_types),
        query_pre_attn_scalar=32,
        initializer_range=0.2,
        tie_word_embeddings=False,  # tied random ones repeat their newest token for ever
    )
    model = transformers.Gemma3ForCausalLM(config)
    for layer in model.model.layers:  # attention must tell in what comes out
        layer.post_attention_layernorm.weight.data.fill_(3.0)
    model.save_pretrained(directory)
    return directory


def save_windows_only(directory):
    return save_gemma(directory, ("sliding_attention",) * 2)


class NoDrafts:
    """A proposer for `custom_class` that never proposes anything."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, model):
        pass

    def propose(self, sampled_token_ids, *args, **kwargs):
        return [[] for _ in sampled_token_ids]


def self_speculation(num_drafts):
    return {
        "method": "custom_class",
        "model": "torch_bridge.vllm.proposer.SelfSpeculation",
        "num_speculative_tokens": num_drafts,
    }


@contextlib.contextmanager
def engine(model, *, backend=OURS, compaction=None, **options):
    """An `LLM` in this process; torn down at the end, so that the next can start."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
    selector._cached_get_attn_backend.cache_clear()
    if compaction is not None:
        options["additional_config"] = {"blockcompact": compaction}
    arguments = {
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": B,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
    } | options
    llm = None
    try:
        llm = LLM(model=str(model), **arguments)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            # What is left of it would tear down the next engine's process groups when it goes.
            vars(llm).clear()
        gc.collect()
        cleanup_dist_env_and_memory()


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def builders_of(llm):
    return [
        builder
        for groups in runner_of(llm).attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]


def compaction_of(llm):
    (compaction,) = [
        builder.compaction for builder in builders_of(llm) if builder.compaction is not None
    ]
    return compaction


def scheduler_of(llm):
    """VLLM's scheduler, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def counting(llm, num_blocks):
    """Yields what was counted since the test began; at its end vLLM has all blocks back."""
    counts = compaction_of(llm).counts
    before = vars(counts).copy()
    yield lambda: collections.Counter(vars(counts)) - collections.Counter(before)
    assert scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks - 1


def record_preemptions(llm, monkeypatch):
    """The list that the names of preempted requests go to until the test ends."""
    scheduler = scheduler_of(llm)
    preempt, preempted = scheduler._preempt_request, []

    def record(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    return preempted


def prompt(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, VOCAB, (num_tokens,), generator=generator).tolist()


def add(llm, token_ids, num_new):
    """Adds a greedy request; returns its name."""
    from vllm import SamplingParams

    name = f"request-{next(_names)}"
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": token_ids}, params)
    return name


def finish(llm):
    """Steps until nothing is left; {name: token IDs}."""
    tokens = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def generate(llm, prompts, num_new):
    names = [add(llm, token_ids, num_new) for token_ids in prompts]
    tokens = finish(llm)
    return [tokens[name] for name in names]


def read_tokens(kv_cache, layout, blocks, tokens):
    """(keys, values) [heads, tokens, dims] in float64."""
    num_blocks, heads, block_tokens, twice_dims = kv_cache.shape
    rows = kv_cache.reshape(num_blocks, heads, block_tokens * twice_dims)
    out = []
    for places in packed_places(layout, block_tokens, twice_dims // 2, kv_cache.itemsize == 2):
        picked = [rows[int(blocks[t // B])][:, places[t % B]] for t in tokens]
        out.append(torch.stack(picked, 1).double())
    return out
