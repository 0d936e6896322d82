"""Run every example as a user does; each asserts its own result."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The examples of other issues may need a GPU or several ranks; those bring tests of their own.
ON_ANY_MACHINE = (
    "quickstart_cpu",
    "write_a_prep",
    "decode_loop",
    "check_a_backend",
    "prefill_segments",
    "speculative",
    "rungs",
    "overlap_loop",
)
AZURE = ROOT.parent / "shared" / "data" / "azure_llm_code_2023.csv"


@pytest.mark.parametrize("name", ON_ANY_MACHINE)
def test_example_passes(name: str) -> None:
    assert ran_example(name).strip()


@pytest.mark.skipif(not AZURE.exists(), reason="needs the real trace in ../shared/data to read by path")
def test_prompts_of_the_real_trace_are_read_in_segments() -> None:
    said = ran_example("prefill_segments", "--trace", str(AZURE), "--requests", "12")
    assert "0 differences from eager steps" in said
    assert "prompts read whole: first tokens equal" in said
    assert "8819 prompts of up to 7437 tokens in chunks of 2048" in said


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'"
)
def test_models_of_transformers_are_served() -> None:
    said = ran_example("hf_llama", "--bench", "--steps", "4", "--rounds", "1", "--without-library")
    own = [f"{kind}ForCausalLM, prep {prep}: 8 requests" for kind, prep in (("Llama", "causal"), ("Mistral", "ring"))]
    assert [line[: len(one)] for one, line in zip(own, re.findall("^[LM].*as the eager model.*$", said, re.M))] == own
    assert said.count("is that of its request decoded alone") == 2
    assert re.search(r"that is Llama's prep: [1-4] requests differ from being decoded alone", said)
    assert "These times mean nothing" in said


def ran_example(name: str, *arguments: str) -> str:
    """Run an example; give what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_quickstart_is_short() -> None:
    assert len((ROOT / "examples" / "quickstart_cpu.py").read_text().splitlines()) < 60
