"""The Triton kernels on a GPU: first against reference.py over ugly shapes, then timed against the alternatives.

    python scripts/gpu_check.py --out results

Writes gpu_check.json and gpu_check.txt into the folder and exits with 1, without timing anything, when a kernel is
wrong. A few minutes on one GPU. Without one, `TRITON_INTERPRET=1` runs the small checks on the CPU, to try the script.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_specdraft import trees
from hf_specdraft.draft import Law
from hf_specdraft.kernels import sdpa, tree_attention, use, verify_chain
from hf_specdraft.verification import residual, sample

# batch, nodes, context, query heads, key heads, width
SMALL_TREES = [(1, 1, 0, 1, 1, 64), (2, 3, 5, 4, 2, 60), (3, 7, 37, 6, 2, 60), (1, 33, 300, 4, 4, 64)]
TREES = [
    *SMALL_TREES,
    (2, 63, 700, 8, 2, 128),
    (1, 63, 5000, 32, 8, 128),
    (4, 7, 1023, 28, 4, 128),
    (2, 127, 129, 8, 1, 96),
    (1, 15, 2049, 8, 8, 256),
]
# batch, nodes, vocabulary
SMALL_CHAINS = [(4, 1, 2), (3, 5, 60), (2, 3, 9001)]
CHAINS = [*SMALL_CHAINS, (64, 7, 1000), (16, 15, 32_000), (33, 7, 151_936), (8, 3, 262_144)]
# Edges of a CDF over a large vocabulary lie closer together than float32 rounding: of many draws a few may differ.
EDGE_SHARE = 0.01

TIMED_TREES = [
    (batch, nodes, context, 32, 8, 128)
    for context in (1024, 8192, 32_768)
    for batch, nodes in ((1, 7), (1, 63), (8, 31))
]
TIMED_CHAINS = [(1, 7, 151_936), (8, 15, 151_936), (64, 7, 128_256)]


def tree(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple:
    """Arguments of tree_attention: a random tree, every other row left-padded by a third of its context."""
    batch, nodes, context, query_heads, key_heads, width = shape
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.stack([torch.randint(-1, max(i, 1), (batch,), generator=generator) for i in range(nodes)], 1)
    parents[:, 0] = -1
    seen = trees.visibility(parents, torch.ones(batch, nodes, dtype=torch.bool))
    left = torch.ones(batch, nodes + 1, context, dtype=torch.bool)
    left[1::2, :, : context // 3] = False
    mask = torch.cat([left, seen], 2)[:, None]
    columns = context + nodes + 1
    query, key, value = (
        torch.randn(batch, length, heads, width, generator=generator).transpose(1, 2).to(device, dtype)
        for length, heads in ((nodes + 1, query_heads), (columns, key_heads), (columns, key_heads))
    )
    return query, key, value, mask.to(device), width**-0.5


def chain(shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str) -> dict:
    """Arguments of verify_chain: chains of unequal length, a third of the logits -inf as top-k leaves them."""
    batch, nodes, vocab_size = shape
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 2 * torch.randn(batch, nodes + 1, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    ids = torch.randint(0, vocab_size, (batch, nodes, 1), generator=generator)
    ids = (ids + torch.arange(min(8, vocab_size))) % vocab_size
    logits[:, :nodes].scatter_(2, ids[..., :1], 8.0)  # a favourite of target and drafter, so that chains get somewhere
    logits[:, nodes, 0] = 8.0
    probs = torch.rand(ids.shape, generator=generator)
    probs[..., 0] = 8
    probs /= probs.sum(-1, keepdim=True)
    slot = probs.flatten(0, 1).multinomial(1, generator=generator).view(batch, nodes, 1)
    return dict(
        logits=logits.to(device, dtype),
        tokens=ids.gather(2, slot).squeeze(2).to(device),
        lengths=torch.randint(0, nodes + 1, (batch,), generator=generator).to(device),
        law=Law(probs.to(device), ids.to(device), torch.ones(batch, dtype=torch.bool)) if kind == "drawn" else None,
        accept_uniforms=torch.rand(batch, nodes, generator=generator).to(device) if kind != "greedy" else None,
        emit_uniforms=torch.rand(batch, generator=generator).to(device) if kind != "greedy" else None,
        greedy=kind == "greedy",
    )


def on_cpu(x):
    if isinstance(x, Law):
        return Law(x.probs.cpu(), x.ids.cpu(), x.rows)
    return x.cpu() if isinstance(x, Tensor) else x


def check_trees(shapes: list, dtypes: list[torch.dtype], device: str) -> list[dict]:
    results = []
    for shape in shapes:
        for dtype in dtypes:
            arguments = tree(shape, dtype, device)
            if shape[-1] * dtype.itemsize > 512:  # the dispatcher keeps these from the kernel
                continue
            with use("reference"):
                want = tree_attention(*map(on_cpu, arguments))
            with use("triton"):
                got = tree_attention(*arguments).cpu()
            error = (got.double() - want.double()).abs().max().item()
            bound = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
            name = f"tree_attention {shape} {dtype}"
            results.append(dict(check=name, error=error, bound=bound, ok=error <= bound))  # NaN is not ok
    return results


def check_chains(shapes: list, dtypes: list[torch.dtype], device: str) -> list[dict]:
    results = []
    for shape in shapes:
        for dtype in dtypes:
            for kind in ("greedy", "point", "drawn"):
                arguments = chain(shape, kind, dtype, device)
                with use("reference"):
                    want = verify_chain(**{name: on_cpu(x) for name, x in arguments.items()})
                with use("triton"):
                    got = verify_chain(**arguments)
                differ = ((got[0].cpu() != want[0]) | (got[1].cpu() != want[1])).sum().item()
                bound = int(EDGE_SHARE * shape[0]) if kind != "greedy" else 0
                name = f"verify_chain {shape} {dtype} {kind}"
                results.append(dict(check=name, error=differ, bound=bound, ok=differ <= bound))
    return results


def milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(run, quantiles=[0.5])


def peak_mib(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def forced(name: str, run: Callable[[], object]) -> Callable[[], object]:
    def inner():
        with use(name):
            return run()

    return inner


def whole_softmax(case: dict) -> Callable[[], object]:
    """What the kernels avoid: the same rules with the law of every row in float32 before them."""
    tokens, lengths, law = case["tokens"], case["lengths"], case["law"]
    law = law and Law(law.probs, law.ids, law.rows.to(tokens.device))

    def inner():
        p = case["logits"].float().softmax(-1)  # [B, N+1, V]
        p_of_token = p[:, :-1].gather(2, tokens[..., None]).squeeze(2)
        accepted = sdpa.leading(sdpa.accepts(law, tokens, case["accept_uniforms"], p_of_token), lengths)
        token, q = sdpa.rejection(law, tokens, lengths, accepted, p.shape[-1])
        row = p[torch.arange(len(p), device=p.device), accepted]
        q = torch.zeros_like(row) if q is None else q
        q.scatter_add_(1, token.clamp(min=0)[:, None], (token >= 0).to(q)[:, None])
        return accepted, sample(residual(row, q), case["emit_uniforms"])

    return inner


def timings() -> list[dict]:
    results = []
    for shape in TIMED_TREES:
        arguments = tree(shape, torch.bfloat16, "cuda")
        ways = {name: forced(name, lambda a=arguments: tree_attention(*a)) for name in ("triton", "fallback")}
        results.append(measured(f"tree_attention {shape}", ways))
    for shape in TIMED_CHAINS:
        for kind in ("point", "drawn"):
            case = chain(shape, kind, torch.bfloat16, "cuda")
            ways = {name: forced(name, lambda c=case: verify_chain(**c)) for name in ("triton", "fallback")}
            results.append(measured(f"verify_chain {shape} {kind}", {**ways, "whole_softmax": whole_softmax(case)}))
    return results


def measured(name: str, ways: dict[str, Callable[[], object]]) -> dict:
    return dict(case=name, **{way: dict(ms=milliseconds(run), peak_mib=peak_mib(run)) for way, run in ways.items()})


def report(result: dict) -> str:
    lines = [f"{result['device']}, torch {result['torch']}, triton {result['triton']}", ""]
    wrong = [c for c in result["checks"] if not c["ok"]]
    lines += [f"checks: {len(result['checks'])}, wrong: {len(wrong)}"]
    lines += [f"  {c['check']}: {c['error']:.3g}, allowed {c['bound']:.3g}" for c in wrong]
    for timing in result["timings"]:
        case, ways = timing["case"], {k: v for k, v in timing.items() if k != "case"}
        lines.append(f"{case}: " + ", ".join(f"{k} {v['ms']:.3f} ms {v['peak_mib']:.1f} MiB" for k, v in ways.items()))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for gpu_check.json and gpu_check.txt")
    out = parser.parse_args().out
    has_gpu = torch.cuda.is_available()
    if not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        print("no CUDA device; TRITON_INTERPRET=1 runs the small checks on the CPU", file=sys.stderr)
        return 2
    import triton

    half = [torch.float16, torch.bfloat16]
    with torch.inference_mode():
        if has_gpu:
            checks = check_trees(TREES, [torch.float32, *half], "cuda") + check_chains(CHAINS, half, "cuda")
        else:
            checks = check_trees(SMALL_TREES, [torch.float32], "cpu") + check_chains(SMALL_CHAINS, half, "cpu")
        right = all(check["ok"] for check in checks)
        result = dict(
            device=torch.cuda.get_device_name() if has_gpu else "Triton's interpreter on the CPU",
            torch=torch.__version__,
            triton=triton.__version__,
            checks=checks,
            timings=timings() if has_gpu and right else [],
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (out / "gpu_check.txt").write_text(report(result), encoding="utf-8")
    print(report(result), end="")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
