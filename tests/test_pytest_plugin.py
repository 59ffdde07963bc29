"""`pytest --clearhead-model`: the audits of a model as tests, without a line of code."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

pytest_plugins = "pytester"
pytestmark = pytest.mark.slow

MODULE = "clearhead.integrations.pytest_plugin"
INSTALLED = any(
    point.value == MODULE for point in importlib.metadata.entry_points(group="pytest11")
)
LOADED = () if INSTALLED else ("-p", MODULE)
ROOT = Path(__file__).parents[1]
TOYS = """
    import torch
    from clearhead import masks, models
    from tests import leaky

    def sound():
        return leaky.make("missing mask", leaky=False)

    def bad():
        return leaky.make("missing mask", leaky=True)

    def gpt():
        torch.manual_seed(0)
        return models.GPT(17, layers=1, width=16, heads=2).eval()

    def nan():
        return (lambda x: x / 0 * 0), torch.randn(1, 5, 3)

    def raises():
        raise RuntimeError("no weights here")

    def odd():
        return (lambda x: x.cumsum(1)), torch.randn(1, 5, 3)
"""
LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=50, hidden_size=16,
    intermediate_size=24, num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest in a folder with the toys, and no test file."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    pytester.makepyfile(toys=TOYS)
    pytester.syspathinsert()

    def start(*words: str, spec: str | None = None):
        model = ("--clearhead-model", spec) if spec else ()
        return pytester.runpytest(*LOADED, "-p", "no:cacheprovider", "-v", "-rs", *model, *words)

    return start


def test_a_sound_model_passes(run):
    found = run(spec="toys:sound")
    assert found.ret == 0
    found.assert_outcomes(passed=3, skipped=3)
    found.stdout.fnmatch_lines(["*clearhead[[]toys:sound[]]::causality PASSED*"])
    found.stdout.fnmatch_lines(["*SKIPPED*needs a model that takes attention_mask*"])
    found.stdout.fnmatch_lines(["*SKIPPED*takes no position_ids*"])
    found.stdout.fnmatch_lines(["*SKIPPED*has no cache that could be tested*"])


def test_a_leaky_model_fails_with_the_report(run):
    found = run(spec="toys:bad")
    assert found.ret == 1
    found.assert_outcomes(passed=2, failed=1, skipped=3)
    found.stdout.fnmatch_lines(["LEAK in Block: 36 of its outputs move*"])
    found.stdout.fnmatch_lines(["*first in mixer"])
    found.stdout.fnmatch_lines(["*--clearhead-allowed everything*"])
    assert "Traceback" not in found.stdout.str()


def test_the_mask_can_be_named(run):
    assert run("-k", "causality", spec="toys:bad").ret == 1
    found = run("-k", "causality or batch", "--clearhead-allowed", "everything", spec="toys:bad")
    assert found.ret == 0
    found.assert_outcomes(passed=1, skipped=1, deselected=4)
    found.stdout.fnmatch_lines(["*SKIPPED*nothing was tested; nothing is forbidden*"])


def test_a_run_that_tested_nothing_does_not_pass(run):
    found = run("-k", "causality", "--clearhead-allowed", "everything", spec="toys:bad")
    found.assert_outcomes(skipped=1, deselected=5)
    assert found.ret == 3
    found.stdout.fnmatch_lines(["clearhead[[]toys:bad[]]: nothing was audited"])


def test_what_could_not_be_tested_fails(run):
    found = run("-k", "causality", spec="toys:nan")
    assert found.ret == 1
    found.stdout.fnmatch_lines(["NOT TESTED: *"])


def test_a_model_without_inputs_reads_random_tokens(run):
    found = run("--clearhead-length", "7", spec="toys:gpt")
    assert found.ret == 0
    found.assert_outcomes(passed=4, skipped=2)


def test_documents_can_be_given(run):
    words = ("--clearhead-length", "6", "-k", "documents")
    found = run(*words, "--clearhead-documents", "0,0,0,1,1,1", spec="toys:gpt")
    assert found.ret == 1
    found.stdout.fnmatch_lines(["LEAK in GPT*document*"])
    assert run(*words, "--clearhead-documents", "0,0,1", spec="toys:gpt").ret == 1
    found = run(*words, "--clearhead-documents", "0,a", spec="toys:gpt")
    assert found.ret == 1
    found.stdout.fnmatch_lines(["--clearhead-documents: must be numbers*"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("toys:nothing", "model: names nothing that can be imported*"),
        ("toys:raises", "model: toys:raises raised RuntimeError: no weights here*"),
        ("hf-tiny:nowhere", "model: no model of two layers could be built*"),
        ("hf:nowhere", "model: *nowhere*"),
    ],
)
def test_a_model_that_cannot_be_made_is_an_error_and_no_finding(run, spec, message):
    found = run(spec=spec)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.assert_outcomes(errors=6)
    found.stdout.fnmatch_lines([message])


def test_a_finding_beside_a_model_that_cannot_be_made_is_a_finding(run):
    found = run("-k", "causality", "--clearhead-model", "toys:nothing", spec="toys:bad")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.assert_outcomes(failed=1, errors=1)


def test_collection_imports_no_model(run):
    found = run("--collect-only", "-qq", spec="toys:raises")
    assert found.ret == 0
    names = ("causality", "padding", "batch", "documents", "generation", "modes")
    found.stdout.fnmatch_lines([f"clearhead[[]toys:raises[]]::{name}" for name in names])


def test_selection_and_several_models(run, pytester):
    pytester.makepyfile(test_other="def test_one(): pass")
    two = ("--clearhead-model", "toys:sound", "--clearhead-model", "toys:odd")
    run(*two, "-m", "clearhead", "-k", "batch").assert_outcomes(passed=2, deselected=11)
    found = run(*two, "-k", "odd and causality")
    found.assert_outcomes(passed=1, deselected=12)
    run(*two, "-m", "not clearhead").assert_outcomes(passed=1, deselected=12)
    run("--clearhead-model", "toys:odd", "--clearhead-model", "toys:odd", "--collect-only")


def test_other_runs_import_no_torch(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    pytester.makepyfile(
        """
        import sys

        def test_light():
            heavy = {"torch", "clearhead._core", "clearhead.integrations.audits"}
            assert not heavy & set(sys.modules)
        """
    )
    found = pytester.runpytest_subprocess(*LOADED, "-p", "no:cacheprovider")
    found.assert_outcomes(passed=1)


COMMAND = re.compile(r"^\$ pytest (--clearhead-model my.models:make.*?)\s*(?:#.*)?$", re.MULTILINE)


def test_the_commands_of_the_docs(run, pytester):
    """Those whose model is a factory; the others name models to download."""
    (pytester.mkpydir("my") / "models.py").write_text("from toys import gpt as make")
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    commands = COMMAND.findall(page)
    assert len(commands) >= 3
    for command in commands:
        assert run(*shlex.split(command)).ret == 0, command


def test_the_fixture(run, pytester):
    pytester.makepyfile(
        """
        import toys

        def test_sound(assert_causal):
            assert_causal(*toys.sound())

        def test_bad(assert_causal):
            assert_causal(*toys.bad())
        """
    )
    found = run()
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["*AssertionError*", "*LEAK in Block*"])


def test_a_shrunk_model_of_hugging_face(run, pytester):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(**LLAMA).save_pretrained(pytester.path / "model")
    found = run("--clearhead-length", "9", spec=f"hf-tiny:{pytester.path / 'model'}")
    assert found.ret == 0
    found.assert_outcomes(passed=6)


SOUND = "class:torch:MultiheadAttention:bool mask"
BIASED = "class:torch:MultiheadAttention:mask and is_causal, add_bias_kv"


def test_a_sound_class_of_a_library(run):
    found = run(spec=SOUND)
    assert found.ret == 0
    found.assert_outcomes(passed=4, skipped=2)
    found.stdout.fnmatch_lines(["*SKIPPED*does not apply*position_ids*"])


def test_a_class_with_a_fault_fails_with_its_script(run, pytester):
    found = run("-k", "modes or causality", spec=BIASED)
    assert found.ret == 1
    found.assert_outcomes(passed=1, failed=1, deselected=4)
    found.stdout.fnmatch_lines(["MODES in MultiheadAttention:mask and is_causal, add_bias_kv*"])
    text = found.stdout.str()
    script = text[text.index("# MultiheadAttention") :].partition("(int(not")[0]
    (pytester.path / "script.py").write_text(f"{script}(1)\n", encoding="utf-8")
    assert "clearhead" not in script
    assert pytester.runpython(pytester.path / "script.py").ret == 1


def test_a_class_of_transformers(run):
    pytest.importorskip("transformers")
    found = run("-k", "causality or batch", spec="class:LlamaForCausalLM")
    assert found.ret == 0
    found.assert_outcomes(passed=2, deselected=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clearhead-model", "class:torch:Nothing"], "classes: are in the mappings of torch*"),
        (
            ["--clearhead-model", SOUND, "--clearhead-allowed", "everything"],
            "--clearhead-allowed: has no use for class:torch*",
        ),
    ],
)
def test_what_is_no_class_and_what_is_not_for_classes(run, words, message):
    found = run("-k", "batch", *words)
    assert found.ret == 1
    found.stdout.fnmatch_lines([message])
    assert "Traceback" not in found.stdout.str()


def test_two_layers_remain_of_each_type():
    transformers = pytest.importorskip("transformers")
    from clearhead.models import tiny_model

    def layers(config, folder):
        config.save_pretrained(folder)
        return tiny_model(str(folder))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        same = {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
        config = transformers.Gemma3TextConfig(
            **{**same, "head_dim": 4}, layer_types=["sliding_attention"] * 8 + ["full_attention"]
        )
        model = layers(config, Path(folder) / "gemma")
        assert type(model).__name__ == "Gemma3ForCausalLM"
        assert model.config.layer_types == ["sliding_attention", "full_attention"]
        assert len(model.model.layers) == 2
        assert not model.training
        config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, num_layers=5, num_heads=2,
                                       d_ff=16, num_decoder_layers=1)  # fmt: skip
        model = layers(config, Path(folder) / "t5")
        assert (len(model.encoder.block), len(model.decoder.block)) == (2, 1)
        first, second = (tiny_model(str(Path(folder) / "gemma")).state_dict() for _ in range(2))
        assert all(first[key].equal(second[key]) for key in first)
