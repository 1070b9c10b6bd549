"""Drafts that read their verifier's states: where J comes in, what lessons keep, the loss of both passes, the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from backends.base import Cancel, InvalidRequest, ModelDir
from backends.compress import draft_files
from backends.compress.corpus import Window
from backends.compress.distill import Judge, Schedule, Training
from backends.compress.join import JOIN, join_stream, shifted
from backends.compress.lessons import Lessons
from backends.compress.origin import open_origin
from backends.compress.prune import Pruned
from backends.compress.skeleton import Skeleton
from backends.compress.stream import Stream
from backends.compress.student import Borrowed, Student
from backends.compress.writer import Parts
from backends.draft_recipe import DraftOptions
from backends.engine.weights import SafetensorsSource
from backends.registry import load_decoder
from gainz_ui.commands import draft as command
from gainz_ui.services.store import Store
from tests.stopped import end_alike
from tests.test_draft import QUICK, SIZE, silent, teacher, write

CPU = torch.device("cpu")
STATES = QUICK | dict(reads="states", choose="greedy")     # the first layer of this teacher does next to nothing
IDS = torch.tensor([[3, 77, 200, 11, 45], [9, 8, 300, 8, 2]])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """models/ with a teacher in it, and a draft that reads its states."""
    folder = tmp_path_factory.mktemp("models")
    write(folder / "parent", teacher())
    command.make(Store(folder), "parent", "draft", DraftOptions(**STATES), None, False, silent, Cancel())
    return folder


def student_of(folder: Path, reads_states: bool = True) -> Student:
    return Student(SafetensorsSource(ModelDir.of(folder)), CPU, "float32", reads_states)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gemma() -> GemmaForCausalLM:
    torch.manual_seed(5)
    return GemmaForCausalLM(GemmaConfig(**SIZE | {"num_hidden_layers": 1})).float().eval()


# ---------------------------------------------------------------------------------------------- where J comes in
def test_a_place_has_the_state_of_the_one_before_it_and_the_first_has_none():
    assert shifted(torch.tensor([[[1, 2], [3, 4], [5, 6]]])).tolist() == [[[0, 0], [1, 2], [3, 4]]]


def test_a_join_of_zeros_changes_nothing_and_any_other_does(models):
    student, tokens_only, before = student_of(models / "parent"), student_of(models / "parent", False), drawn(2, 5, 64)
    plain = tokens_only.hidden(IDS)
    assert torch.equal(student.hidden(IDS, before), plain) and torch.equal(student.hidden(IDS), plain)
    student.set({**student.values(), JOIN: drawn(64, 64)})
    assert not torch.allclose(student.hidden(IDS, before), plain, atol=1e-2) and torch.equal(student.hidden(IDS), plain)


def test_a_pass_on_its_own_states_teaches_j_and_not_the_pass_before(models):
    student, hidden = student_of(models / "parent"), drawn(2, 5, 64).requires_grad_(True)
    found = student.chained(IDS, hidden)
    found.square().sum().backward()
    assert hidden.grad is None and student.join.grad.abs().sum() > 0
    student.set({**student.values(), JOIN: drawn(64, 64)})
    assert torch.equal(student.chained(IDS, hidden), student.hidden(IDS, shifted(hidden)))


def first_inputs(student: Student, before: Tensor) -> Tensor:
    """What the first layer's first norm is given, [B, T, H]."""
    seen: list[Tensor] = []
    hook = student.skeleton.layers[0].input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    student.hidden(IDS, before)
    hook.remove()
    return seen[0].detach()


@pytest.mark.parametrize("make, scale", [(lambda: teacher(num_hidden_layers=1), 1.0), (gemma, 8.0)], ids=["llama", "gemma"])
def test_the_first_layer_reads_the_scaled_embedding_and_j_times_the_state_before(tmp_path, make, scale):
    student = student_of(write(tmp_path / "m", make()))
    join, states = drawn(64, 64), drawn(2, 5, 64, seed=2)
    student.set({**student.values(), JOIN: join})
    table = student.model.get_input_embeddings().weight
    wanted = torch.stack([torch.stack([table[id] * scale + (join @ states[row, place - 1] if place else 0)
                                       for place, id in enumerate(ids)]) for row, ids in enumerate(IDS)])
    assert torch.allclose(first_inputs(student, shifted(states)), wanted, rtol=1e-4, atol=1e-4)

    stream = Stream(Skeleton(student.skeleton.source, CPU), IDS.tolist(), "float32", Cancel())     # the rounding's windows
    stream.skeleton.fill()
    stream.begin()
    join_stream(stream, join, list(states))
    assert torch.allclose(torch.cat(stream.hidden), wanted, rtol=1e-4, atol=1e-4)


