"""Models in: from a reference to config, tokenizer and weights, each checked."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.checkpoints.checksums import verify_checksums
from draftsmith.checkpoints.devices import default_device, working_dtype
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.formats import ModelRef, shown, stored_tensors
from draftsmith.checkpoints.generation import repair_generation_config
from draftsmith.checkpoints.gguf_files import gguf_names, open_gguf
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import RequestError

if TYPE_CHECKING:
    # A finished run is recognised without importing torch.
    from draftsmith.checkpoints.layout import Layout


def load_config(ref: ModelRef) -> Any:
    """The transformers config."""
    from transformers import AutoConfig

    with one_error(ref):
        config = AutoConfig.from_pretrained(**ref.arguments())
        if ref.gguf and (head_dim := _gguf_head_dim(ref)):
            # transformers leaves some families' default here, whatever the file says.
            config.head_dim = head_dim
        return config


@dataclass(frozen=True)
class Configs:
    """What a model's files say of it beside its weights."""

    config: Any
    generation_config: Any


def load_configs(ref: ModelRef) -> Configs:
    """The config, and the generation config, made from the former where there is none."""
    from transformers import GenerationConfig

    config = load_config(ref)
    if not (ref.folder / "generation_config.json").is_file() or ref.gguf:
        return Configs(config, GenerationConfig.from_model_config(config))
    with one_error(ref):
        return Configs(config, GenerationConfig.from_pretrained(ref.folder))


def load_tokenizer(ref: ModelRef) -> Any:
    """The tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    with one_error(ref):
        tokenizer = AutoTokenizer.from_pretrained(**ref.arguments())
        return _as_in_gguf(tokenizer, ref) if ref.gguf else tokenizer


def describe(config: Any, ref: ModelRef) -> tuple[Family, Shape]:
    """Family table and shape of a config.

    Raises:
        RequestError: the family is not supported, or a size is no size.
    """
    family = family_of(config.model_type, ref.spec)
    try:
        return family, shape_of(config, family)
    except RequestError as error:
        raise RequestError(f"{ref.spec}: {error}") from None


def require_decoder(family: Family, place: str) -> None:
    """Refuse an encoder–decoder where only causal models are worked on.

    Raises:
        RequestError: naming what can be done with it.
    """
    if family.has_encoder:
        raise RequestError(
            f"{place}: {family.name} is an encoder–decoder; recipes run for it and `plan` plans "
            "them, but `profile` is for decoders alone"
        )


def load_model(
    ref: ModelRef, device: str | None = None, dtype: Any = None, target_ids: bool = True
) -> Any:
    """Load a model in eval mode.

    Args:
        ref: where it lies.
        device: default: an accelerator if there is one.
        dtype: default: one in which the device computes well and, on a CPU, exactly.
        target_ids: let a drafter with a cut vocabulary take and give the target's ids; false
            leaves it as it is stored, to be cut or saved again.

    Raises:
        RequestError: weights are missing, left over, of other shapes, not numbers, or damaged;
            shapes are compared before anything is loaded.
    """
    import transformers

    device = device or default_device()
    config = load_config(ref)
    family, shape = describe(config, ref)
    token_map = TokenMap.read(ref.folder, shape.vocab)
    check_files(ref, config, family)
    verify_checksums(ref.folder)
    arguments = ref.arguments() | {"config": config, "dtype": dtype or working_dtype(device)}
    if ref.gguf:
        # Without this the weights stay packed and the model can't be cut or saved.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        arguments["use_safetensors"] = not ref.pickle
    with one_error(ref):
        model, report = getattr(transformers, family.auto).from_pretrained(
            **arguments, output_loading_info=True
        )
    _check_report(ref, family, report)
    _check_finite(ref, model)
    if ref.gguf:
        # The dequantised model is an ordinary one; the mark would keep it from being saved.
        model.config.__dict__.pop("quantization_config", None)
    repair_generation_config(model)
    model = model.to(device).eval()
    if token_map is not None and target_ids:
        token_map.attach(model, family)
    return model


def check_files(ref: ModelRef, config: Any, family: Family) -> None:
    """Compare the tensors that lie in the files with those that the config implies.

    Only headers are read, and a head that may contradict the config. Pickle files are compared
    while they are loaded.

    Raises:
        RequestError: naming what is missing, left over or of another shape.
    """
    _check_layers(ref, shape_of(config, family))
    if ref.gguf:
        _check_gguf(ref, config, family)
    if ref.gguf or ref.pickle:
        return
    if getattr(config, "quantization_config", None):
        raise RequestError(
            f"{ref.spec}: config.json has a quantization_config, and quantised weights can't be "
            "cut or trained; give the original checkpoint"
        )
    from draftsmith.checkpoints.layout import layout_of

    with one_error(ref):
        expected = layout_of(config, family)
    found = _found_tensors(ref, family, expected)
    filled = {expected.aliases.get(name, name) for name in found}
    if missing := [
        name
        for name in expected.shapes
        if expected.aliases.get(name, name) not in filled
        and template_of(name)[0] not in family.rebuilt
    ]:
        raise RequestError(
            f"{ref.spec}: missing tensors: {_few(missing)}; config and weights don't belong "
            "together"
        )
    _check_tied(ref, config, family, expected, found)


def _found_tensors(ref: ModelRef, family: Family, expected: "Layout") -> dict[str, str]:
    """Transformers' name of each stored tensor -> its name in the files; all are as expected."""
    found: dict[str, str] = {}
    for tensor in stored_tensors(ref):
        name, shape = tensor.name, tensor.shape
        own = own_name(name, family, expected)
        if own is None:
            continue
        if own in found:
            raise RequestError(
                f"{ref.spec}: {found[own]} and {name} are the same tensor under two names; "
                "remove one of them"
            )
        if own not in expected.shapes:
            raise RequestError(
                f"{ref.spec}: unexpected tensor {shown(name)} {shape}; config and weights don't "
                "belong together"
            )
        if shape != expected.shapes[own]:
            raise RequestError(
                f"{ref.spec}: {name} is {shape}, but the config says {expected.shapes[own]}; "
                "config and weights don't belong together"
            )
        found[own] = name
    return found


