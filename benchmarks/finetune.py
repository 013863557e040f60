"""A LoRA step of a decoder with SmolLM2-135M's dimensions against the full AdamW step, and transformers + peft.

The base has random weights and is written as a folder that all sides read; --layers takes fewer blocks than 30. Each
side is a process of its own; its peak memory is that of the process, loading and compiling included.

    python benchmarks/finetune.py --python-torch ENV/bin/python --save finetune_2_cores_DATE
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import sides as s

SIDES = ("lora", "full", "torch")
RANK, TARGETS = 8, ("q_proj", "k_proj", "v_proj", "o_proj")
RATE, BETAS, CLIP = 1e-4, (0.9, 0.999), 1.0
DIMENSIONS = {
    "vocab_size": 49152, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "ffn_size": 1536, "seq_len": 2048,
    "rope_theta": 100000.0, "rms_norm_epsilon": 1e-5, "tie_embeddings": True,
}  # fmt: skip
TOLERANCE = 1e-3  # of the first loss, which is that of the base: float32 sums of some thousand terms


def rows() -> np.ndarray:
    """Token ids [batch, seq + 1]."""
    sizes = (int(os.environ["FINETUNE_BATCH"]), int(os.environ["FINETUNE_SEQ"]) + 1)
    return np.random.default_rng(0).integers(0, DIMENSIONS["vocab_size"], sizes)


def ours(kind: str) -> dict:
    """The step of a fine-tuning run of polyreme."""
    from polyreme.recipes.finetune_config import FinetuneConfig
    from polyreme.recipes.training.trainer import Trainer

    tokens = rows()
    adapted = {"lora_rank": RANK, "lora_target": list(TARGETS)} if kind == "lora" else {}
    config = FinetuneConfig.model_validate(
        {
            "model": os.environ["FINETUNE_BASE"],
            "fine_tuning": kind,
            **adapted,
            "max_seq_len": tokens.shape[1] - 1,
            "packing": False,
            "data": {"train": "none.jsonl"},
            "train": {"steps": 1000, "global_batch": len(tokens), "learning_rate": RATE, "betas": list(BETAS)},
        }
    )
    trainer = Trainer(config)
    print(trainer.share_text())
    return {"step": lambda: float(trainer.step(tokens[:, :-1], tokens[:, 1:]).loss)}


def theirs() -> dict:
    """The same step of transformers and peft."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count())
    base = AutoModelForCausalLM.from_pretrained(os.environ["FINETUNE_BASE"], dtype=torch.float32)
    options = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**options)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    tokens = torch.from_numpy(rows())

    def step() -> float:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {"step": step}


def build(side: str) -> dict:
    """-> the cases; the framework is imported here, in the side's own process."""
    return theirs() if side == "torch" else ours(side)


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        from polyreme.models.decoders.llama import Llama, LlamaConfig

        Llama(LlamaConfig(num_layers=options.layers, **DIMENSIONS)).save_pretrained(Path(folder))
        sizes = {"BASE": folder, "BATCH": options.batch, "SEQ": options.seq}
        os.environ.update({f"FINETUNE_{name}": str(value) for name, value in sizes.items()})
        started = s.measure_steps(__file__, options, TOLERANCE)
    base = started[0]
    lines = ["| side | s a step, median | processor s a step, median | peak MiB | time to the first side's |"]
    lines += ["|---|---|---|---|---|"]
    for side in started:
        cpu = float(np.median(side.cpu_seconds["step"]))
        ratio = side.median("step") / base.median("step")
        lines.append(f"| {side.name} | {side.median('step'):.2f} | {cpu:.2f} | {side.peak / 2**20:.0f} | {ratio:.2f} |")
    text = "\n".join(lines)
    print(text)
    if options.save:
        what = (
            f"LoRA of rank {RANK} on {', '.join(TARGETS)}, full AdamW, and transformers + peft: {options.layers} "
            f"blocks of SmolLM2-135M's dimensions, {options.batch} x {options.seq} tokens, float32; "
            f"{options.rounds} rounds."
        )
        print(s.save(options.save, "Fine-tuning steps", what, text, started))


if __name__ == "__main__":
    main()
