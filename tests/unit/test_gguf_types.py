"""GGUF files in every type that the gguf library dequantises are read exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.checkpoints.export import gguf as export_gguf
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.inspection import inspect_checkpoint
from draftsmith.checkpoints.loading import load_model
from draftsmith.errors import RequestError
from tests.conftest import job_of, make_model

# Byte offsets of the half-precision scales in a block of 256 weights.
K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# A projection that no rotary reordering touches, in both vocabularies of names.
OURS, THEIRS = "model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"


@pytest.fixture(scope="module")
def wide() -> Any:
    """One layer, as wide as a block of K-quants."""
    return make_model(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, initializer_range=0.05
    )


def packed(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Rows in a type; for K-quants, which the library only reads, blocks of random codes."""
    import gguf

    quantisation = gguf.GGMLQuantizationType[kind]
    if kind not in K_SCALES:
        quantised: np.ndarray[Any, Any] = gguf.quants.quantize(weight, quantisation)
        return quantised
    size, width = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = np.random.default_rng(0).integers(
        0, 256, (weight.shape[0], weight.shape[1] // size, width), np.uint8
    )
    for offset in K_SCALES[kind]:
        blocks[..., offset : offset + 2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def rewritten(source: Path, path: Path, kind: str) -> np.ndarray[Any, Any]:
    """Copy a GGUF with one tensor in another type; returns that tensor's values."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            sub_type = field.types[-1] if array else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    values = np.empty(0)
    for tensor in reader.tensors:
        data, as_type = tensor.data, tensor.tensor_type
        if tensor.name == THEIRS:
            as_type = gguf.GGMLQuantizationType[kind]
            data = packed(np.array(data), kind)
            values = gguf.quants.dequantize(data, as_type)
        writer.add_tensor(tensor.name, data, raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("kind", [*PLAIN, *K_SCALES])
def test_every_type_is_read(
    kind: str, wide: Any, save: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "f32.gguf"
    export_gguf.write(job_of(wide, save(wide)), source, "F32")
    path = tmp_path / "other.gguf"
    values = rewritten(source, path, kind)
    model = load_model(resolve(str(path)))
    assert torch.equal(model.state_dict()[OURS], torch.from_numpy(values.reshape(256, 256)))
    for name, tensor in wide.state_dict().items():
        if name != OURS:
            assert torch.equal(model.state_dict()[name], tensor), name
    types = inspect_checkpoint(resolve(str(path)))["stored"]["values_by_type"]
    assert types[kind] >= values.size


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_bias": True}, r"blk\.0\.attn_\w+\.bias"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            r"llama\.rope\.scaling\.type",
        ),
    ],
    ids=["biases", "scaling"],
)
def test_what_transformers_passes_over_is_refused(
    changes: dict[str, Any], told: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp reads the file; here it would be another model without a word."""
    model = make_model(**changes)
    path = tmp_path / "own.gguf"
    export_gguf.write(job_of(model, save(model)), path, "F32")
    with pytest.raises(RequestError, match=f"holds {told}, which transformers does not read"):
        load_model(resolve(str(path)))
