"""Options ↔ widgets: every field has one, values survive the way there and back, nonsense is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import gradio as gr
import pytest
from hypothesis import given, settings, strategies as st

from backends.base import InvalidRequest, LocalOptions, Sampling
from gainz_ui.forms import Form


def make(cls, **more) -> Form:
    with gr.Blocks(analytics_enabled=False):
        return Form(cls, **more)


@pytest.fixture(scope="module")
def sampling() -> Form:
    return make(Sampling)


def shown(form: Form, values: dict) -> list:
    return [knob.show(values[knob.name]) for knob in form.knobs]


def test_every_field_has_a_widget(sampling):
    assert [knob.name for knob in sampling.knobs] == [item.name for item in fields(Sampling)]
    assert [knob.name for knob in make(LocalOptions).knobs] == [item.name for item in fields(LocalOptions)]


def test_untouched_widgets_make_the_default_value(sampling):
    assert sampling.make([widget.value for widget in sampling.widgets]) == Sampling()
    options = make(LocalOptions)
    assert options.make([widget.value for widget in options.widgets]) == LocalOptions()


def test_a_new_knob_shows_up_by_itself():
    @dataclass(frozen=True)
    class Options(LocalOptions):
        brand_new: bool = field(default=False, metadata={"label": "Brand new"})
        calibration: str = "calib.txt"

    form = make(Options)
    kinds = {knob.name: type(knob.widget).__name__ for knob in form.knobs}
    assert kinds["brand_new"] == "Checkbox" and kinds["calibration"] == "Textbox" and kinds["kv_type"] == "Dropdown"
    assert next(knob.widget.label for knob in form.knobs if knob.name == "brand_new") == "Brand new"


texts = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\x85\u2028\u2029"), min_size=1, max_size=20
)


@settings(deadline=None, max_examples=60)
@given(
    stop=st.lists(texts, max_size=5).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    ids=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    bias=st.lists(st.tuples(st.integers(0, 50_000), st.integers(-100, 100).map(float)), max_size=4).map(tuple),
    longest=st.none() | st.integers(0, 9999),
    temperature=st.integers(0, 200).map(lambda n: n / 100),
)
def test_values_survive_the_way_there_and_back(sampling, stop, seed, ids, bias, longest, temperature):
    given = Sampling(temperature=temperature, stop=stop, seed=seed, stop_ids=ids, logit_bias=bias, max_tokens=longest)
    values = {item.name: getattr(given, item.name) for item in fields(Sampling)}
    assert sampling.make(shown(sampling, values)) == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "soon"),
        ("max_tokens", "1.5"),
        ("stop_ids", "1, two"),
        ("logit_bias", "5"),
        ("top_k", None),
        ("min_tokens", None),
        ("ignore_eos", None),
        ("temperature", "hot"),
    ],
)
def test_nonsense_is_refused_by_name(sampling, name, value):
    values = [value if knob.name == name else knob.widget.value for knob in sampling.knobs]
    with pytest.raises(InvalidRequest) as caught:
        sampling.make(values)
    assert caught.value.field == name


def test_the_dataclass_has_the_last_word(sampling):
    values = [-1 if knob.name == "temperature" else knob.widget.value for knob in sampling.knobs]
    with pytest.raises(InvalidRequest) as caught:
        sampling.make(values)
    assert caught.value.field == "temperature"


def test_write_resets_what_is_not_given_and_refuses_what_is_unknown():
    form = make(Sampling, defaults={"temperature": 0.7}, skip=("n",))
    assert next(knob.widget.value for knob in form.knobs if knob.name == "temperature") == 0.7
    updates = dict(zip([knob.name for knob in form.knobs], form.write({"top_k": 5}), strict=True))
    assert (updates["temperature"], updates["top_k"], updates["top_p"]) == (0.0, 5, 1.0) and "n" not in updates
    with pytest.raises(InvalidRequest):
        form.write({"top_q": 5})


def test_a_line_break_in_a_stop_string_is_written_as_such(sampling):
    stop = next(knob for knob in sampling.knobs if knob.name == "stop")
    assert stop.read("\\n\\n\nUser:\nC:\\\\new") == ("\n\n", "User:", "C:\\new")