def test_the_final_norm_is_not_trained_where_states_are_read(models):
    with_states, without = (set(student_of(models / "parent", flag).trained) for flag in (True, False))
    assert with_states - without == {JOIN} and without - with_states == {"model.norm.weight"}


# ---------------------------------------------------------------------------------------------- lessons
WINDOWS = [Window((3, 77, 200, 11, 45, 6), (False, False, True, True, False, True)),
           Window((9, 8, 300, 8, 2, 31), (False, True, True, True, True, True))]


def lessons_of(models: Path, folder: Path, everywhere: bool) -> Lessons:
    folder.mkdir()
    found = Lessons(Parts(folder, "key"), "states", WINDOWS, everywhere)
    decoder = load_decoder(models / "parent", kernels="ref", dtype="float32", kv_type="float32", context=96, threads=1)
    found.read(decoder, lambda done, total: None, Cancel())
    return found


@pytest.fixture(scope="module")
def every(models, tmp_path_factory) -> Lessons:
    """Of all places."""
    return lessons_of(models, tmp_path_factory.mktemp("lessons") / "every", True)


def test_lessons_keep_all_places_only_where_they_are_read(models, every, tmp_path):
    few = lessons_of(models, tmp_path / "few", False)
    for number, window in enumerate(WINDOWS):
        rows = every.rows(number)
        with torch.no_grad():
            wanted = teacher().model(torch.tensor([window.tokens])).last_hidden_state[0]
        assert rows.dtype == torch.bfloat16 and torch.allclose(rows.float(), wanted, rtol=1e-2, atol=1e-2)
        assert torch.equal(every.states(number), few.states(number)) and len(few.states(number)) == len(window.places) < len(rows)
    assert few.parts.path("states-00000").stat().st_size < every.parts.path("states-00000").stat().st_size
    before = every.before([1, 0])
    assert before.dtype == torch.float32 and not before[:, 0].any() and torch.equal(before[0, 1:], every.rows(1)[:-1].float())
    assert few.before([0]) is None
    with pytest.raises(RuntimeError, match="only the states"):
        few.rows(0)


# ---------------------------------------------------------------------------------------------- training
def by_hand(model: LlamaForCausalLM, join: Tensor, states: Tensor) -> Tensor:
    """Post-norm hidden [B, T, H] of the windows, J · the state before added to the embeddings."""
    ids = torch.tensor([window.tokens for window in WINDOWS])
    embedded = model.model.embed_tokens(ids)
    embedded[:, 1:] += states[:, :-1] @ join.T
    return model.model(inputs_embeds=embedded).last_hidden_state


@torch.no_grad()
def test_the_loss_is_that_of_the_teachers_states_and_late_also_half_of_that_of_its_own(models, every, tmp_path):
    student, join = student_of(models / "parent"), drawn(64, 64) / 16
    student.set({**student.values(), JOIN: join})
    model, states = teacher(), torch.stack([every.rows(number).float() for number in range(2)])
    first = by_hand(model, join, states)
    second = by_hand(model, join, first)
    theirs, distances = torch.cat([every.states(number).float() for number in range(2)]), []
    for hidden in (first, second):
        mine = torch.cat([hidden[row, window.places] for row, window in enumerate(WINDOWS)])
        p, q = ((rows @ model.lm_head.weight.T).log_softmax(-1) for rows in (theirs, mine))
        distances.append(float(kl_div(q, p, log_target=True, reduction="batchmean")))
    assert abs(distances[0] - distances[1]) > 1e-3
    training = Training(student, every, every, None, Schedule(3, 0, 2, 0.0, 0), Parts(tmp_path, "key"), silent, Cancel())
    assert [float(loss) for loss in training.losses([0, 1], False)] == pytest.approx([distances[0]] * 2, rel=1e-3)
    assert [float(loss) for loss in training.losses([0, 1], True)] == pytest.approx(
        [distances[0] + 0.5 * distances[1], distances[0]], rel=1e-3)


