"""Whatever happens to a file of a checkpoint, the commands name it and exit with 1, or go on as before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_experts.registry.cli import run

GENERATE = ("generate", "--prompt", "t1 t2", "--max-tokens", "2")
INDEX = "model.safetensors.index.json"
HEADERS = ("config.json", "generation_config.json", INDEX, "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def sound(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of a tiny model, with a tokenizer and every file that the commands read."""
    model, config = lab.tiny("mixtral", {"num_hidden_layers": 1, "num_local_experts": 2, "eos_token_id": 2})
    params = lab.parameters(model)
    folder = lab.write(tmp_path_factory.mktemp("sound"), params, config)
    words = {**{f"t{i}": i for i in range(90)}, "<unk>": 90}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}),
        ("special_tokens_map.json", {"eos_token": "t2", "unk_token": "<unk>"}),
        ("generation_config.json", {"eos_token_id": 2}),
        (INDEX, {"weight_map": dict.fromkeys(params, "model.safetensors")}),
    ):
        (folder / name).write_text(json.dumps(content))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def outcome(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, bytes, tuple[str, ...]], tuple[int, str]]:
    """The exit code and everything printed, with one file of the checkpoint replaced."""

    def replaced(name: str, content: bytes, command: tuple[str, ...]) -> tuple[int, str]:
        folder = tmp_path / "damaged"
        folder.mkdir(exist_ok=True)
        for file in sound.iterdir():
            (folder / file.name).unlink(missing_ok=True)
            if file.name != name:
                os.link(file, folder / file.name)
        (folder / name).write_bytes(content)
        capsys.readouterr()
        code = run([command[0], str(folder), *command[1:]])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return replaced


def read_by(command: str) -> tuple[str, ...]:
    return HEADERS if command == "inspect" else HEADERS + TOKENIZER


@pytest.mark.parametrize("command", [("inspect",), GENERATE], ids=lambda c: c[0])
def test_the_sound_checkpoint_passes(command: tuple[str, ...], sound: Path, outcome: Any) -> None:
    for name in read_by(command[0]):
        code, printed = outcome(name, (sound / name).read_bytes(), command)
        assert code == 0, printed


# A command takes longer than a function; `--hypothesis-profile long` looks for new examples here too.
EXAMPLES = settings(
    max_examples=settings.default.max_examples * 3 // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("command", [("inspect",), GENERATE], ids=lambda c: c[0])
@given(data=st.data())
@EXAMPLES
def test_random_bytes_in_any_file_are_refused_with_its_name(
    command: tuple[str, ...], data: st.DataObject, outcome: Any
) -> None:
    name = data.draw(st.sampled_from([n for n in read_by(command[0]) if n != "chat_template.jinja"]))
    content = data.draw(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
    code, printed = outcome(name, content, command)
    assert code == 1, printed
    assert name in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("command", [("inspect",), GENERATE], ids=lambda c: c[0])
@given(data=st.data())
@EXAMPLES
def test_a_file_that_is_cut_or_changed_in_places_is_named_or_still_good(
    command: tuple[str, ...], data: st.DataObject, sound: Path, outcome: Any
) -> None:
    name = data.draw(st.sampled_from(read_by(command[0])))
    raw = bytearray((sound / name).read_bytes())
    cut = data.draw(st.integers(0, len(raw) - 1) | st.just(len(raw)))
    # Headers stand first and are what can be wrong; any value of a tensor is one.
    places = st.tuples(st.integers(0, min(cut, 4000)), st.integers(0, 255))
    raw = raw[:cut]
    for at, value in data.draw(st.lists(places, max_size=6)):
        if at < len(raw):
            raw[at] = value
    code, printed = outcome(name, bytes(raw), command)
    assert code in (0, 1), printed
    assert code == 0 or name in "".join(printed.split())
    assert "Traceback" not in printed
    if name == "model.safetensors" and cut < len((sound / name).read_bytes()):
        assert code == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("command", [("inspect",), GENERATE], ids=lambda c: c[0])
@given(data=st.data())
@EXAMPLES
def test_values_that_are_no_longer_what_they_were_are_named_or_still_good(
    command: tuple[str, ...], data: st.DataObject, sound: Path, outcome: Any
) -> None:
    """JSON that stays JSON, with a value of another kind somewhere or a key less."""
    name = data.draw(st.sampled_from([n for n in read_by(command[0]) if n.endswith(".json")]))
    content = json.loads((sound / name).read_text())
    at = content
    while True:
        key = data.draw(st.sampled_from(sorted(at)))
        if not (isinstance(at[key], dict) and at[key] and data.draw(st.booleans())):
            break
        at = at[key]
    if data.draw(st.booleans()):
        at[key] = data.draw(VALUES)
    else:
        del at[key]
    code, printed = outcome(name, json.dumps(content).encode(), command)
    assert code in (0, 1), printed
    assert code == 0 or name in "".join(printed.split())
    assert "Traceback" not in printed


def test_a_tokenizer_that_fails_past_ordinary_exceptions_is_named(sound: Path, outcome: Any) -> None:
    """The tokenizers library panics where a template asks for a special token that does not exist."""
    content = json.loads((sound / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    code, printed = outcome("tokenizer.json", json.dumps(content).encode(), GENERATE)
    assert code == 1, printed
    assert "damaged/tokenizer.json" in printed
    assert "PanicException" in printed


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_gone_is_named(
    lost: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lacking"
    folder.mkdir()
    for file in sound.iterdir():
        if file.name != lost:
            os.link(file, folder / file.name)
    assert run([GENERATE[0], str(folder), *GENERATE[1:]]) == 1
    assert lost in capsys.readouterr().err
