"""Random traces, and what a study must find, token by token in float64: imports none of ours."""

import math

import ml_dtypes
import numpy as np

from .path_twin import PathTwin

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def parts(
    *, rows=2, heads=4, kv_heads=2, head_dim=8, context=90, forced=30, dtype="float32", every=1
):
    """The fields of a trace. Keys drift, so that what is attended to changes along the text.

    Recorded are 8 queries of the context, and every so many-th after it.
    """
    rng = np.random.default_rng(5)
    num_tokens = context + forced
    newest, later = np.arange(context - 8, context), np.arange(context, num_tokens, every)
    positions = np.concatenate([newest, later]).astype(np.int32)
    drift = np.cumsum(rng.standard_normal((rows, kv_heads, num_tokens, head_dim)), axis=2)
    keys = drift / np.sqrt(np.arange(1, num_tokens + 1))[:, None]
    queries = rng.standard_normal((rows, heads, positions.size, head_dim)) * 2
    return {
        "model": "tiny",
        "weights": "llama@00",
        "model_dtype": "float32",
        "dtype": dtype,
        "source": "random numbers",
        "num_context_tokens": context,
        "num_model_layers": 7,
        "layers": np.array([1, 4, 6][:rows], np.int32),
        "scales": np.full(rows, head_dim**-0.5, np.float32),
        "token_ids": rng.integers(0, 97, num_tokens).astype(np.int32),
        "query_positions": positions,
        "queries": queries.astype(NUMPY_DTYPES[dtype]),
        "keys": keys.astype(NUMPY_DTYPES[dtype]),
        "origin": {"machine": {"num_cpus": 2}},
    }


