"""A part of a recipe: its name, its options from the signature, what it needs, and where its code may be."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import yaml
from pydantic import ValidationError

from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.parts.choice import Choice, Of, choices, chosen, options_model, part_field, value_at
from flowgrpo.parts.docstrings import described
from flowgrpo.parts.kinds import KINDS, Kind
from flowgrpo.parts.needs import SOMETHING, Need, at_least, needs, several_updates, unmet
from flowgrpo.parts.plugins import with_article
from flowgrpo.parts.ranges import Bound, Given, Positive, Share
from flowgrpo.parts.section import Section


class Inner(Section):
    """A nested mapping of options."""

    rate: float = 0.5


def plain(x: int, *, strength: Positive = 1.0, how: Literal["fast", "slow"] = "fast") -> tuple[Any, ...]:
    """Plain.

    Options:
        strength: how much,
            over two lines.
    """
    return x, strength, how


def holder(
    x: int,
    *,
    inner: Annotated[Choice, Of("thing", "plain")] = "plain",  # type: ignore[assignment]
    nested: Inner | None = None,
    size: Given[int],
) -> tuple[Any, ...]:
    """Holds another part, a mapping, and a number that the run gives.

    Options:
        inner: the other part.
    """
    return x, inner, nested, size


class Remembering:
    """A class, for it remembers.

    Args:
        share: what it keeps.
    """

    def __init__(self, start: int, *, share: Share = 0.25, low=1) -> None:  # type: ignore[no-untyped-def]
        self.start, self.share, self.low = start, share, low


def unnamed(x: int, *, name: str = "x") -> int:
    """A part whose option would hide its name."""
    return x


def user(x: int, *, step: Annotated[Callable[..., Any], Of("thing")] = plain) -> Any:
    """Its option has code of the package as its default."""
    return step(x)


THINGS = {"user": user, "plain": plain, "holder": holder, "remembering": Remembering}


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind("thing", "some.thing", f"{__name__}:THINGS", "thing(x, *, ...)", own={"weight": (float, 1.0)})
    # The table is in a test file, which has no module name for an import.
    kind.__dict__["builtin"] = THINGS
    monkeypatch.setitem(KINDS, "thing", kind)


def faults(given: Any) -> dict[str, Any]:
    with pytest.raises(Exception, match="a part is wrong") as failed:
        chosen("thing", given, "plain")
    found = failed.value.context["faults"]  # type: ignore[attr-defined]
    return {".".join(map(str, place)): said if isinstance(said, str) else said["msg"] for place, said, _ in found}


def test_a_name_alone_is_the_part_with_its_defaults():
    assert chosen("thing", "plain").options == {"weight": 1.0, "strength": 1.0, "how": "fast"}
    assert chosen("thing", {"strength": 2}, "plain")["strength"] == 2
    assert chosen("thing", {"name": "plain", "weight": 3}).written() == {
        "name": "plain", "weight": 3, "strength": 1.0, "how": "fast",
    }  # fmt: skip


def test_options_are_bound_and_those_of_the_entry_are_not():
    assert chosen("thing", {"name": "plain", "weight": 3, "how": "slow"}).make()(7) == (7, 1.0, "slow")


def test_a_part_within_a_part_is_made_too_and_gets_what_the_run_gives():
    held = chosen("thing", {"name": "holder", "inner": {"strength": 4}, "nested": {"rate": 2}})
    x, inner, nested, size = held.make(size=5, unknown=6)(1)
    assert (x, inner(2), nested.rate, size) == (1, (2, 4.0, "fast"), 2, 5)
    assert [key for key, _ in choices(held, "top")] == ["top", "top.inner"]
    assert chosen("thing", held.written()) == held


def test_a_class_is_made_with_its_options():
    made = chosen("thing", {"name": "remembering", "share": 1}).make(8)
    assert (made.start, made.share, made.low) == (8, 1, 1)
    model = options_model("thing", "remembering").model_fields
    assert (model["low"].annotation, model["share"].description) == (int, "what it keeps.")
    assert described(plain) == {"strength": "how much, over two lines."}


@pytest.mark.parametrize(
    ("given", "place", "said"),
    [
        ({"name": "plain", "strngth": 2}, "strngth", "has no option 'strngth'; did you mean 'strength'?"),
        ({"name": "plain", "eta": 2}, "eta", "'eta' is an option of kernel flow_sde (sampler.kernel.eta)"),
        ({"name": "plain", "strength": 0}, "strength", "greater than 0"),
        ({"name": "plain", "strength": math.inf}, "strength", "finite"),
        ({"name": "plain", "strength": math.nan}, "strength", "finite"),
        ({"name": "plain", "how": "quick"}, "how", "'fast' or 'slow'"),
        ({"name": "holder", "inner": {"strength": "x"}}, "inner.strength", "number"),
        ({"name": "holder", "inner": "plan"}, "inner", "did you mean 'plain'?"),
        ({"name": "holder", "nested": {"rat": 1}}, "nested.rat", "Extra inputs"),
        ({"name": "holder", "size": 1}, "size", "has no option 'size'"),
        ({"name": "plian"}, "", "did you mean 'plain'?"),
        ({"name": 3}, "name", "the name of a thing"),
        (3, "", "the name of a thing, or a mapping"),
        ({"name": "nowhere.py:thing"}, "", "thing file 'nowhere.py' does not exist"),
        ({"name": "nowhere.module:thing"}, "", "there is no module 'nowhere'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(given: Any, place: str, said: str):
    assert said in faults(given)[place]


def test_an_option_that_is_positional_is_told_how_to_become_one(tmp_path: Path):
    file = tmp_path / "m2.py"
    file.write_text("def mine(rewards, groups, low=1.0, *, high=2.0):\n    return rewards\n")
    said = rf"advantage {file}:mine has 'low' among .*write `\*,` before `low` in {file} to make it an option"
    with pytest.raises(RecipeError, match=said):
        load_recipe("mixgrpo", [f"advantage={file}:mine", "advantage.low=3"])
    with pytest.raises(RecipeError, match="has no option 'groups'; its options are high"):
        load_recipe("mixgrpo", [f"advantage={file}:mine", "advantage.groups=3"])


def test_kinds_have_their_article():
    with pytest.raises(RecipeError, match=r"For an advantage in a module write 'a:b'"):
        load_recipe("mixgrpo", ["advantage=a.b"])
    with pytest.raises(RecipeError, match=r"should be the name of an advantage: "):
        load_recipe("mixgrpo", ["advantage={name: 3}"])
    assert [with_article(word) for word in ("order", "credit")] == ["an order", "a credit"]


def test_an_infinite_bound_is_one_only_where_the_range_says_so():
    class Bounded(Section):
        bound: Bound = 1.0

    assert Bounded(bound=math.inf).bound == math.inf
    with pytest.raises(ValidationError):
        Bounded(bound=math.nan)


def test_a_part_of_a_file_is_read_with_its_annotations_or_its_defaults(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def own(x, *, steps=3, bare, note=None):\n    return x, steps, bare, note\n")
    held = chosen("thing", {"name": f"{file}:own", "bare": [1]})
    assert held.make()(0) == (0, 3, [1], None)
    assert held.short == "own"
    with pytest.raises(Exception, match="part is wrong") as failed:
        chosen("thing", {"name": f"{file}:own", "bare": 1, "steps": 1.5})
    assert failed.value.context["faults"][0][0] == ("steps",)  # type: ignore[attr-defined]
    file.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        held.make()


def test_an_option_that_would_hide_the_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(THINGS, "unnamed", unnamed)
    assert "cannot be called name" in faults({"name": "unnamed"})[""]


# In recipes.


def test_choosing_another_part_drops_the_options_of_the_one_before(tmp_path: Path):
    base = tmp_path / "base.yaml"
    base.write_text("base: mixgrpo_flash_guard\nsampler: {kernel: {name: flow_sde, eta: 0.3}}\n")
    assert load_recipe(base, ["sampler.kernel=cps"]).sampler.kernel["eta"] == 0.7
    assert load_recipe(base, ["sampler.kernel.name=cps"]).sampler.kernel["eta"] == 0.7
    assert load_recipe(base, ["sampler.kernel.eta=0.4"]).sampler.kernel.options == {"eta": 0.4}
    for line, eta in (("cps", 0.7), ("{name: cps}", 0.7), ("flow_sde", 0.3), ("{eta: 0.9}", 0.9)):
        above = tmp_path / "above.yaml"
        above.write_text(f"base: base.yaml\nsampler: {{kernel: {line}}}\n")
        assert load_recipe(above).sampler.kernel["eta"] == eta
    assert load_recipe(base, ["sampler.kernel=cps", "sampler.kernel.eta=0.2"]).sampler.kernel.name == "cps"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sampler.kernel.width=3", r"sampler\.kernel\.width: kernel flow_sde has no option 'width'"),
        ("sampler.eta=0.2", r"'eta' is an option of kernel flow_sde \(sampler\.kernel\.eta\)"),
        ("sampler.kernel.eta=-1", r"sampler\.kernel\.eta: .* greater than or equal to 0 \(got -1\)"),
        ("objective.surrogate.hihg=1", "surrogate clip_nats has no option 'hihg'; its options are nats"),
        ("objective.surrogate=clip_nats", r"objective\.surrogate\.nats: is missing"),
    ],
)
def test_a_recipe_with_a_wrong_part_says_where(word: str, said: str):
    with pytest.raises(RecipeError, match=said):
        load_recipe("mixgrpo_flash_guard", [word])


def test_a_dumped_part_reads_back_with_infinities(tmp_path: Path):
    made = load_recipe("mixgrpo_flash_guard", ["objective.surrogate={name: clip, low: .inf}"])
    assert yaml.safe_load(dump_recipe(made))["objective"]["surrogate"] == {
        "name": "clip", "low": math.inf, "high": 0.2, "dual": None,
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(dump_recipe(made))
    assert load_recipe(tmp_path / "r.yaml") == made


# Needs.


class Whole(Section):
    """A recipe of one part."""

    task: str = "images"
    thing: Annotated[Choice, Of("thing")] = part_field("plain", "A thing.")
    size: int | None = None
    updates: int = 1


@pytest.mark.parametrize(
    ("need", "given", "said"),
    [
        (Need("size", (3,), "counts"), {"size": 3}, None),
        (Need("size", (3, None), "counts"), {"size": 4}, "thing plain counts, and size is 4; use size 3 or nothing"),
        (Need("size", (SOMETHING,), "counts"), {}, "thing plain counts, and size is left out; set size"),
        (Need("size", (None,), "counts"), {"size": 4}, "thing plain counts, and size is 4; leave size out"),
        (Need("size", (3,), "counts", task="text"), {"size": 4}, None),
        (Need("size", (3,), "counts", unless="strength"), {"size": 4}, "thing plain counts"),
        (Need("thing", ("holder",), "counts"), {}, "and thing is plain; use thing holder"),
        (Need("thing.strength", (2.0,), "counts"), {}, "and thing.strength is 1.0"),
    ],
)
def test_a_need_says_what_to_write(
    need: Need, given: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plain, "needs", (need,), raising=False)
    found = unmet(Whole(**given))
    assert found == [] if said is None else said in found[0]


def test_a_rule_of_ones_own_is_asked(monkeypatch: pytest.MonkeyPatch):
    asked = needs(lambda recipe, choice: [f"{choice.name} of {recipe.task}"])(lambda: None)
    monkeypatch.setattr(plain, "needs", asked.needs, raising=False)
    assert unmet(Whole()) == ["plain of images"]
    assert value_at(Whole(), "thing.how") == "fast"
    assert value_at(Whole(), "thing.nothing") is None
    one = load_recipe("mixgrpo_flash_guard")
    assert "above 1" in several_updates("clips")(one, one.sampler.kernel)[0]
    assert (
        several_updates("clips")(load_recipe("mixgrpo_flash_guard", ["optimizer.epochs=2"]), one.sampler.kernel) == []
    )


def test_a_number_of_the_recipe_may_be_too_small_for_a_part():
    recipe = load_recipe("mixgrpo_flash_guard", ["rollout.group=3"])
    enough = at_least("rollout.group", lambda recipe, choice: 3, "has {least} sides")
    assert enough(recipe, recipe.sampler.kernel) == []
    lacking = at_least("rollout.group", lambda recipe, choice: 4, "has {least} sides")
    [fault] = lacking(recipe, recipe.sampler.kernel)
    assert fault.endswith(" has 4 sides, and rollout.group is 3; use at least 4")
    told = at_least("rollout.group", lambda recipe, choice: 4, "has {least} sides", mend="use fewer sides")
    assert told(recipe, recipe.sampler.kernel)[0].endswith("is 3; use fewer sides")


def test_every_option_of_every_part_says_what_it_is_and_has_a_default_that_it_takes():
    for kind in [kind for kind in KINDS.values() if kind.word != "thing"]:
        for name in kind.builtin:
            model = options_model(kind.word, name)
            for option, field in model.model_fields.items():
                assert field.description, f"{kind.word} {name}: {option}"
            required = [option for option, field in model.model_fields.items() if field.is_required()]
            if not required:
                assert chosen(kind.word, chosen(kind.word, name).written()) == chosen(kind.word, name)


def test_every_option_is_refused_where_its_part_is_not_chosen():
    """The option is set at the key of its kind, while another part without this option is chosen."""
    tried = 0
    for kind in [kind for kind in KINDS.values() if kind.word != "thing"]:
        for name in kind.builtin:
            others = [other for other in kind.builtin if other != name]
            for option in options_model(kind.word, name).model_fields:
                for other in others:
                    if option not in options_model(kind.word, other).model_fields:
                        with pytest.raises(Exception, match="a part is wrong") as failed:
                            chosen(kind.word, {"name": other, option: None})
                        told = "".join(str(said) for _, said, _ in failed.value.context["faults"])  # type: ignore[attr-defined]
                        assert f"has no option {option!r}" in told
                        assert "did you mean" in told or f"{option!r} is an option of" in told
                        tried += 1
    assert tried > 100


def test_the_default_of_an_option_may_be_the_code_of_a_part():
    made = chosen("thing", "user")
    assert made.written()["step"] == {"name": "plain", "weight": 1.0, "strength": 1.0, "how": "fast"}
    assert made.make()(3) == user(3) == (3, 1.0, "fast")
    assert chosen("thing", {"name": "user", "step": {"name": "plain", "strength": 2.0}}).make()(3) == (3, 2.0, "fast")


NUMBERS = [
    (kind.word, name, option)
    for kind in KINDS.values()
    for name in kind.builtin
    for option, field in options_model(kind.word, name).model_fields.items()
    if any(one is int or one is float for one in (field.annotation, *get_args(field.annotation)))
]


@pytest.mark.parametrize(("kind", "name", "option"), [pytest.param(*k, id=": ".join(k)) for k in NUMBERS])
def test_a_number_of_a_part_refuses_what_is_none(kind: str, name: str, option: str):
    for value in (math.nan, "3", True, [1], {"a": 1}, "2024-05-01", 10**30):
        with pytest.raises(Exception, match="a part is wrong") as failed:
            chosen(kind, {"name": name, option: value})
        places = [place for place, *_ in failed.value.context["faults"]]  # type: ignore[attr-defined]
        assert any(place[:1] == (option,) for place in places), (value, places)