def _check_layers(ref: ModelRef, shape: Shape) -> None:
    """Refuse a number of layers for which there can't be tensors: building it might never end."""
    layers = shape.layers + shape.encoder_layers
    if ref.pickle:
        return
    stored = open_gguf(ref.path).tensors if ref.gguf else list(stored_tensors(ref))
    if layers > len(stored):
        raise RequestError(
            f"{ref.spec}: the config says {layers} layers, but the files hold {len(stored)} "
            "tensors; config and weights don't belong together"
        )


def _check_gguf(ref: ModelRef, config: Any, family: Family) -> None:
    """Compare the tensors of a GGUF with those that its metadata imply."""
    if family.gguf is None:
        return
    from draftsmith.checkpoints.layout import layout_of

    with one_error(ref):
        expected = layout_of(config, family)
    file = open_gguf(ref.path)
    found = {t.name: tuple(map(int, reversed(t.shape))) for t in file.tensors}
    names = gguf_names(family, shape_of(config, family).layers)
    # transformers reads neither, and would compute something else without a word.
    known = {names.get(name) for name in expected.shapes}
    unread = [name for name in found if name not in known]
    for key, value in file.fields.items():
        if key.endswith(".rope.scaling.type") and value.contents() != "none":
            unread.append(key)
    if unread:
        raise RequestError(
            f"{ref.spec}: holds {shown(unread[0])}, which transformers does not read from a GGUF; "
            "give the original HF folder"
        )
    for name, wanted in expected.shapes.items():
        if name in expected.aliases:
            continue
        if names.get(name) not in found:
            raise RequestError(
                f"{ref.spec}: {names.get(name, name)} is missing; get the file again"
            )
        if found[names[name]] != wanted:
            raise RequestError(
                f"{ref.spec}: {names[name]} is {found[names[name]]}, but the metadata says "
                f"{wanted}; get the file again"
            )


def own_name(name: str, family: Family, expected: "Layout") -> str | None:
    """Transformers' name of a stored tensor; None for a left-over that means nothing.

    Old checkpoints hold the model without its head, whose names lack the prefix.
    """
    for candidate in (name, f"model.{name}"):
        if template_of(candidate)[0] in family.ignored:
            return None
        if candidate in expected.shapes:
            return candidate
    return name


def _check_tied(
    ref: ModelRef, config: Any, family: Family, expected: "Layout", found: Mapping[str, str]
) -> None:
    """Refuse tensors that the config calls one and the files hold as two that differ (case A19)."""
    pairs = {a: own for a, own in expected.aliases.items() if a in found and own in found}
    if not pairs:
        return
    wanted = {found[name]: name for name in {*pairs, *pairs.values()}}
    tensors = {wanted[t.name]: t.read() for t in stored_tensors(ref) if t.name in wanted}
    for alias, own in pairs.items():
        if not tensors[alias].equal(tensors[own]):
            hidden, power = getattr(config, family.config.hidden), family.tied_head_power
            scaled = f" and multiply {alias} by {hidden}**{power}" if power else ""
            raise RequestError(
                f"{ref.spec}: the config ties {alias} to {own}, but the files hold two tensors "
                f"that differ; set {family.tied} to false in config.json{scaled}, or remove one"
            )


def _check_report(ref: ModelRef, family: Family, report: Mapping[str, Any]) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = {str(name) for name in report.get(problem) or ()}
        if names := sorted(n for n in found if template_of(n)[0] not in family.ignored):
            raise RequestError(
                f"{ref.spec}: {problem.replace('_keys', '')} tensors: {_few(names)}; config and "
                "weights don't belong together"
            )


def _check_finite(ref: ModelRef, model: Any) -> None:
    for name, tensor in model.state_dict().items():
        check_finite(ref, name, tensor)


def check_finite(ref: ModelRef, name: str, tensor: Any) -> None:
    """Refuse a tensor with NaN or infinite values.

    Raises:
        RequestError: naming it.
    """
    # Both ends are NaN if anything is; no copy of the tensor is made.
    low, high = tensor.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise RequestError(
            f"{ref.spec}: {name} holds values that are no numbers (NaN or infinite); "
            "get the weights again"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def quiet_transformers() -> None:
    """Leave the terminal to our own lines and bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _gguf_head_dim(ref: ModelRef) -> int | None:
    fields = open_gguf(ref.path).fields
    field = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
    return int(field.contents()) if field else None


def _as_in_gguf(tokenizer: Any, ref: ModelRef) -> Any:
    """Undo the tokens that transformers' converter adds to a vocabulary that lacks its defaults.

    An added token has no row in the model, and other runtimes refuse the pair (case A32).
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fields = open_gguf(ref.path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    if len(tokenizer) <= len(tokens):
        return tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [t for t in backend["added_tokens"] if t["id"] < len(tokens)]
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if field := fields.get(f"tokenizer.ggml.{key}_token_id"):
            special[f"{name}_token"] = tokens[field.contents()]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=tokenizer.chat_template,
        **special,
    )


@contextmanager
def one_error(ref: ModelRef) -> Iterator[None]:
    """Turn whatever a library raises over a model's files into one request error."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors raise what they like
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:3]) or repr(error)
        raise RequestError(f"{ref.spec}: can't be loaded: {reason}") from error
