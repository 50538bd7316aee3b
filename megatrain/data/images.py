"""Images of rows: found and checked where rows are tokenised, opened where they are trained on.

What a model makes of an image, its tokens and its pixels, is its own processor's, on Pillow. Rows
keep ids with an image's tokens and, of each image, its file, hash and size: never its pixels.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.samples import Picture, RowError
from megatrain.errors import DataError, system_errors
from megatrain.machine.profile import cache_folder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MOST_PIXELS = 100_000_000  # of a picture; a scan of 300 dpi in A2 has 35 million
MOST_BYTES = 1 << 30
BLANK = 64  # pixels of a side of the picture that a model is tried with
OPENED = 8  # threads
NAMES = ("bytes", "path", "image", "url", "image_url")  # datasets: bytes, or a path
TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments that mark the tokens of images
OF_TOKENS = ("input_ids", "attention_mask", *TYPES)
PROBLEMS = (OSError, ValueError, SyntaxError, EOFError, ArithmeticError)  # of Pillow's readers


def picture_of(value: object, folder: Path) -> Picture:
    """The image that a row names: a path (relative: to `folder`, of the data), bytes, base64 as in
    `data:image/...`, or an object with one of these, as datasets' Image feature is. Raises
    RowError, also where a JPEG or PNG has lost its end."""
    while isinstance(value, Mapping):
        value = next((value[name] for name in NAMES if value.get(name) is not None), None)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError:
            raise RowError("an image's data: is no base64") from None
    if isinstance(value, str) and "://" in value:
        raise RowError(f"image {value:.80}: addresses are not fetched; name a downloaded file")
    if isinstance(value, bytes):
        path = _kept(value)
    elif isinstance(value, str) and value:
        path = os.path.abspath(folder / os.path.expanduser(value))
    elif hasattr(value, "save") and hasattr(value, "mode"):  # Pillow's own, of a Dataset
        value.save(png := io.BytesIO(), "PNG")
        path = _kept(png.getvalue())
    else:
        raise RowError(f"an image is a path, bytes or an object with these, not {value!r:.60}")
    data = _read(path)
    with _problems_named(path):
        image = _opened(data)
        if not 0 < image.width * image.height <= MOST_PIXELS:
            raise RowError(
                f"image {path}: {image.width} x {image.height} pixels; more than {MOST_PIXELS:,} "
                "are not read; make it smaller"
            )
        if image.mode[0] in "IF":  # Pillow would make nearly all of it white, or black
            raise RowError(f"image {path}: over 8 bits a pixel ({image.mode}); convert it to RGB")
        turned = _has_exif(image) and image.getexif().get(0x0112) in (5, 6, 7, 8)
        width, height = image.size[::-1] if turned else image.size
        image.draft("L", (1, 1))  # is it whole? A JPEG is decoded in little, a PNG's sums compared
        (image.load if image.format in ("JPEG", "MPO") else image.verify)()
    return Picture(path, os.stat(path).st_mtime_ns, _digest(data), width, height)


def has_changed(picture: Picture) -> bool:
    """True if the file of an image is gone, or has other bytes than where its row was tokenised."""
    try:
        written = os.stat(picture.path).st_mtime_ns
        return written != picture.written and _digest(_read(picture.path)) != picture.sha256
    except (OSError, RowError):
        return True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: str) -> bytes:
    try:
        if os.stat(path).st_size > MOST_BYTES:
            raise RowError(f"image {path}: over {MOST_BYTES >> 30} GiB")
        if not os.path.isfile(path):  # a pipe would be waited for
            raise RowError(f"image {path}: is no file")
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a name may hold a zero
        reason = getattr(error, "strerror", None) or error
        raise RowError(f"image {path}: cannot be read: {reason}") from None


@contextmanager
def _problems_named(path: str, what: str = "broken, or no image") -> Iterator[None]:
    """Raise RowError, with the file's name, for what Pillow or a processor says of one."""
    try:
        yield
    except PROBLEMS as error:
        reason = " ".join(str(error).partition("<")[0].split()) or type(error).__name__
        raise RowError(f"image {path}: {what} ({reason})") from error


def _opened(data: bytes) -> Image:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # our own limit counts, which is looked at first
    return Image.open(io.BytesIO(data))


def _has_exif(image: Image) -> bool:
    """True if a camera's notes precede the pixels; Pillow would decode a PNG to look behind."""
    return image.format != "PNG" or "exif" in image.info


def _kept(data: bytes) -> str:
    """The file in the cache that has these bytes, which a row had in itself."""
    name = _digest(data)
    path = cache_folder() / "images" / name[:2] / name
    with system_errors(path, "keep an image here", "set MEGATRAIN_CACHE to another folder"):
        if not path.exists() or path.stat().st_size != len(data):  # half, where power failed
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{name}.{os.getpid()}")
            new.write_bytes(data)
            new.rename(path)
    return str(path)


