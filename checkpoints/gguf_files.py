"""Reading GGUF files without being led astray by a damaged header."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.families.base import Family


def open_gguf(path: Path) -> Any:
    """The gguf package's reader, which refuses headers that promise more than the file holds.

    Parsing a vocabulary takes seconds, so the last file stays open as long as it is unchanged.

    Raises:
        ValueError: the header is damaged; the package raises others too.
    """
    state = path.stat()
    return _open(path.absolute(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _open(path: Path, modified: int, size: int) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Without the check, a length that one flipped bit made huge is read for hours."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError(f"it ends at byte {self.data.nbytes}, in the middle of its header")
            return found

    return Reader(path)


def gguf_names(family: Family, layers: int) -> Mapping[str, str]:
    """A mapping from transformers' names of tensors to those of a family's GGUF."""
    import gguf

    assert family.gguf is not None
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(architectures[family.gguf.architecture], layers)
    names = {}
    for template in family.tensors:
        for layer in range(layers if "{layer}" in template else 1):
            name = template.format(layer=layer)
            new = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is not None:
                names[name] = new
    return names