def token_logits(given, row, head, query):
    """Scaled q·k with every token of the text, in float64."""
    group = given["queries"].shape[1] // given["keys"].shape[1]
    keys = given["keys"][row, head // group].astype(np.float64)
    return float(given["scales"][row]) * (
        keys @ given["queries"][row, head, query].astype(np.float64)
    )


def block_mass(given, row, query, block_tokens):
    """Softmax mass of each block for one query, [head][block]."""
    position = int(given["query_positions"][query])
    num_blocks = math.ceil(given["token_ids"].size / block_tokens)
    mass = np.zeros((given["queries"].shape[1], num_blocks))
    for head in range(mass.shape[0]):
        seen = token_logits(given, row, head, query)[: position + 1]
        weights = np.exp(seen - seen.max())
        weights /= weights.sum()
        for token, weight in enumerate(weights):
            mass[head, token // block_tokens] += weight
    return mass


def block_score(given, row, query, block, *, policy, block_tokens, top_tokens=1):
    """Score of one whole block for one query, [head]."""
    tokens = slice(block * block_tokens, (block + 1) * block_tokens)
    if policy == "attention":
        return list(block_mass(given, row, query, block_tokens)[:, block])
    found = []
    for head in range(given["queries"].shape[1]):
        logits = token_logits(given, row, head, query)[tokens]
        if policy == "page_bounds":
            group = given["queries"].shape[1] // given["keys"].shape[1]
            keys = given["keys"][row, head // group, tokens].astype(np.float64)
            own = given["queries"][row, head, query].astype(np.float64)
            low, high = own * keys.min(axis=0), own * keys.max(axis=0)
            found.append(float(given["scales"][row]) * np.maximum(low, high).sum())
        else:
            reduce = {
                "logit_max": np.max,
                "logit_mean": np.mean,
                "logit_top_mean": lambda values: np.mean(sorted(values)[-top_tokens:]),
                "logit_log_sum_exp": lambda values: np.log(np.exp(values).sum()),
            }[policy]
            found.append(reduce(logits))
    return found


def best(scores, sinks, num_want):
    """Sink blocks, then the others by (-score, block)."""
    rest = sorted(set(scores) - set(range(sinks)), key=lambda block: (-scores[block], block))
    return set([*range(sinks), *rest][:num_want])


def scores_of(given, row, query, resident, *, num_candidates, options):
    """Scores of one layer's candidates."""
    scores = {}
    for block in range(num_candidates):
        values = [
            value
            for scored in range(query - options["scored_queries"], query)
            if (block + 1) * options["block_tokens"] <= given["query_positions"][scored] + 1
            for value in block_score(
                given,
                row,
                scored,
                block,
                policy=options["policy"],
                block_tokens=options["block_tokens"],
                top_tokens=options["top_tokens"],
            )
        ]
        combined = max(values) if options["head_reduction"] == "max" else sum(values) / len(values)
        scores[block] = combined + options["resident_margin"] * (block in resident)
    return scores


def new_path(given, *, retention, ownership, **options):
    """The pool of a study, as large as needed."""
    gap = options["reselect_every_tokens"] + int(np.diff(given["query_positions"]).max())
    return PathTwin(
        num_rows=given["layers"].size,
        num_tail=options["recent_blocks"] + 1 + math.ceil(gap / options["block_tokens"]),
        num_physical=1000,
        retention=retention,
        ownership=ownership,
    )


def study(given, *, budget_blocks, retention="layer_tables", ownership="layer", **options):
    """The fields of a study, walked step by step, and the pool that it leaves."""
    block_tokens, rows = options["block_tokens"], range(given["layers"].size)
    kept, at_best, recalls, attended, overlaps, uploads = [], [], [], [], [], []
    path = new_path(given, retention=retention, ownership=ownership, **options)
    wanted = [set() for _ in rows]
    last, num_candidates = None, 0
    for query, position in enumerate(given["query_positions"]):
        if position < given["num_context_tokens"]:
            continue
        if last is None or position - last >= options["reselect_every_tokens"]:
            before, num_before, was = wanted, num_candidates, last
            num_candidates = int(position) // block_tokens - options["recent_blocks"]
            num_want = min(budget_blocks - options["recent_blocks"], num_candidates)
            leaving = range(num_before, num_candidates) if was is not None else ()
            path.leave_tail(leaving)
            scores = [
                scores_of(
                    given,
                    row,
                    query,
                    path.held(row),
                    num_candidates=num_candidates,
                    options=options,
                )
                for row in rows
            ]
            if retention == "shared_table":
                mean = {block: np.mean([each[block] for each in scores]) for block in scores[0]}
                scores = [mean for _ in rows]
            wanted = [best(each, options["sink_blocks"], num_want) for each in scores]
            ranked = [sorted(each, key=lambda b, each=each: (-each[b], b)) for each in scores]
            uploads.append(np.mean(path.select(wanted, ranked, len(leaving))))
            if was is not None:
                overlaps.append(
                    np.mean([len(wanted[row] & before[row]) / len(wanted[row]) for row in rows])
                )
            last = position
        shares, bests, found, num_chosen = [], [], 0, 0
        chosen = [path.held(row) for row in rows]
        for row in rows:
            mass = block_mass(given, row, query, block_tokens).mean(axis=0)
            tail = mass[num_candidates:].sum()
            shares.append(tail + sum(mass[block] for block in chosen[row]))
            top = best(dict(enumerate(mass[:num_candidates])), 0, len(chosen[row]))
            bests.append(tail + sum(mass[block] for block in top))
            found, num_chosen = found + len(top & chosen[row]), num_chosen + len(chosen[row])
        kept.append(shares)
        at_best.append(bests)
        recalls.append(found / num_chosen)
        num_tail = position + 1 - num_candidates * block_tokens
        mean_chosen = num_chosen / len(chosen)
        attended.append((mean_chosen * block_tokens + num_tail) / (position + 1))
    by_layer = np.mean(kept, axis=0)
    worst = int(np.argmin(by_layer))
    return {
        "num_steps": len(kept),
        "num_selections": len(uploads),
        "mass_kept": np.mean(kept),
        "mass_kept_worst_layer": by_layer[worst],
        "worst_layer": int(given["layers"][worst]),
        "mass_kept_at_best": np.mean(at_best),
        "oracle_recall": np.mean(recalls),
        "attended_share": np.mean(attended),
        "selection_overlap": np.mean(overlaps) if overlaps else None,
        "first_upload_blocks": uploads[0],
        "upload_blocks_per_selection": np.mean(uploads[1:]) if uploads[1:] else None,
    }, path
