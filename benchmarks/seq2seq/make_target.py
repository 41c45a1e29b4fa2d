"""Train an English→German target for the encoder–decoder benchmarks; tells how good it is.

A Marian model with its own BPE vocabulary, trained by transformers' Seq2SeqTrainer on pairs of
sentences (JSONL with `source` and `target`, `.zst` or not). It is a target to experiment with, not
a translator: its BLEU on the test pairs is printed and kept beside the weights, in `quality.json`.
A killed run goes on from its last checkpoint, a second run finds the finished model.

    python benchmarks/seq2seq/make_target.py --train TRAIN.jsonl.zst --test TEST.jsonl.zst
    python benchmarks/seq2seq/make_target.py … --encoder-layers 8 --decoder-layers 1
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint

from draftsmith.data.files import publish, write_json

sys.path.append(str(Path(__file__).parents[1]))
from common import report

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftsmith"
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
# Longer pairs are not learned; longer sources can be read.
MOST_TOKENS, POSITIONS = 128, 256


def target_folder(encoder_layers: int, decoder_layers: int) -> Path:
    """Where a finished target lies, outside of the repository."""
    return CACHE / f"en-de-{encoder_layers}+{decoder_layers}"


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Rows with `source` and `target`."""
    from datasets import load_dataset

    rows = load_dataset("json", data_files=str(path), split="train")
    return [{"source": row["source"], "target": row["target"]} for row in rows]


def make_tokenizer(pairs: Sequence[dict[str, str]], vocabulary: int) -> PreTrainedTokenizerFast:
    """One byte-pair vocabulary for both languages; texts end in `</s>`."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END, UNKNOWN], show_progress=False
    )
    texts: Iterator[str] = (text for pair in pairs for text in (pair["source"], pair["target"]))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=POSITIONS,
    )


def make_model(args: argparse.Namespace, tokenizer: Any) -> MarianMTModel:
    """A new model, pre-trained on nothing."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(args.seed)
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=args.width,
        encoder_layers=args.encoder_layers,
        decoder_layers=args.decoder_layers,
        encoder_attention_heads=args.width // 64,
        decoder_attention_heads=args.width // 64,
        encoder_ffn_dim=4 * args.width,
        decoder_ffn_dim=4 * args.width,
        activation_function="relu",
        dropout=0.1,
        max_position_embeddings=POSITIONS,
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=end,
        forced_eos_token_id=None,
        decoder_start_token_id=pad,
    )
    # Drawn so small for embeddings that are multiplied by the root of the width.
    config.init_std = args.width**-0.5
    model = MarianMTModel(config)
    depth = {"encoder": args.encoder_layers, "decoder": args.decoder_layers}
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            # What is added to the stream starts small, as in GPT-2: where each sum is normalised,
            # blocks that start at full size are slow to learn anything.
            weight.data.mul_((2 * depth[name.split(".")[1]]) ** -0.5)
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.max_length = MOST_TOKENS
    return model


def encode(pairs: Sequence[dict[str, str]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Token ids of both sides; pairs with a longer side are left out."""
    sources = tokenizer([p["source"] for p in pairs])["input_ids"]
    targets = tokenizer([p["target"] for p in pairs])["input_ids"]
    return [
        {"input_ids": s, "labels": t}
        for s, t in zip(sources, targets, strict=True)
        if max(len(s), len(t)) <= MOST_TOKENS
    ]


class StopAfter(TrainerCallback):
    """Ends training when its minutes are over, so that a slow machine has an end too.

    Attributes:
        spent: minutes of training so far, those before a restart included.
    """

    def __init__(self, minutes: float, file: Path) -> None:
        """Go on from what `file` says; it is written with every checkpoint."""
        self._minutes, self._file = minutes, file
        self._before = float(json.loads(file.read_text())) if file.is_file() else 0.0
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """See above."""
        return self._before + (time.monotonic() - self._start) / 60

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        if self.spent > self._minutes:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        write_json(self._file, self.spent)


def train(
    args: argparse.Namespace, tokenizer: Any, work: Path
) -> tuple[MarianMTModel, dict[str, Any]]:
    """Train to the last step, or for so many minutes; the model, its steps and minutes."""
    model, clock = make_model(args, tokenizer), StopAfter(args.minutes, work / "minutes.json")
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            output_dir=str(work),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="linear",
            warmup_steps=args.steps // 10,
            label_smoothing_factor=0.1,
            train_sampling_strategy="group_by_length",
            adam_beta2=0.98,
            weight_decay=0.01,
            save_steps=500,
            save_total_limit=1,
            logging_steps=100,
            report_to="none",
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
            seed=args.seed,
        ),
        train_dataset=encode(read_pairs(args.train), tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work)))
    model.eval()
    return model, {"steps": trainer.state.global_step, "minutes": clock.spent}


@torch.inference_mode()
def translate(
    model: Any, tokenizer: Any, sources: Sequence[str], beams: int = 1, batch: int = 50
) -> list[str]:
    """Greedy or beam translations; short sentences with short ones."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    texts = [""] * len(sources)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        given = tokenizer([sources[i] for i in rows], padding=True, return_tensors="pt")
        made = model.generate(
            input_ids=given["input_ids"].to(model.device),
            attention_mask=given["attention_mask"].to(model.device),
            num_beams=beams,
        )
        for i, text in zip(
            rows, tokenizer.batch_decode(made, skip_special_tokens=True), strict=True
        ):
            texts[i] = text
    return texts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--encoder-layers", type=int, default=4)
    parser.add_argument("--decoder-layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop then, wherever it is")
    parser.add_argument("--bf16", action="store_true", help="faster where the CPU multiplies it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = target_folder(args.encoder_layers, args.decoder_layers)
    if not out.exists():
        work = out.with_name(out.name + ".partial")
        tokenizer = make_tokenizer(read_pairs(args.train), args.vocabulary)
        model, effort = train(args, tokenizer, work / "checkpoints")
        pairs = read_pairs(args.test)
        references = [[p["target"] for p in pairs]]
        bleu = {
            f"bleu_beam_{beams}": sacrebleu.corpus_bleu(
                translate(model, tokenizer, [p["source"] for p in pairs], beams), references
            ).score
            for beams in (1, 5)
        }
        finished = work / "model"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        write_json(finished / "quality.json", {**bleu, **effort, "pairs": len(pairs)})
        publish(finished, out)
        shutil.rmtree(work)
    report({"target": str(out), **json.loads((out / "quality.json").read_text())})


if __name__ == "__main__":
    main()
