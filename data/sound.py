"""Sound that encoders hear: read from files, kept as samples, made into features where needed."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.errors import RequestError

SUFFIXES = (".wav", ".flac")
_FULL_SCALE = 1 << 15


@dataclass(frozen=True, eq=False)
class Sound:
    """A mono sound at the rate that its listener expects.

    Features are many times its size, so they are made anew wherever a model listens.

    Attributes:
        samples: int16 [S].
        listener: a folder with the settings of a feature extractor, the target's own.
    """

    samples: NDArray[np.int16]
    listener: Path

    def __len__(self) -> int:
        """Samples."""
        return len(self.samples)

    def tobytes(self) -> bytes:
        """Its samples, by which equal sounds are known."""
        return self.samples.tobytes()

    def features(self) -> Tensor:
        """What an encoder hears, float32 [bands, frames]."""
        extractor = feature_extractor(self.listener)
        heard = extractor(
            self.samples.astype(np.float32) / _FULL_SCALE,
            sampling_rate=extractor.sampling_rate,
            return_tensors="pt",
        )
        features: Tensor = heard["input_features"][0]
        return features


@lru_cache
def feature_extractor(folder: Path) -> Any:
    """The feature extractor of a checkpoint.

    Raises:
        RequestError: the folder has none.
    """
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{folder}: no settings of a feature extractor ({reason}); add the "
            "preprocessor_config.json of the original checkpoint"
        ) from None


def sound_files(folder: Path) -> list[Path]:
    """The files of sound below a folder, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def read_sound(path: Path, listener: Path) -> Sound:
    """Read a whole file.

    Args:
        path: .wav, .flac, or what else libsndfile reads.
        listener: as of `Sound`.

    Raises:
        RequestError: there is no such file, it holds no sound, or one that the listener can't
            take as it is.
    """
    import soundfile

    if not path.is_file():
        raise RequestError(
            f"{path}: there is no such file; paths of sounds start at the folder of their JSONL"
        )
    try:
        # As floats: of files that hold such, integers would be read without their scale.
        samples_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise RequestError(
            f"{path}: no sound that can be read ({error}); write it anew with "
            f"`ffmpeg -i {path.name} -ac 1 OUT.wav`, or take it out"
        ) from None
    _check(path, samples_SC, rate, feature_extractor(listener))
    scaled = (samples_SC[:, 0] * _FULL_SCALE).round().clip(-_FULL_SCALE, _FULL_SCALE - 1)
    return Sound(scaled.astype(np.int16), listener)


def _check(path: Path, samples_SC: NDArray[np.float32], rate: int, extractor: Any) -> None:
    """Refuse what would be heard as something else, or not at all."""
    length, channels = samples_SC.shape
    wanted, most = extractor.sampling_rate, extractor.n_samples
    if rate != wanted:
        raise RequestError(
            f"{path}: {rate} samples a second, and the target's encoder hears {wanted}; resample "
            f"it with `ffmpeg -i {path.name} -ac 1 -ar {wanted} OUT.wav`"
        )
    if channels != 1:
        raise RequestError(
            f"{path}: {channels} channels, and the target's encoder hears one; mix them with "
            f"`ffmpeg -i {path.name} -ac 1 OUT.wav`"
        )
    if not length:
        raise RequestError(f"{path}: 0 samples, so there is nothing to hear; take it out")
    if length > most:
        raise RequestError(
            f"{path}: {length / rate:.1f} s, and the target's encoder hears {most / wanted:g} s at "
            "most; cut it into parts"
        )
    if not np.isfinite(samples_SC).all():
        raise RequestError(f"{path}: samples that are not numbers; get the file anew")
