"""Time a BERT pretraining step on verses of the King James text: rows that verses share against rows of one verse each.

    python benchmarks/masked_words.py --python-torch ~/torch/bin/python --save NAME

Every side trains on the same verses with the same words masked and starts with the same weights, dropout off: polyreme
on packed rows (as `data.packing: best_fit`) and on padded ones (`none`), transformers' BertForMaskedLM in PyTorch,
eager, on rows padded to the longest sequence that the model takes, and to the longest of the batch. First losses must
be equal, to a computed tolerance. The torch environment needs transformers and tokenizers.
"""

import argparse
import gzip
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sides as s

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "MASKED_WORDS_FOLDER"
SIDES = ("packed", "padded", "torch-padded", "torch-longest")
VOCAB, HIDDEN, LAYERS, HEADS, SEQ, ROWS, RATE = 4096, 256, 4, 4, 128, 16, 0.15
OPTIMIZER = {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
RATE_OF_LEARNING = 1e-4


def prepare(folder: Path) -> int:
    """Writes the batch, packed and padded, and the model that all sides begin with; returns how many tokens it has."""
    import polyreme as paddle
    from polyreme.data.masking import MaskedDataset
    from polyreme.data.packing import NO_LABEL, PackedDataset
    from polyreme.data.token_pair import PairWriter, TokenPair
    from polyreme.models.encoders.bert import BertConfig, BertForMaskedLM
    from polyreme.models.tokenizer import train_byte_level_bpe

    text = gzip.decompress((ROOT / "data" / "kjv.txt.gz").read_bytes()).decode()
    verses = re.split(r"(?m)^(?=\w+\d+:\d+ )", text)[1:]
    tokenizer = train_byte_level_bpe(iter(verses), VOCAB - 1)
    with PairWriter(folder / "verses", "uint16") as writer:
        for verse in verses[: 40 * ROWS]:
            writer.add(np.array(tokenizer.encode(verse).ids[:SEQ]))
    pair = TokenPair(folder / "verses")
    rows = PackedDataset(pair, 0, pair.num_documents, SEQ, ahead=0)
    data = MaskedDataset(rows, VOCAB - 1, VOCAB, 0, RATE)
    chosen = np.random.default_rng(0).choice(len(data), ROWS, replace=False)
    inputs, asked = (np.stack(column) for column in zip(*(data[int(i)] for i in chosen), strict=True))
    padded, padded_labels = [], []
    for (tokens, ends, places), (where, ids) in zip(inputs, asked, strict=True):
        labels = np.full(SEQ, NO_LABEL)
        labels[where[where >= 0]] = ids[where >= 0]
        for begin in np.flatnonzero(places == 0):
            if ends[begin] - begin > 1:  # what pads a row is a document of one
                padded.append(tokens[begin : ends[begin]])
                padded_labels.append(labels[begin : ends[begin]])
    lengths = np.array([len(row) for row in padded])
    tokens, labels = np.zeros((len(padded), SEQ), np.int64), np.full((len(padded), SEQ), NO_LABEL)
    for row, (ids, wanted) in enumerate(zip(padded, padded_labels, strict=True)):
        tokens[row, : len(ids)], labels[row, : len(ids)] = ids, wanted
    most = int((labels != NO_LABEL).sum(1).max())
    padded_asked = np.full((len(padded), 2, most), NO_LABEL)
    for row, wanted in enumerate(labels):
        at = np.flatnonzero(wanted != NO_LABEL)
        padded_asked[row, :, : len(at)] = at, wanted[at]
    places = np.arange(SEQ)
    inside = places < lengths[:, None]
    ends = np.where(inside, lengths[:, None], places + 1)
    bounds = np.stack([tokens, ends, np.where(inside, places, 0)], 1)
    arrays = {"inputs": inputs, "asked": asked, "padded": bounds, "padded_asked": padded_asked}
    np.savez(folder / "batch.npz", **arrays, tokens=tokens, labels=labels, lengths=lengths)
    paddle.seed(0)
    config = BertConfig(VOCAB, HIDDEN, LAYERS, HEADS, seq_len=SEQ, dropout=0.0, attention_dropout=0.0)
    BertForMaskedLM(config).save_pretrained(folder / "model")
    return int(lengths.sum())


def build_ours(rows: np.ndarray, asked: np.ndarray, folder: Path) -> Callable[[], float]:
    """-> a function that does one captured step and returns its loss."""
    import polyreme as paddle
    from polyreme.models.auto import AutoModelForMaskedLM
    from polyreme.models.encoders.bert import BertForPretraining

    published = AutoModelForMaskedLM.from_pretrained(folder / "model")
    network = BertForPretraining(published.config)
    network.set_state_dict(published.state_dict())
    optimizer = paddle.optimizer.AdamW(RATE_OF_LEARNING, parameters=network.parameters(), **OPTIMIZER)

    @paddle.jit.to_static
    def step(rows, asked):
        loss = network(rows, asked)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    batch = paddle.to_tensor(rows), paddle.to_tensor(asked)
    return lambda: float(step(*batch))


def build_torch(batch: dict[str, np.ndarray], longest: bool, folder: Path) -> Callable[[], float]:
    """-> a function that does one step and returns its loss."""
    import torch
    from transformers import BertForMaskedLM

    network = BertForMaskedLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    network.train()
    betas = (OPTIMIZER["beta1"], OPTIMIZER["beta2"])
    options = {"lr": RATE_OF_LEARNING, "betas": betas, "eps": OPTIMIZER["epsilon"]}
    optimizer = torch.optim.AdamW(network.parameters(), fused=True, weight_decay=OPTIMIZER["weight_decay"], **options)
    width = int(batch["lengths"].max()) if longest else SEQ
    tokens, labels = (torch.from_numpy(batch[name][:, :width].astype(np.int64)) for name in ("tokens", "labels"))
    mask = (torch.arange(width) < torch.from_numpy(batch["lengths"])[:, None]).long()

    def step() -> float:
        loss = network(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> the side's step."""
    folder = Path(os.environ[FOLDER])
    batch = dict(np.load(folder / "batch.npz"))
    if side == "packed":
        return {"step": build_ours(batch["inputs"], batch["asked"], folder)}
    if side == "padded":
        return {"step": build_ours(batch["padded"], batch["padded_asked"], folder)}
    return {"step": build_torch(batch, side == "torch-longest", folder)}


def measure(options: argparse.Namespace, num_tokens: int) -> tuple[str, list[s.Side]]:
    """Runs all sides in alternating rounds -> the table and the sides."""
    sides = s.start(__file__, options)
    try:
        first = {side.name: side.ask("step", 3)["values"][0] for side in sides}
        # float32 sums of HIDDEN terms through 2 * LAYERS + 2 products, of which the loss is a mean
        s.check_values(first, 2.0**-23 * np.sqrt(HIDDEN) * (2 * LAYERS + 2) * first[sides[0].name])
        for _ in range(options.rounds):
            for side in sides:
                side.measure("step", options.steps)
    finally:
        for side in sides:
            side.close()
    rows = ["| side | ms/step, median | least | tokens/s, no padding counted | to torch-padded | peak MiB |"]
    rows.append("|---|---|---|---|---|---|")
    base = next((side.median("step") for side in sides if side.name == "torch-padded"), sides[0].median("step"))
    for side in sides:
        median = side.median("step")
        numbers = f"{median * 1e3:.0f} | {side.least('step') * 1e3:.0f} | {num_tokens / median:,.0f}"
        rows.append(f"| {side.name} | {numbers} | {base / median:.2f} | {side.peak / 2**20:.0f} |")
    return "\n".join(rows), sides


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=7)
    parser.add_argument("--steps", type=int, default=2, help="steps a side takes in each round")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        num_tokens = prepare(Path(folder))
        fill = num_tokens / (ROWS * SEQ)
        text, sides = measure(options, num_tokens)
    print(text)
    if options.save:
        sizes = (
            f"{LAYERS} layers, {HIDDEN} wide, {HEADS} heads, {VOCAB} words, AdamW, float32; {num_tokens:,} tokens of "
            f"verses in {ROWS} rows of {SEQ}, {100 * fill:.1f}% full, or a row each; {100 * RATE:.0f}% of words asked "
            f"about. {options.rounds} rounds of {options.steps} steps, sides alternating."
        )
        print(s.save(options.save, "BERT pretraining step, packed against padded", sizes, text, sides))


if __name__ == "__main__":
    main()
