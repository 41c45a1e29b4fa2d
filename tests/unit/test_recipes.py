"""Strict recipes: what is refused and how, overrides, the shipped ones, and legal shapes."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.shape import Shape, resolve_shape
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import load, reference, shipped, to_plain, validate
from draftsmith.recipes.schema import Recipe, ShapeSettings

PLAIN = "target: org/model\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    """Write a recipe and load it."""

    def write_and_load(text: str, overrides: Sequence[str] = ()) -> Recipe:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return load(str(path), overrides)

    return write_and_load


# --- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{PLAIN}distil: {{}}", r"recipe\.distil: unknown key \(did you mean 'distill'\?\)"),
        (f"{PLAIN}distill: {{step: 5}}", r"recipe\.distill\.step: unknown key .*'steps'"),
        (
            f"{PLAIN}prune: {{shape: {{kv_head: 1}}}}",
            r"recipe\.prune\.shape\.kv_head: .*'kv_heads'",
        ),
        (f"{PLAIN}zzz: 1", r"recipe\.zzz: unknown key; known here: target, source"),
        ("seed: 1", r"recipe\.target: missing"),
        ("target: 5", r"recipe\.target: 5: .*string"),
        (f"{PLAIN}seed: '1'", r'recipe\.seed: "1": .*integer'),
        (f"{PLAIN}seed: -1", r"recipe\.seed: -1: .*greater than or equal to 0"),
        (f"{PLAIN}distill: {{steps: 5.0}}", r"recipe\.distill\.steps: 5\.0: .*integer"),
        (f"{PLAIN}distill: {{steps: true}}", r"recipe\.distill\.steps: true: .*integer"),
        (f"{PLAIN}distill: {{steps: 0}}", r"recipe\.distill\.steps: 0: .*greater than 0"),
        (f"{PLAIN}distill: {{lr: fast}}", r'recipe\.distill\.lr: "fast": .*number'),
        (f"{PLAIN}distill: {{lr: 0}}", r"recipe\.distill\.lr: 0: .*greater than 0"),
        (f"{PLAIN}distill: {{lr: .inf}}", r"recipe\.distill\.lr: .*finite"),
        (f"{PLAIN}distill: {{weight_decay: .inf}}", r"recipe\.distill\.weight_decay: .*finite"),
        (f"{PLAIN}distill: {{loss: mse}}", r"recipe\.distill\.loss: \"mse\": .*'forward_kl'"),
        (
            f"{PLAIN}trace: {{sampled_share: 1.5}}",
            r"recipe\.trace\.sampled_share: 1\.5: .*equal to 1",
        ),
        (f"{PLAIN}prune: {{axes: [layers, depth]}}", r"recipe\.prune\.axes\.1: \"depth\": .*'ffn'"),
        (f"{PLAIN}prune: {{snap: no}}", r'recipe\.prune\.snap: "no": .*boolean'),
        (f"{PLAIN}prune: 5", r"recipe\.prune: 5: .*object"),
        (f"{PLAIN}prune:", r"recipe\.prune: null: .*object"),
        (f"{PLAIN}score: {{lookahead: 3}}", r"recipe\.score\.lookahead: 3: .*array"),
        (f"{PLAIN}score: {{lookahead: []}}", r"recipe\.score\.lookahead: \[\]: .*at least 1"),
        (
            f"{PLAIN}score: {{lookahead: [2, 0]}}",
            r"recipe\.score\.lookahead\.1: 0: .*greater than 0",
        ),
        (f"{PLAIN}export: {{to: [hf, onxn]}}", r"recipe\.export\.to\.1: \"onxn\": .*'gguf'"),
        (f"{PLAIN}data: {{source: corpus}}", r"recipe\.data: source 'corpus' needs path"),
        (f"{PLAIN}? [a, b]\n: c", "mine.yaml|recipe"),
    ],
)
def test_wrong_values_name_the_key_the_value_and_the_cure(
    recipe: Any, text: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        recipe(text)


def test_all_faults_are_reported_at_once(recipe: Any) -> None:
    with pytest.raises(RequestError) as raised:
        recipe(f"{PLAIN}distill: {{steps: 0, lrr: 1}}\nseed: x")
    assert len(str(raised.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is a mapping of keys, not NoneType"),
        ("- target", "a recipe is a mapping of keys, not list"),
        ("hello", "a recipe is a mapping of keys, not str"),
        ("target: a\ntarget: b", "not valid YAML: .*duplicate key"),
        ("target: a\ndistill: {lr: 1, lr: 2}", "not valid YAML: .*duplicate key"),
        ("target: [a", "not valid YAML"),
        ("target: a\n\tseed: 1", "not valid YAML"),
        ("target: a\n---\ntarget: b", "not valid YAML: expected a single document"),
        ("target: !!python/object:os.system x", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(recipe: Any, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=rf"mine\.yaml: {message}"):
        recipe(text)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"target: \xff\xfe")
    with pytest.raises(RequestError, match=r"mine\.yaml"):
        load(str(tmp_path / "mine.yaml"))


def test_unknown_recipes_get_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'quickstat'.*did you mean 'quickstart'"):
        load("quickstat")
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RequestError, match=path.name):
            load(str(path))


# --- YAML 1.2


def test_numbers_and_words_are_those_of_yaml_1_2(recipe: Any) -> None:
    """YAML 1.1 reads 1e-5 as a string, on and no as booleans, 010 as 8 and 1:30 as 90."""
    loaded = recipe("target: on\nsource: no\ndescription: 1:30\nseed: 010\ndistill: {lr: 1e-5}")
    assert loaded.distill.lr == 1e-5
    assert (loaded.target, loaded.source, loaded.description) == ("on", "no", "1:30")
    assert loaded.seed == 10


def test_null_is_none_and_lists_are_tuples(recipe: Any) -> None:
    loaded = recipe(f"{PLAIN}source: null\nscore: {{lookahead: [1, 4]}}\nprune: {{axes: [ffn]}}")
    assert loaded.source is None
    assert loaded.score.lookahead == (1, 4)
    assert loaded.prune.axes == ("ffn",)


def test_an_integer_will_do_for_a_number(recipe: Any) -> None:
    assert recipe(f"{PLAIN}distill: {{lr: 1}}").distill.lr == 1.0


# --- overrides


def test_overrides_are_parsed_as_yaml_and_win(recipe: Any) -> None:
    settings = ["distill.lr=3e-5", "prune.shape.layers=3", "description=a=b", "prune.axes=[layers]"]
    loaded = recipe(f"{PLAIN}prune: {{shape: {{layers: 2}}}}", [*settings, "distill.lr=4e-5"])
    assert loaded.distill.lr == 4e-5
    assert loaded.prune.shape.layers == 3
    assert loaded.description == "a=b"
    assert loaded.prune.axes == ("layers",)


def test_overrides_fill_a_group_that_is_there_without_keys(recipe: Any) -> None:
    """As when all keys below `distill:` are commented out."""
    assert recipe(f"{PLAIN}distill:\n", ["distill.lr=3e-5"]).distill.lr == 3e-5


# --- recipes that build on others


def test_a_recipe_may_build_on_another(recipe: Any, tmp_path: Path) -> None:
    """Group by group; a list replaces a list; overrides come last."""
    base = f"{PLAIN}seed: 3\nscore: {{lookahead: [1, 4], limit: 5}}\ndistill: {{lr: 2e-4}}"
    (tmp_path / "below.yaml").write_text(base)
    on_top = "base: below.yaml\nscore: {lookahead: [2]}\ndistill: {steps: 7, warmup: 1}"
    loaded = recipe(on_top, ["distill.steps=9"])
    assert (loaded.target, loaded.seed) == ("org/model", 3)
    assert (loaded.score.lookahead, loaded.score.limit) == ((2,), 5)
    assert (loaded.distill.lr, loaded.distill.steps) == (2e-4, 9)


def test_a_group_without_keys_leaves_the_bases(recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(f"{PLAIN}distill: {{lr: 2e-4}}")
    assert recipe("base: below.yaml\ndistill:", ["distill.steps=50"]).distill.lr == 2e-4
    assert recipe("base: below.yaml\ndistill:").distill.lr == 2e-4


def test_a_recipe_may_build_on_a_shipped_one(recipe: Any) -> None:
    loaded = recipe("base: quickstart\nseed: 8")
    assert loaded.data == load("quickstart").data
    assert loaded.seed == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: quickstat", "did you mean 'quickstart'"),
        ("base: none.yaml", "none.yaml: there is no such file"),
        ("base: [quickstart]", r"mine\.yaml: base: \['quickstart'\]: give a recipe's name or file"),
        ("base: mine.yaml", r"mine\.yaml: base: mine\.yaml: leads back"),
        ("base: quickstart\nprune: 5", r"recipe\.prune: 5: .*object"),
        ("base: quickstart\nprune: {stepz: 5}", r"recipe\.prune\.stepz: unknown key"),
    ],
)
def test_bad_bases(recipe: Any, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        recipe(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("distill.lr", "-s distill.lr: write it as key=value"),
        ("=3", "-s =3: write it as key=value"),
        ("distill.lr=", r"recipe\.distill\.lr: null"),
        ("distill.lr=fast", r'recipe\.distill\.lr: "fast"'),
        ("distill.stepz=3", r"recipe\.distill\.stepz: unknown key \(did you mean 'steps'"),
        ("distill..lr=3", r"recipe\.distill\.: unknown key"),
        ("distil.lr=3", r"recipe\.distil: unknown key \(did you mean 'distill'"),
        ("distill=3", r"recipe\.distill: 3"),
        ("prune.shape.layers=[", r"-s prune\.shape\.layers=\[: not valid YAML"),
        ("target.x=1", r"-s target\.x=1: recipe\.target is a value"),
        ("prune.shape.layers.x=1", r"recipe\.prune\.shape\.layers is a value"),
    ],
)
def test_bad_overrides(recipe: Any, override: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        recipe(f"{PLAIN}prune: {{shape: {{layers: 2}}}}", [override])


# --- the shipped ones and the schema


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_loads(name: str) -> None:
    loaded = load(name)
    assert loaded.description
    assert validate(to_plain(loaded)) == loaded
    assert load(str(shipped()[name])) == loaded


def test_there_are_shipped_recipes() -> None:
    assert "quickstart" in shipped()


def groups(settings: Any) -> list[Any]:
    """A recipe and all groups of settings in it."""
    children = [getattr(settings, f.name) for f in fields(settings)]
    return [settings, *(g for c in children if is_dataclass(c) for g in groups(c))]


def test_settings_are_frozen_at_every_level() -> None:
    found = groups(validate({"target": "a"}))
    assert {type(g).__name__ for g in found} >= {"Recipe", "ShapeSettings", "DistillSettings"}
    for group in found:
        with pytest.raises(FrozenInstanceError):
            setattr(group, fields(group)[0].name, None)


def test_the_reference_explains_every_key() -> None:
    """One line a key, with a default and a meaning."""
    keys = [line for line in reference().splitlines()[2:] if line]
    assert len(keys) == sum(
        not is_dataclass(getattr(g, f.name))
        for g in groups(validate({"target": "a"}))
        for f in fields(g)
    )
    for line in keys:
        _, key, default, meaning, _ = line.split("|", 4)
        assert key.strip()
        assert default.strip()
        assert meaning.strip()


# --- legal shapes

GROUPED = Shape(layers=4, kv_heads=2, heads_per_group=8, head_dim=8, ffn=64, hidden=32, vocab=96)
SINGLE = Shape(layers=4, kv_heads=4, heads_per_group=1, head_dim=8, ffn=64, hidden=32, vocab=96)


def resolve(source: Shape, axes: tuple[Axis, ...] | None = None, **wanted: int) -> Shape:
    return resolve_shape(source, asdict(ShapeSettings(**wanted)), families()["mistral"], axes)


def test_what_is_not_asked_for_stays() -> None:
    assert resolve(GROUPED) == GROUPED
    assert resolve(GROUPED, layers=2, ffn=48).kv_heads == 2


@pytest.mark.parametrize("wanted", [{"heads": 5}, {"kv_heads": 2, "heads": 7}, {"heads": 18}])
def test_A15_heads_that_do_not_fill_groups_list_the_legal_counts(wanted: dict[str, int]) -> None:
    with pytest.raises(RequestError) as raised:
        resolve(GROUPED, **wanted)
    message = str(raised.value)
    assert message.startswith(f"recipe.prune.shape.heads: {wanted['heads']} ")
    assert message.endswith("2, 4, 6, 8, 10, 12, 14, 16")


def test_A15_one_group_of_seven_is_legal() -> None:
    shape = resolve(GROUPED, kv_heads=1, heads=7)
    assert (shape.kv_heads, shape.heads_per_group, shape.heads) == (1, 7, 7)


@pytest.mark.parametrize(("heads", "per_group"), [(2, 1), (14, 7), (16, 8)])
def test_A15_every_listed_count_is_legal(heads: int, per_group: int) -> None:
    shape = resolve(GROUPED, heads=heads)
    assert (shape.kv_heads, shape.heads_per_group) == (2, per_group)


def test_A15_multi_head_attention_cuts_single_heads() -> None:
    assert resolve(SINGLE, heads=3).kv_heads == 3
    assert resolve(SINGLE, heads=3).heads == 3


@pytest.mark.parametrize(
    ("source", "wanted", "legal"),
    [
        (GROUPED, {"kv_heads": 3}, "1, 2"),
        (GROUPED, {"kv_heads": 3, "heads": 6}, "1, 2"),
        (GROUPED, {"heads_per_group": 9}, "1, 2, 3, 4, 5, 6, 7, 8"),
        (SINGLE, {"heads": 6}, "1, 2, 3, 4"),
        (SINGLE, {"layers": 5}, "1, 2, 3, 4"),
        (SINGLE, {"hidden": 33}, "1 … 32"),
        (SINGLE, {"ffn": 65}, "1 … 64"),
    ],
)
def test_A15_more_than_the_source_has_lists_what_it_has(
    source: Shape, wanted: dict[str, int], legal: str
) -> None:
    with pytest.raises(RequestError, match=rf"recipe\.prune\.shape\.\w+: .*\b{legal}(?!, \d)"):
        resolve(source, **wanted)


def test_A15_heads_and_heads_per_group_exclude_one_another() -> None:
    with pytest.raises(RequestError, match="either heads or heads_per_group"):
        resolve(GROUPED, heads=4, heads_per_group=2)


def test_A16_a_width_that_is_not_to_be_pruned_is_refused() -> None:
    axes: tuple[Axis, ...] = ("kv_heads", "heads_per_group")
    with pytest.raises(RequestError, match=r"shape\.hidden: 24 .*from 32.*add hidden"):
        resolve(SINGLE, axes, hidden=24)
    assert resolve(SINGLE, (*axes, "hidden"), hidden=24).hidden == 24
    assert resolve(SINGLE, axes, hidden=32) == SINGLE


def test_A16_heads_belong_to_their_axes() -> None:
    with pytest.raises(RequestError, match="add heads_per_group"):
        resolve(GROUPED, ("layers",), heads=4)


@pytest.mark.parametrize("stage", ["prune", "distill"])
def test_A16_a_warm_up_longer_than_the_run_is_refused(recipe: Any, stage: str) -> None:
    with pytest.raises(RequestError, match=rf"recipe\.{stage}: warmup 21 is longer .* 20 steps"):
        recipe(f"{PLAIN}{stage}: {{steps: 20, warmup: 21}}")
    assert getattr(recipe(f"{PLAIN}{stage}: {{steps: 20, warmup: 20}}"), stage).warmup == 20


def test_A16_a_method_without_training_has_no_warm_up(recipe: Any) -> None:
    assert recipe(f"{PLAIN}prune: {{method: first, steps: 1}}").prune.method == "first"
