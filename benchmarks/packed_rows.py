"""A fine-tuning step on conversations that share rows against the same ones in a row each, half of it padding.

The decoder has SmolLM2-135M's dimensions, --layers blocks and random weights. Both sides train LoRA on the same
documents from the same weights, so their first losses must be equal.

    python benchmarks/packed_rows.py --save packed_rows_2_cores_DATE
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import sides as s
from finetune import DIMENSIONS, RANK, TARGETS, TOLERANCE

SIDES = ("packed", "padded")
DOCUMENTS, SEQ = 16, 256


class Documents:
    """Documents of SEQ / 4 to 3 SEQ / 4 random tokens: what PackedDataset reads."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(SEQ // 4, 3 * SEQ // 4, DOCUMENTS)
        self.document_starts = np.concatenate([[0], np.cumsum(lengths)])
        self._ids = rng.integers(0, DIMENSIONS["vocab_size"], int(lengths.sum()))
        self.tokens = self

    def window(self, start: int, count: int) -> np.ndarray:
        """So many tokens from a place on."""
        return self._ids[start : start + count]


def build(side: str) -> dict:
    """-> the step of a fine-tuning run."""
    from polyreme.data.packing import NO_LABEL, PackedDataset
    from polyreme.recipes.finetune_config import FinetuneConfig
    from polyreme.recipes.training.trainer import Trainer

    dataset = PackedDataset(Documents(), 0, DOCUMENTS, SEQ, side == "packed")
    inputs, labels = (np.stack(column) for column in zip(*(dataset[i] for i in range(len(dataset))), strict=True))
    print(
        f"{side}: {len(dataset)} rows, {dataset.fill:.0%} of their places filled, {(labels != NO_LABEL).sum()} labels"
    )
    settings = {
        "model": os.environ["PACKED_ROWS_BASE"],
        "fine_tuning": "lora",
        "lora_rank": RANK,
        "lora_target": list(TARGETS),
        "max_seq_len": SEQ,
        "packing": side == "packed",
        "data": {"train": "none.jsonl"},
        "train": {"steps": 1000, "global_batch": len(dataset), "learning_rate": 1e-4},
    }
    trainer = Trainer(FinetuneConfig.model_validate(settings))
    return {"step": lambda: float(trainer.step(inputs, labels).loss)}


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=5)
    parser.add_argument("--layers", type=int, default=4)
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        from polyreme.models.decoders.llama import Llama, LlamaConfig

        Llama(LlamaConfig(num_layers=options.layers, **DIMENSIONS)).save_pretrained(Path(folder))
        os.environ["PACKED_ROWS_BASE"] = folder
        started = s.measure_steps(__file__, options, TOLERANCE)
    tokens = int(Documents().document_starts[-1])
    lines = [
        "| side | s a step, median | processor s a step, median | tokens/s | to the padded side's |",
        "|---|---|---|---|---|",
    ]
    for side in started:
        cpu, ratio = np.median(side.cpu_seconds["step"]), started[-1].median("step") / side.median("step")
        rate = tokens / side.median("step")
        lines.append(f"| {side.name} | {side.median('step'):.2f} | {cpu:.2f} | {rate:.0f} | {ratio:.2f} |")
    text = "\n".join(lines)
    print(text)
    if options.save:
        what = (
            f"LoRA of rank {RANK}, {options.layers} blocks of SmolLM2-135M's dimensions, {DOCUMENTS} documents of "
            f"{tokens} tokens in rows of {SEQ}, float32; {options.rounds} rounds."
        )
        print(s.save(options.save, "Rows that conversations share", what, text, started))


if __name__ == "__main__":
    main()
