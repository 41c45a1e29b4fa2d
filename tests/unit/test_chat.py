"""Prompts as ids: one BOS whatever the road, user turns, prompt files and their errors."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.chat import (
    Prompt,
    encode_chat,
    encode_text,
    has_chat,
    prompt_file,
    prompt_inputs,
    read_prompts,
    suites,
    user_turn,
)
from draftsmith.errors import RequestError
from tests.conftest import make_tokenizer

BOS, EOS = 1, 2
TEXT = "how many apples are left?"
CHAT = [{"role": "user", "content": TEXT}]
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def post_processed(template: str | None, single: str) -> Any:
    """A tokenizer that puts special tokens around a text by itself."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(template=template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def bos_twice() -> Any:
    """Template and tokenizer both add a BOS, as in the reports of case A3."""
    return post_processed(BOS_TEMPLATE, "<s> $A")


def write(path: Path, rows: Sequence[Any]) -> str:
    """A prompt file; a string is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return str(path)


# --- A3


def test_A3_the_naive_way_doubles_bos(bos_twice: Any) -> None:
    """The fault that the other tests guard against can happen with this tokenizer."""
    text = bos_twice.apply_chat_template(CHAT, tokenize=False)
    assert bos_twice(text)["input_ids"][:2] == [BOS, BOS]


def test_A3_one_bos_for_a_chat_row_and_a_plain_row(tmp_path: Path, bos_twice: Any) -> None:
    rows = [{"messages": CHAT}, {"prompt": TEXT}, {"text": TEXT}]
    chat, prompt, plain = read_prompts(write(tmp_path / "p.jsonl", rows), bos_twice)
    for row in (chat, prompt, plain):
        assert row.ids[0] == BOS
        assert row.ids.count(BOS) == 1
    assert list(chat.ids) == list(prompt.ids) == encode_chat(bos_twice, CHAT)
    assert list(plain.ids) == encode_text(bos_twice, TEXT)


def test_A3_a_chat_is_what_the_template_wrote(bos_twice: Any) -> None:
    text = bos_twice.decode(encode_chat(bos_twice, CHAT))
    assert text == f"<s>user\n{TEXT}</s>assistant\n"


def test_A3_a_text_with_its_own_bos_gets_no_second(bos_twice: Any) -> None:
    assert encode_text(bos_twice, f"<s>{TEXT}") == encode_text(bos_twice, TEXT)


def test_A3_no_bos_where_the_tokenizer_adds_none(tokenizer: Any) -> None:
    assert BOS not in encode_text(tokenizer, TEXT)


def test_A3_plain_text_is_left_open() -> None:
    """An EOS that the tokenizer adds would end the text that the target is to continue."""
    tokenizer = post_processed(None, "<s> $A </s>")
    ids = encode_text(tokenizer, TEXT)
    assert ids == [BOS, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]


def test_A3_a_tokenizer_without_special_tokens() -> None:
    tokenizer = copy.deepcopy(make_tokenizer(template=None))
    tokenizer.bos_token = tokenizer.eos_token = None
    assert encode_text(tokenizer, TEXT) == tokenizer(TEXT)["input_ids"]


# --- user turns


def test_user_turn_is_what_stands_around_the_text(tokenizer: Any) -> None:
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.opening) == "<s>user\n"
    assert turn.end == EOS


def test_user_turn_has_one_bos(bos_twice: Any) -> None:
    assert user_turn(bos_twice).opening.count(BOS) == 1


def test_user_turn_needs_a_template() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*data\.source: corpus"):
        user_turn(make_tokenizer(template=None))


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] }}", "{{ bos_token }}fixed", "{{ messages[0]['content']|upper }}"],
    ids=["nothing-after", "text-left-out", "text-changed"],
)
def test_user_turn_whose_end_is_not_to_be_seen(template: str) -> None:
    with pytest.raises(RequestError, match=r"does not show where a user turn ends.*data\.path"):
        user_turn(make_tokenizer(template=template))


def test_has_chat(tokenizer: Any) -> None:
    assert has_chat(tokenizer)
    assert not has_chat(make_tokenizer(template=None))


# --- prompt files


def test_rows_are_read_with_names_and_domains(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": TEXT, "id": "x", "domain": "d"}, {"text": TEXT}, {"messages": CHAT, "id": 7}]
    prompts = read_prompts(write(tmp_path / "mine.jsonl", rows), tokenizer)
    chat, text = tuple(encode_chat(tokenizer, CHAT)), tuple(encode_text(tokenizer, TEXT))
    assert prompts == [Prompt("x", chat, "d"), Prompt("2", text, "mine"), Prompt("7", chat, "mine")]


def test_a_prompt_is_plain_text_where_there_is_no_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=None)
    spec = write(tmp_path / "p.jsonl", [{"prompt": TEXT}])
    assert list(read_prompts(spec, tokenizer)[0].ids) == encode_text(tokenizer, TEXT)


def test_limit_takes_the_first(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "p.jsonl", [{"text": TEXT, "id": i} for i in range(5)])
    assert [p.name for p in read_prompts(spec, tokenizer, limit=2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("not json", "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ({}, "no prompt, text or messages"),
        ({"prompt": None}, "no prompt, text or messages"),
        ({"messages": []}, "no prompt, text or messages"),
        ('{"text": NaN}', "no prompt, text or messages"),
        ({"prompt": "  "}, "is empty"),
        ({"text": True}, "text is a bool, not text"),
        ({"text": {"en": TEXT}}, "text is a dict, not text"),
        ({"text": "half \ud83d"}, "surrogate"),
        ({"messages": "hello"}, "messages: str, not a list"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "surrogate"),
    ],
)
def test_a_bad_row_is_named_by_its_line(
    tmp_path: Path, tokenizer: Any, row: Any, reason: str
) -> None:
    """The number is that of the line in the file, blank ones counted."""
    spec = write(tmp_path / "p.jsonl", ["", {"prompt": TEXT}, " ", row])
    with pytest.raises(RequestError, match=rf"p\.jsonl:4: .*{reason}"):
        read_prompts(spec, tokenizer)


def test_an_empty_file_says_so(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="the file is empty"):
        read_prompts(write(tmp_path / "p.jsonl", [""]), tokenizer)


def test_a_row_past_the_limit_is_not_looked_at(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "p.jsonl", [{"prompt": TEXT}, "not json"])
    assert len(read_prompts(spec, tokenizer, limit=1)) == 1


def test_a_text_of_which_the_tokenizer_makes_nothing(tmp_path: Path) -> None:
    class Mute:
        chat_template = bos_token_id = eos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

    with pytest.raises(RequestError, match=r"p\.jsonl:1: the target's tokenizer makes no token"):
        read_prompts(write(tmp_path / "p.jsonl", [{"text": TEXT}]), Mute())


def test_messages_without_a_template_name_the_line(tmp_path: Path) -> None:
    spec = write(tmp_path / "p.jsonl", ["", {"prompt": TEXT}, {"messages": CHAT}])
    with pytest.raises(RequestError, match=r"p\.jsonl:3: messages need a chat template"):
        read_prompts(spec, make_tokenizer(template=None))


@pytest.mark.parametrize("messages", [["hello"], [3]])
def test_messages_of_another_form_are_refused_by_line(
    tmp_path: Path, tokenizer: Any, messages: list[Any]
) -> None:
    spec = write(tmp_path / "p.jsonl", [{"messages": messages}])
    with pytest.raises(RequestError, match=r"p\.jsonl"):
        read_prompts(spec, tokenizer)


def test_a_chat_that_the_template_refuses_is_named_by_line(tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    )
    spec = write(tmp_path / "p.jsonl", [{"messages": [{"role": "system", "content": "x"}]}])
    with pytest.raises(RequestError, match=r"p\.jsonl:1.*user first"):
        read_prompts(spec, make_tokenizer(template=template))


def test_suites_are_found_by_name(tokenizer: Any) -> None:
    assert "quick" in suites()
    for name, path in suites().items():
        assert prompt_file(name) == path
        prompts = read_prompts(name, tokenizer)
        assert len({p.name for p in prompts}) == len(prompts)


def test_a_file_is_what_a_run_depends_on(tmp_path: Path) -> None:
    spec = write(tmp_path / "p.jsonl", [{"prompt": TEXT}])
    assert prompt_inputs(spec) == {spec: tmp_path / "p.jsonl"}
    assert prompt_inputs("quick") == {"quick": suites()["quick"]}
    with pytest.raises(RequestError, match="no such file"):
        prompt_inputs(str(tmp_path / "q.jsonl"))


def test_an_unknown_prompt_set_names_the_suites(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts nothere: no such file.*quick.*gsm8k"):
        read_prompts("nothere", tokenizer)
    with pytest.raises(RequestError, match="no such file"):
        read_prompts(str(tmp_path), tokenizer)
