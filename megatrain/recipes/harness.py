"""An engine as a model class of lm-evaluation-harness: its `hf` backend, computing otherwise.

https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    configure_pad_token,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from megatrain.data.micro_batches import alike, cuts
from megatrain.data.template import Template
from megatrain.engine.engine import Engine
from megatrain.engine.inference import free_bytes, starting_from
from megatrain.engine.rollout.decode import AnswerRequest
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import ConfigError
from megatrain.models.family import regimes_of
from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS
from megatrain.recipes.frozen import sweeps
from megatrain.recipes.loop import SWEEP_MICRO_BATCHES
from megatrain.recipes.model import Model
from megatrain.recipes.sample import end_tokens

# Micro-batches of one sweep, at most, and the share of a GPU's free memory that their hidden
# states, old and new, may take.
MOST_MICRO_BATCHES, SHARE_FOR_SWEEP = 64, 0.25
MAX_NEW_TOKENS = 256  # of an answer, where its task names no number: the hf backend's own
DRAWN = ("temperature", "top_p", "top_k", "min_p")  # what answers can be drawn by
# Keywords and settings that leave the likeliest token as it is.
PLAIN = {
    *("do_sample", *DRAWN, "max_length", "max_new_tokens", "use_cache", "cache_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
    "_from_model_config",
}
LOOKED_BACK = 64  # tokens of an answer, in which a text that ends it is looked for

Asked = tuple[Any, list[int], list[int]]  # (texts or None, context, continuation)
Row = tuple[int, ...]  # token ids


class EngineLM(HFLM):
    """Answers lm-eval's requests with an engine, whose state it leaves as it was. Texts become
    tokens as HFLM has them, which loads no model here."""

    # what HFLM's own constructor sets
    custom_prefix_token_id = add_bos_token = _max_length = enable_thinking = None
    batch_size_per_gpu = sys.maxsize  # all windows of long texts are asked for at once
    _rank, _world_size = 0, 1
    chat_template_args: Mapping[str, Any] = {}

    def __init__(self, engine: Engine, model: Model, longest: int) -> None:
        """longest: tokens of a row, at most."""
        TemplateLM.__init__(self)
        self.engine, self._model = engine, model
        size = max(AUTO_MICRO_BATCH_TOKENS[engine.device.type], longest)
        self.micro_batch_tokens, self.sweep_tokens = size, SWEEP_MICRO_BATCHES * size
        if engine.device.type == "cuda":  # the more tokens share a sweep, the better
            states = 2 * engine.anatomy.hidden_size * engine.skeleton.dtype.itemsize
            room = int(SHARE_FOR_SWEEP * free_bytes(engine.device)) // states
            self.sweep_tokens = max(self.sweep_tokens, min(room, MOST_MICRO_BATCHES * size))
        self.tokenizer: Any = configure_pad_token(copy.deepcopy(model.tokenizer), model.config)
        if self.prefix_token_id is None:
            raise ConfigError(
                "tasks: this model's tokenizer has no token that begins or ends a text, after "
                "which they measure texts without a context; give it an eos_token"
            )
        self.regimes = regimes_of(model.config)

    @cached_property
    def _template(self) -> Template:
        return Template(self.tokenizer)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        turns = self._template.wanted(chat_history)
        return str(super().apply_chat_template(turns, add_generation_prompt))

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: what is known of the model is told beside lm-eval's results."""
        return {}

    # -- log-likelihoods ---------------------------------------------------------------------------

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # its bar does not look at TQDM_DISABLE: in a file it would be lines of characters
        without_bar = disable_tqdm or not sys.stderr.isatty()
        return super().loglikelihood(requests, disable_tqdm=without_bar)  # type: ignore[no-any-return]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        without_bar = disable_tqdm or not sys.stderr.isatty()
        return super().loglikelihood_rolling(requests, without_bar)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(self, requests: list[Asked], **_: Any) -> list[tuple[float, bool]]:
        """(log-probability, whether it is the greedy choice) of each continuation. Rows that differ
        in their last token alone are computed once."""
        longest, rows = self.max_length, dict[Row, list[tuple[int, list[int]]]]()
        for number, (_texts, context, continuation) in enumerate(requests):
            assert context and continuation and len(continuation) <= longest
            whole = (context + continuation)[-(longest + 1) :]
            rows.setdefault(tuple(whole[:-1]), []).append((number, continuation))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), desc="log-likelihoods", disable=None)
        together = [*self._micro_batches(sorted(rows, key=len, reverse=True))]
        given = iter(together)
        for batches in sweeps(map(self._padded, together), self.sweep_tokens):
            parts = [*islice(given, len(batches))]
            targets = [targets_of([(row, rows[row]) for row in part]) for part in parts]
            scores = self.engine.score(batches, targets)
            for batch, (values, likeliest) in zip(parts, scores, strict=True):
                start = 0
                for number, continuation in (one for row in batch for one in rows[row]):
                    part = slice(start, start := start + len(continuation))
                    found[number] = float(values[part].sum()), bool(likeliest[part].all())
                    bar.update()
        bar.close()
        return found

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """`rows`, longest first, as many together as a micro-batch takes."""
        for run in alike([len(row) for row in rows], self.regimes):
            together = rows[run]
            for start, stop in cuts([len(row) for row in together], self.micro_batch_tokens):
                yield together[start:stop]

    def _padded(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        ids = pad_sequence([torch.tensor(row) for row in rows], True, self.model.pad_id)
        lengths = torch.tensor([[len(row)] for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths).long()}

    # -- answers -----------------------------------------------------------------------------------

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        asked = [(*request.args, number) for number, request in enumerate(requests)]
        asked.sort(key=lambda one: repr(one[1]))
        found = [""] * len(asked)
        bar = tqdm(total=len(asked), desc="answers", disable=None)
        for _, group in groupby(asked, key=lambda one: repr(one[1])):
            same = list(group)
            how, until, new = self._settings(same[0][1])
            if (room := self.max_length - new) <= 0:
                raise ConfigError(
                    f"tasks: answers of {new} tokens do not fit a model that reads "
                    f"{self.max_length}; the task's generation_kwargs say how many"
                )
            wanted = [
                AnswerRequest(number, self.tok_encode(text)[-room:], (0,), new)
                for text, _, number in same
            ]
            # the longest first: what follows has room where they were
            wanted.sort(key=lambda one: -len(one.ids))
            # neither keywords nor the model's own settings change what is likeliest
            own = self.model.generation.to_diff_dict() if self.model.generation else {}
            greedy = not how.get("do_sample") and {*how, *own} <= PLAIN
            by = self._by_rollout if greedy else self._by_generate
            for number, tokens in by(wanted, how, until):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                found[number] = str(postprocess_generated_text(text, until, None))
                bar.update()
        bar.close()
        return found

    def _settings(self, given: dict[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """(keywords of transformers' `generate`, texts that end an answer, its longest length)."""
        how = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(how.pop("until", None), eos=eos)
        new = how.pop("max_gen_toks")
        if how.get("do_sample") is False:
            how.pop("temperature", None)
        return how, until, new

    def _by_rollout(
        self, wanted: Sequence[AnswerRequest], how: Mapping[str, Any], until: Sequence[str]
    ) -> Iterator[tuple[int, list[int]]]:
        """Answers, many at a time, by their requests' keys."""
        drawn = {name: how[name] for name in DRAWN if name in how}
        draw = Draw(**drawn) if how.get("do_sample") else Draw(temperature=0.0)

        def look(_: AnswerRequest, __: int, ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids[-LOOKED_BACK:])
            return any(end in text for end in until)

        ends = [self.eot_token_id, *end_tokens(self.model)]
        for made in self.engine.rollout(wanted, draw, ends, look):
            yield made.key, made.ids

    def _by_generate(
        self, wanted: Sequence[AnswerRequest], how: dict[str, Any], until: list[str]
    ) -> Iterator[tuple[int, list[int]]]:
        """The same by transformers' own `generate`, as the hf backend calls it. Raises ConfigError
        for weights without room, unless tokens are only drawn."""
        longest = len(wanted[0].ids) + wanted[0].most
        rows = max(1, self.micro_batch_tokens // longest)
        with self.engine.whole(rows * longest) as model:
            for batch in (wanted[at : at + rows] for at in range(0, len(wanted), rows)):
                if model is None:
                    break
                texts = {"input_ids": [one.ids for one in batch]}
                padded = self.tokenizer.pad(texts, padding_side="left", return_tensors="pt")
                length = padded["input_ids"].shape[1]
                stops = stop_sequences_criteria(self.tokenizer, until, length, len(batch))
                with starting_from(model, self.model.generation or model.generation_config):
                    made = model.generate(
                        input_ids=padded["input_ids"].to(self.engine.device),
                        attention_mask=padded["attention_mask"].to(self.engine.device),
                        max_length=length + batch[0].most,
                        stopping_criteria=stops,
                        pad_token_id=self.tokenizer.pad_token_id,
                        use_cache=True,
                        **how,
                    )
                for one, row in zip(batch, made.tolist(), strict=True):
                    yield one.key, row[length:]
        if model is None:
            if others := sorted({*how} - {"do_sample", *DRAWN}):
                raise ConfigError(
                    f"tasks: answers are generated with {', '.join(others)}, for which all weights "
                    "must fit on the device; they do not"
                )
            yield from self._by_rollout(wanted, how, until)


def targets_of(
    rows: Iterable[tuple[Sequence[int], Iterable[tuple[int, list[int]]]]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions in the rows padded to the first one's length, the tokens asked for after them)."""
    index, tokens, width = list[int](), list[int](), 0
    for number, (row, asked) in enumerate(rows):
        width = width or len(row)
        for _, continuation in asked:
            end = number * width + len(row)
            index += range(end - len(continuation), end)
            tokens += continuation
    return torch.tensor(index), torch.tensor(tokens)