def test_what_is_learned_is_read_from_the_states_too(models, every, tmp_path):
    source = Pruned(SafetensorsSource(ModelDir.of(models / "parent")), (1,), "model.layers")
    student = Student(source, CPU, "float32", True)
    curve = Training(student, every, every, None, Schedule(60, 0, 2, 5e-3, 0), Parts(tmp_path, "key"), silent, Cancel()).run()
    assert curve[-1].loss < 0.2 * curve[1].loss and curve[-1].overlap > curve[0].overlap
    with_states = Judge(student, every, None).acceptance()
    student.set({**student.values(), JOIN: torch.zeros(64, 64)})
    assert Judge(student, every, None).acceptance()[1] < 0.9 * with_states[1]


def test_the_judge_gives_the_teachers_states_and_for_a_guess_behind_a_guess_the_drafts_own(models, every):
    student = student_of(models / "parent")
    judge, whole = Judge(student, every, None), Judge(student, every, None).acceptance()
    assert whole[0] == 1 and judge.acceptance(chained=True) == whole        # J is 0: the student is the teacher
    student.set({**student.values(), JOIN: drawn(64, 64)})
    first = judge.acceptance()
    assert first[1] < 0.9 * whole[1] and judge.acceptance(chained=True)[1] != first[1]


def test_a_draft_that_reads_states_learns_and_its_files_say_so(models):
    made = models / "draft"
    manifest, config = (json.loads((made / name).read_text()) for name in ("manifest.json", "config.json"))
    curve = manifest["taught"]["curve"]
    assert curve[-1]["loss"] < 0.95 * curve[1]["loss"]
    assert config["gainz_draft"]["reads"] == "states" and "--reads=states" in manifest["command"]
    assert 0 < manifest["second"] < 1 and manifest["settings"]["reads"] == "states"
    weights = load_file(made / "model.safetensors")
    assert weights[JOIN].shape == (64, 64) and weights[JOIN].dtype == torch.float16 and weights[JOIN].count_nonzero() > 2000
    assert torch.equal(weights["model.norm.weight"], teacher().model.norm.weight.detach().half())
    layer = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(weights[layer], torch.ones(64).half())           # layers are trained as ever


def test_the_rounding_sees_what_the_layers_are_given(models, tmp_path):
    options, rounded = DraftOptions(**STATES), []
    origin = open_origin(ModelDir.of(models / "parent"))
    source = Borrowed(Pruned(origin.source, (0,), "model.layers"), {JOIN: drawn(64, 64)})
    for number, states in enumerate((torch.zeros(6, 64), 8 * drawn(6, 64, seed=3))):
        folder = tmp_path / str(number)
        folder.mkdir()
        windows = [window.tokens for window in WINDOWS]
        rounded.append(draft_files.write_layers(folder, Parts(folder, "key"), origin, source, None, options, windows,
                                                [states, states], CPU, "float32", Cancel()))
    first = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(rounded[0][JOIN], drawn(64, 64).half()) and not torch.equal(rounded[0][first], rounded[1][first])


def test_a_run_that_was_stopped_ends_as_one_that_was_not(models, tmp_path):
    end_alike(models, tmp_path, "draft", DraftOptions(**STATES))


# ---------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("options", [dict(reads="words"), dict(reads="states", minutes=0.0), dict(reads="states", minutes=0)])
def test_reading_without_learning_to_is_refused_by_name(options):
    with pytest.raises(InvalidRequest) as caught:
        DraftOptions(**options)
    assert caught.value.field == "reads"
    assert DraftOptions(reads="states", minutes=0, steps=5).reads_states and not DraftOptions().reads_states


def test_a_family_without_a_fused_decoder_is_refused_before_anything_is_done(tmp_path):
    shape = dict(vocab_size=512, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    write(tmp_path / "parent", GPT2LMHeadModel(GPT2Config(**shape)).float())
    seen: list = []
    with pytest.raises(InvalidRequest, match="gpt2") as caught:
        command.make(Store(tmp_path), "parent", "draft", DraftOptions(**STATES | dict(layers=1)), None, False, seen.append, Cancel())
    assert caught.value.field == "reads" and {progress.stage for progress in seen} <= {"read"}
