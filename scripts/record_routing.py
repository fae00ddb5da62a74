"""Record how many distinct experts a batch hits with trained weights: the model nano, lesson 06.

    python scripts/record_routing.py --out notebooks/data/nano_routing.json

Rows are held-out modules of the training text (`mkref/models/nano/corpus.txt`), read from the
running interpreter's Lib/: CPython 3.11.7, or every module whose hash is still the same. In every
layer the experts of the rows' tokens at the same position are united, as a decode step of that
batch does; and, for comparison, those of as many tokens of one row, one after another, as when a
prompt is taken in. The reference computes it in float32; nothing here is a measurement of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file

from bench.provenance import provenance
from mkref.engine.load import load_geometry, model_folder
from mkref.engine.tokenizer import Tokenizer
from mkref.reference.model import Reference
from mkref.reference.sampling import top_k

BATCHES = (1, 2, 4, 8, 16)
TOKENS, SKIPPED = 512, 64  # of each module; the first positions are much alike
DRAWS = 32  # batches of rows, drawn with a fixed seed


def held_out(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The first tokens of every held-out module that is long enough and unchanged, by path."""
    lib = Path(os.__file__).parent
    found = {}
    for line in (model_folder("nano") / "corpus.txt").read_text().splitlines():
        kind, digest, _, name = line.split("\t")
        path = lib / name
        if kind != "held" or not path.is_file():
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest().startswith(digest):
            ids = tokenizer.encode_plain(data.decode())
            if len(ids) >= TOKENS:
                found[name] = ids[:TOKENS]
    return found


def chosen(rows: list[list[int]]) -> np.ndarray:
    """Experts of every token: int [layers, rows, TOKENS, k], sparse layers only."""
    config = load_geometry("nano")
    seen: dict[str, torch.Tensor] = {}
    weights = load_file(model_folder("nano") / "model.safetensors")
    Reference(config, weights, probe=seen.__setitem__).forward(torch.tensor(rows))
    layers = [n for n in range(config.num_hidden_layers) if not config.is_dense(n)]
    logits = [seen[f"layers.{n}.router"].view(len(rows), TOKENS, -1).numpy() for n in layers]
    return np.stack([top_k(one, config.num_experts_per_tok) for one in logits])


def distinct(experts: np.ndarray, batch: int) -> list[float]:
    """Mean number of distinct experts in each layer when `batch` rows run together."""
    rng = np.random.default_rng(batch)
    counts = []
    for _ in range(DRAWS):
        rows = rng.permutation(experts.shape[1])[:batch]
        for position in range(SKIPPED, TOKENS):
            counts.append([len(np.unique(layer)) for layer in experts[:, rows, position]])
    return [round(float(n), 3) for n in np.mean(counts, axis=0)]


def neighbours(experts: np.ndarray, batch: int) -> list[float]:
    """The same for `batch` consecutive tokens of one row."""
    starts = range(SKIPPED, TOKENS - batch + 1, batch)
    counts = [
        [np.mean([len(np.unique(row[at : at + batch])) for row in layer]) for at in starts]
        for layer in experts
    ]
    return [round(float(np.mean(n)), 3) for n in counts]


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = load_geometry("nano")
    texts = held_out(Tokenizer(model_folder("nano") / "tokenizer.json"))
    experts = chosen([*texts.values()])
    made = provenance()
    rows = [
        {"batch": n, "distinct": distinct(experts, n), "neighbours": neighbours(experts, n)}
        for n in BATCHES
    ]
    record = {
        "provenance": {
            "model": "nano, trained weights, float32 reference on a CPU",
            "text": f"{len(texts)} held-out modules of CPython's Lib/, tokens {SKIPPED} to "
            f"{TOKENS - 1} of each",
            "date": made["date"][:10],
            "command": "python scripts/record_routing.py",
            "torch": torch.__version__,
            "label": "measured",
        },
        "experts": config.num_experts,
        "per_token": config.num_experts_per_tok,
        "modules": sorted(texts),
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