def opened(picture: Picture) -> Image:
    """The image in RGB, upright. Raises DataError if the file is not what it was."""
    from PIL import ImageOps

    data = _read(picture.path)
    if _digest(data) != picture.sha256:
        raise DataError(
            f"image {picture.path}: has changed since its row was tokenised; bring it back, or "
            "start a new run"
        )
    with _problems_named(picture.path):
        image = _opened(data)
        return (ImageOps.exif_transpose(image) if _has_exif(image) else image).convert("RGB")


# why: decision 0068
class Sight:
    """A model's processor: the tokens and tensors that it makes of images."""

    def __init__(self, processor: Any) -> None:
        from PIL import Image

        self.processor = processor
        self.dtype: torch.dtype | None = None  # of the computation; None: processors' own
        self.token: str = processor.image_token
        self._expanded = lru_cache(maxsize=4096)(self._expand)
        # the arguments of the model's forward for a row of one small picture
        drawn = Image.radial_gradient("L").resize((BLANK, BLANK)).convert("RGB")
        found = processor(text=[self.token], images=[[drawn]], return_tensors="pt")
        self._types = [name for name in TYPES if name in found]
        self.row = {name: value for name, value in found.items() if name != "attention_mask"}
        self.ids = {int(i) for i in processor.image_token_ids if i is not None}

    @classmethod
    def of(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, family: str) -> Sight | None:
        """The processor of a model's folder; None without one. Raises DataError where transformers
        cannot load it, or it is of another kind."""
        from transformers import AutoImageProcessor

        if not any(folder.glob("*processor_config.json")):
            return None
        try:
            images = AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
            return cls(_processor(folder, images, tokenizer, family))
        except Exception as error:  # whatever a family's code raises
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise DataError(
                f"{folder}: its processor of images cannot be used ({reason}); set model.images: "
                "false to train on text"
            ) from error

    @property
    def identity(self) -> str:
        """A name of everything that an image's tokens follow from."""
        plain = {k: v for k, v in vars(self.processor).items() if isinstance(v, int | str)}
        parts = [type(self.processor).__name__, plain, self.processor.image_processor.to_dict()]
        return json.dumps(parts, sort_keys=True, default=str)

    def _expand(self, width: int, height: int) -> str:
        """The text that stands for an image of this size."""
        from PIL import Image

        blank = Image.new("RGB", (width, height))
        found = self.processor(
            text=[self.token], images=[[blank]], return_text_replacement_offsets=True
        )
        ((place,),) = found["text_replacement_offsets"]
        return str(place["replacement"])

    def expanded(self, text: str, pictures: Sequence[Picture]) -> tuple[str, Callable[[int], int]]:
        """The text with each image's mark replaced by all of its tokens, and where a character of
        the text is in it. Raises RowError where there are not as many marks as images."""
        pieces = text.split(self.token)
        if len(pieces) != len(pictures) + 1:
            raise RowError(
                f"the chat template writes {len(pieces) - 1} marks for {len(pictures)} images; "
                "use a template for images, and no mark of them in the texts"
            )
        inserted = list[str]()
        for one in pictures:
            with _problems_named(one.path, "the model's processor refuses it"):
                inserted.append(self._expanded(one.width, one.height))
        whole = pieces[0] + "".join(a + b for a, b in zip(inserted, pieces[1:], strict=True))
        ends = np.cumsum([len(piece) + len(self.token) for piece in pieces])[:-1]
        gained = np.cumsum([0, *(len(one) - len(self.token) for one in inserted)])

        def moved(place: int) -> int:
            return place + int(gained[np.searchsorted(ends, place, side="right")])

        return whole, moved

    def inputs(self, rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
        """The tensors that a forward takes for the images of a micro-batch's rows, some of which
        may have none. Raises DataError for an image that is not what it was."""
        from concurrent.futures import ThreadPoolExecutor

        seeing = [row for row in rows if row]
        with ThreadPoolExecutor(OPENED) as threads:
            images = [list(threads.map(opened, row)) for row in seeing]
        texts = [self.token * len(row) for row in seeing]
        found = self.processor(text=texts, images=images, return_tensors="pt", padding=True)
        return {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in found.items()
            if name not in OF_TOKENS
        }

    def types(self, ids: Any) -> dict[str, Any]:
        """Marks of the tokens that are of images, int64 as `ids`, by the model's name for them."""
        return {name: np.isin(ids, [*self.ids]).astype(np.int64) for name in self._types}


def _processor(folder: Path, images: Any, tokenizer: PreTrainedTokenizerBase, family: str) -> Any:
    """The folder's processor, of texts and images alone: of others it wants further packages."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    stated: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (path := folder / name).is_file():
            stated |= json.loads(path.read_bytes())
    named = stated.get("processor_class") or PROCESSOR_MAPPING_NAMES[family]
    kind = getattr(transformers, named, None) or getattr(
        transformers, str(PROCESSOR_MAPPING_NAMES[family])
    )
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    known = inspect.signature(kind.__init__).parameters
    of_parts = ("image_processor", "tokenizer", "video_processor", "feature_extractor")
    given = {k: v for k, v in stated.items() if k in known and k not in of_parts}
    made = partial(type(kind.__name__, (kind,), unchecked), images, tokenizer)
    return made(**given)
