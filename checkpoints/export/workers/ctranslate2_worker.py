"""CTranslate2: a folder of its own form, read by whichever class of it serves the kind of model."""

import json
import struct
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

VERSION = f"ctranslate2 {ctranslate2.__version__}"


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What an export says; it splits no text, and of sound it gives the greedy text alone."""
    kind, compute_type = kind_of(Path(path)), questions["compute_type"]
    if kind == "TransformerDecoder":
        return _of_decoder(path, questions, compute_type)
    if kind == "Transformer":
        return _of_translator(path, questions, compute_type)
    model = getattr(ctranslate2.models, kind)(path, compute_type=compute_type)
    return _of_sound(model, questions)


def kind_of(path: Path) -> str:
    """The kind of model, which the weights begin with after a version and a length."""
    with (path / "model.bin").open("rb") as file:
        _, length = struct.unpack("<IH", file.read(6))
        name = file.read(length).rstrip(b"\0").decode()
    return name.removesuffix("Spec")


def _tokens(path: str, name: str) -> list[str]:
    """Strings by id; one file where source and target have the same."""
    (file,) = Path(path).glob(f"*{name}.json")
    strings: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return strings


def _of_decoder(path: str, questions: dict[str, Any], compute_type: str) -> dict[str, Any]:
    generator = ctranslate2.Generator(path, compute_type=compute_type)
    strings = _tokens(path, "vocabulary")
    logits = np.asarray(generator.forward_batch(questions["inputs"]["input_ids"]))[0]
    (result,) = generator.generate_batch(
        [[strings[i] for i in questions["prompt"]]],
        max_length=questions["new_tokens"],
        include_prompt_in_result=False,
        return_end_token=True,
    )
    return {"logits": logits, "greedy": result.sequences_ids[0], "strings": None}


def _of_translator(path: str, questions: dict[str, Any], compute_type: str) -> dict[str, Any]:
    """The decoder's first token is the model's own; what follows can be prescribed."""
    translator = ctranslate2.Translator(path, compute_type=compute_type)
    strings = _tokens(path, "vocabulary")
    source = [strings[i] for i in questions["inputs"]["input_ids"][0]]
    forced = [strings[i] for i in questions["inputs"]["decoder_input_ids"][0][1:]]
    prompt = [strings[i] for i in questions["prompt"][1:]]

    def decode(prefix: list[str], new_tokens: int) -> Any:
        return translator.translate_batch(
            [source],
            [prefix],
            beam_size=1,
            max_input_length=0,
            max_decoding_length=len(prefix) + new_tokens,
            min_decoding_length=0,
            return_end_token=True,
            return_logits_vocab=True,
        )[0]

    ids = {string: i for i, string in enumerate(strings)}
    greedy = [ids[s] for s in decode(prompt, questions["new_tokens"]).hypotheses[0]]
    logits = np.asarray([np.asarray(step) for step in decode(forced, 1).logits[0]])
    return {"logits": logits, "greedy": greedy[len(prompt) :], "strings": None}


def _of_sound(model: Any, questions: dict[str, Any]) -> dict[str, Any]:
    features = np.asarray(questions["inputs"]["input_features"], np.float32)
    (result,) = model.generate(
        ctranslate2.StorageView.from_array(features),
        [questions["prompt"]],
        beam_size=1,
        max_length=len(questions["prompt"]) + questions["new_tokens"],
        suppress_blank=False,
        suppress_tokens=[],
    )
    return {"logits": None, "greedy": result.sequences_ids[0], "strings": None}
