"""Images of rows: found in every form, named when they are not what they should be, and made into
the tensors that the model's own processor makes."""

from __future__ import annotations

import base64
import copy
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from examples.images import draw
from megatrain.data import images as of_images
from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.images import Sight
from megatrain.data.micro_batches import collate
from megatrain.data.rows import TokenRows
from megatrain.data.samples import JUDGED, PAIRS, read_prompts
from megatrain.engine.batches import for_loss
from megatrain.errors import DataError
from megatrain.models.recorder import with_places
from megatrain.models.trials.small import plain_model

QUESTION, ANSWER = "what shape is it ?", "circle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and two pictures."""
    found = tmp_path_factory.mktemp("images")
    draw.model(found / "model")
    Image.new("RGB", (96, 48), "red").save(found / "wide.png")
    turned = Image.new("RGB", (60, 40), "blue")
    exif = turned.getexif()
    exif[0x0112] = 6  # a camera that was held upright
    turned.save(found / "turned.jpg", exif=exif)
    return found


@pytest.fixture(scope="module")
def sight(folder: Path) -> Sight:
    found = Sight.of(folder / "model", AutoTokenizer.from_pretrained(folder / "model"), "qwen3_vl")
    assert found is not None
    return found


def rows_of(given: Any, sight: Sight | None, cache: Path, **options: Any) -> TokenRows:
    tokenizer: Any = None if sight is None else sight.processor.tokenizer
    how = RowOptions(**{"seq_len": 200, "sight": sight, **options})
    rows, _ = load_data(given, None, tokenizer, how, seed=0, cache=cache)
    assert isinstance(rows, TokenRows)
    return rows


def file_of(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]


def asked(image: Any) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]


def encoded(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def test_every_form_of_a_row_gives_the_same_rows(folder, sight, tmp_path):
    wide, shared = str(folder / "wide.png"), [{"type": "image"}, asked(None)[1]]
    url = {"type": "image_url", "image_url": {"url": encoded(folder / "wide.png")}}
    sharegpt = [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    rows = [
        {"messages": turns(asked("wide.png"))},
        {"messages": turns(asked(wide))},
        {"messages": turns([url, asked(None)[1]])},
        {"messages": turns(shared), "images": [wide]},
        {"messages": turns(QUESTION), "image": "wide.png"},
        {"messages": turns(f"<image>{QUESTION}"), "images": [{"path": wide, "bytes": None}]},
        {"conversations": sharegpt, "image": wide},
        {"prompt": [turns(shared)[0]], "completion": [turns("")[1]], "images": [wide]},
    ]
    first = rows_of(file_of(folder, rows[0]), sight, tmp_path)
    for row in rows:
        found = rows_of(file_of(folder, row), sight, tmp_path)
        ids, mask = found.row(0)
        (picture,) = found.pictures(0, 0)
        assert (picture.width, picture.height) == (96, 48)
        assert (ids == next(iter(sight.ids))).sum() == 18
        assert sight.processor.tokenizer.decode(ids[mask]) == "circle <|end|>"
        assert found.digest == first.digest
    pillow = [{"messages": turns(shared), "images": [Image.open(folder / "wide.png")]}]
    assert rows_of(pillow, sight, tmp_path).row(0)[0].tolist() == first.row(0)[0].tolist()


BAD: dict[str, tuple[Any, str]] = {
    "missing": ("no.png", "no.png: cannot be read: No such file"),
    "broken": ("broken.png", "broken.png: broken, or no image"),
    "no image": ("rows.jsonl", "rows.jsonl: broken, or no image"),
    "huge": ("huge.png", "huge.png: 50000 x 50000 pixels; more than"),
    "an address": ("https://a.b/c.png", "addresses are not fetched"),
    "a number": (7, "an image is a path"),
    "a zero": ("a\0b", "null byte"),
    "no base64": ("data:image/png;base64,?", "no base64"),
    "a folder": (".", "is no file"),
    "a pipe": ("pipe.png", "pipe.png: is no file"),
    "a device": ("/dev/zero", "/dev/zero: is no file"),
    "a loop": ("loop.png", "loop.png: cannot be read: Too many levels"),
    "half a PNG": ("half.png", "half.png: broken, or no image"),
    "half a JPEG": ("half.jpg", "half.jpg: broken, or no image"),
    "empty": ("empty.png", "empty.png: broken, or no image"),
    "lines": ("line.png", "line.png: the model's processor refuses it .absolute aspect ratio"),
    "16 bits": ("grey16.png", "grey16.png: over 8 bits a pixel .I;16.; convert it"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_picture_is_named_with_its_row(what, folder, sight, tmp_path):
    whole = (folder / "wide.png").read_bytes()
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n" + whole[6:20])
    header = b"IHDR" + (50_000).to_bytes(4) * 2 + whole[24:29]
    huge = whole[:12] + header + zlib.crc32(header).to_bytes(4) + whole[33:]
    (folder / "huge.png").write_bytes(huge)
    (folder / "empty.png").touch()
    (folder / "half.png").write_bytes(whole[:-20])
    turned = (folder / "turned.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(turned[: -len(turned) // 4])
    Image.new("RGB", (1, 5000)).save(folder / "line.png")
    Image.new("I;16", (40, 40)).save(folder / "grey16.png")
    for name in ("pipe.png", "loop.png"):
        (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / "pipe.png")
    (folder / "loop.png").symlink_to("loop.png")
    named, said = BAD[what]
    rows = [{"messages": turns(asked(image))} for image in ("wide.png", named)]
    with pytest.raises(DataError, match=f"rows.jsonl:2.*{said}"):
        rows_of(file_of(folder, *rows), sight, tmp_path)


COUNTS: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"messages": turns(f"<image><image>{QUESTION}"), "images": ["wide.png"]}, "more m"),
    "too many": ({"messages": turns(asked("wide.png")), "images": ["wide.png"]}, "1 of the row's"),
    "its own token": ({"messages": turns("<|image_pad|>?"), "image": "wide.png"}, "marks"),
    "a token without image": ({"messages": turns("<|image_pad|>?")}, "1 marks for 0 images"),
    "a text with it": ({"text": "a <|image_pad|> token"}, "1 marks for 0 images"),
    "two columns": ({"messages": turns("?"), "image": "a", "images": ["a"]}, "says the same"),
    "two names": ({"messages": turns([{"type": "image", "image": "a", "url": "b"}])}, "keep one"),
    "our mark": ({"messages": turns(f"\ufffc{QUESTION}"), "image": "wide.png"}, "U\\+FFFC"),
    "text": ({"text": "a cat", "image": "wide.png"}, "field 'image'"),
}


MEDIA: dict[str, dict[str, Any]] = {
    "videos": {"messages": turns(QUESTION), "videos": ["a.mp4"]},
    "video": {"messages": turns(asked("wide.png")), "video": "a.mp4"},
    "audios": {"messages": turns(QUESTION), "audios": ["a.wav"]},
    "audio": {"conversations": [{"from": "human", "value": "?"}], "audio": "a.wav"},
    "'video'": {"messages": turns([{"type": "video", "video": "a.mp4"}, *asked("wide.png")])},
    "'input_audio'": {"messages": turns([{"type": "input_audio", "input_audio": {}}])},
}


@pytest.mark.parametrize("what", MEDIA)
def test_videos_and_sounds_are_refused_with_what_to_do(what, folder, sight, tmp_path):
    path = file_of(folder, {"messages": turns(QUESTION), "videos": []}, MEDIA[what])
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{what}.*; leave the row out"):
        rows_of(path, sight, tmp_path)


KINDS_OF_PICTURES = ("P", "LA", "1", "CMYK", "RGBA", "gif", "webp")


def test_pictures_of_every_kind_are_seen_in_rgb(folder, sight, tmp_path):
    drawn, paths = Image.radial_gradient("L").resize((96, 48)).convert("RGB"), list[str]()
    for kind in KINDS_OF_PICTURES:
        ends = kind if kind.islower() else {"CMYK": "tiff"}.get(kind, "png")
        paths.append(f"kind-{kind}.{ends}")
        more: Any = {"save_all": True, "append_images": [drawn.rotate(90)]} if kind == "gif" else {}
        one = drawn if kind.islower() else drawn.convert(kind)
        one.save(folder / paths[-1], **more)
    rows = rows_of(
        file_of(folder, *({"messages": turns(asked(path))} for path in paths)), sight, tmp_path
    )
    for number, path in enumerate(paths):
        (picture,) = rows.pictures(number, 0)
        with Image.open(folder / path) as image:
            assert (picture.width, picture.height) == image.size
            assert of_images.opened(picture).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("what", COUNTS)
def test_marks_and_images_must_fit(what, folder, sight, tmp_path):
    row, said = COUNTS[what]
    with pytest.raises(DataError, match=said):
        rows_of(file_of(folder, row), sight, tmp_path)


def test_a_changed_picture_is_found_and_a_long_row_is_dropped(folder, sight, tmp_path, monkeypatch):
    Image.new("RGB", (96, 48), "red").save(folder / "a.png")
    other = {"messages": turns(asked("a.png"))}
    long = {"messages": turns([*asked("a.png"), *asked("a.png"), *asked("a.png")])}
    rows = rows_of(file_of(folder, other, long), sight, tmp_path, seq_len=50)
    assert (len(rows), rows.counts.too_long) == (1, 1)
    batch = collate(rows, [[0]], 0)
    assert batch["pixel_values"].shape == (72, 384)
    monkeypatch.setattr(sight, "dtype", torch.bfloat16)  # a run's: loaders round, not the step
    rounded = collate(rows, [[0]], 0)
    assert torch.equal(rounded["pixel_values"], batch["pixel_values"].bfloat16())
    assert torch.equal(rounded["image_grid_thw"], batch["image_grid_thw"])
    Image.new("RGB", (96, 48), "green").save(folder / "a.png")
    with pytest.raises(DataError, match=r"a\.png: has changed since its row was tokenised"):
        collate(rows, [[0]], 0)
    assert rows_of(folder / "rows.jsonl", sight, tmp_path, seq_len=50).digest != rows.digest
    monkeypatch.setattr(of_images, "MOST_PIXELS", 100)
    with pytest.raises(DataError, match="96 x 48 pixels"):
        rows_of(folder / "rows.jsonl", sight, tmp_path / "again")


@pytest.mark.parametrize("several", [False, True], ids=["one image", "several"])
def test_micro_batches_are_those_of_trl_s_collator(folder, sight, tmp_path, several):
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    names = [["wide.png"] + ["turned.jpg"] * several, ["turned.jpg"]]
    rows = [
        {
            "prompt": [{"role": "user", "content": [parts[0]] * len(images) + parts[1:]}],
            "completion": [{"role": "assistant", "content": answer}],
            "images": images,
        }
        for images, answer in zip(names, (ANSWER, "red square"), strict=True)
    ]
    found = rows_of(file_of(folder, *rows), sight, tmp_path)
    ours = collate(found, [[0], [1]], sight.processor.tokenizer.pad_token_id)
    opened = [[of_images.opened(one) for one in found.pictures(n, 0)] for n in (0, 1)]
    sight.processor.chat_template = sight.processor.tokenizer.chat_template
    theirs = trainer.DataCollatorForVisionLanguageModeling(
        sight.processor, completion_only_loss=True
    )([{**copy.deepcopy(row), "images": images} for row, images in zip(rows, opened, strict=True)])
    for name in ("input_ids", "labels", "pixel_values", "image_grid_thw", "mm_token_type_ids"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def test_packed_rows_have_the_positions_and_pixels_of_each_alone(folder, sight, tmp_path):
    images = [["wide.png", "turned.jpg"], ["turned.jpg"], ["wide.png"]]
    rows = [{"messages": turns([part for one in row for part in asked(one)])} for row in images]
    rows.append({"messages": turns(QUESTION)})
    found = rows_of(file_of(folder, *rows), sight, tmp_path)
    model: Any = plain_model(AutoConfig.from_pretrained(folder / "model"))
    taken: list[torch.Tensor] = []
    rotary = model.model.language_model.rotary_emb
    rotary.register_forward_pre_hook(lambda _module, given: taken.append(given[1]))

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        given = {name: values for name, values in batch.items() if not for_loss(name)}
        with torch.no_grad():
            return model(**with_places(model, given), use_cache=False).logits  # type: ignore[no-any-return]

    sequences = [[0, 3, 1], [2]]
    both = logits(collate(found, sequences, 0, pack_to=sum(found.lengths[[0, 3, 1]]) + 2))
    places = taken.pop()
    for line, members in enumerate(sequences):
        start = 0
        for row in members:
            span = slice(start, start := start + int(found.lengths[row]))
            alone = logits(collate(found, [[row]], 0))[0]
            assert torch.equal(places[:, line, span], taken.pop()[-3:, 0])
            torch.testing.assert_close(both[line, span], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "more"), [(PAIRS, {}), (JUDGED, {"label": True})])
def test_both_answers_of_a_pair_and_mismatches_see(kind, more, folder, sight, tmp_path):
    asks = {"prompt": [{"role": "user", "content": QUESTION}], "image": "wide.png"}
    words = {"chosen": "circle", "rejected": "square"}
    answers = {name: [{"role": "assistant", "content": word}] for name, word in words.items()}
    rows = [asks | answers, asks | answers]
    if kind == JUDGED:
        rows = [{**asks, "completion": answers[name], **more} for name in answers]
        rows[1]["image"] = "turned.jpg"
    found = rows_of(file_of(folder, *rows), sight, tmp_path, kind=kind)
    sides = [[Path(one.path).name for one in found.pictures(0, side)] for side in (0, 1)]
    assert sides == [["wide.png"], ["wide.png"]]
    batch = collate(found, [[0], [1]], 0)
    assert batch["pixel_values"].shape[0] == 2 * batch["image_grid_thw"][0].prod()


def test_rows_of_two_texts_stay_as_they_are_beside_those_with_an_image(folder, sight, tmp_path):
    text = {"prompt": QUESTION, "completion": f" {ANSWER}"}
    rows = rows_of(file_of(folder, text, text | {"image": "wide.png"}), sight, tmp_path)
    assert [len(rows.pictures(row, 0)) for row in (0, 1)] == [0, 1]
    alone = rows_of(file_of(folder, text), sight, tmp_path)
    assert rows.row(0)[0].tolist() == alone.row(0)[0].tolist()


def test_what_an_image_s_part_says_beside_is_named_and_prompts_have_none(folder, sight, tmp_path):
    part = {"type": "image", "image": "wide.png", "text": "a cat", "detail": "high"}
    rows = rows_of(file_of(folder, {"messages": turns([part, asked(None)[1]])}), sight, tmp_path)
    assert {*rows.counts.unread} == {"messages[].content[].text", "messages[].content[].detail"}
    path = file_of(folder, {"messages": turns(asked("wide.png"))[:1]})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*images in prompts are not read"):
        read_prompts(str(path))
