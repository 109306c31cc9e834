"""The executor's streams under PyTorch's sanitizer; executor and Triton kernels under NVIDIA's."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from braid.scheduling.mesh.layout import ParallelLayout
from tests.gpu.conftest import Finding, Lab
from tests.gpu.runtime import TINY, Job, host_rank
from tests.gpu.test_kernels import OPERATORS, results, use_of
from tests.gpu.test_schedules import bits

_SUMMARY = re.compile(r"={3,} (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_FAULT = re.compile(r"CSAN detected|Invalid|[Hh]azard|Race|Error")
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_MODULE = f"import torch, {__name__} as m; m.%s(m.Lab(torch.device('cuda'), True))"


def steps(lab: Lab) -> None:
    """Every schedule on the smallest model."""
    rank = host_rank(Job(shape=TINY, dtype=lab.dtype, layout=ParallelLayout(tp=2)), lab.device)
    for outcome in bits(rank, 1).values():
        assert set(outcome["eager"]) == {"runs"}
    rank.streams.close()


def everything(lab: Lab) -> None:
    """The same, and every Triton kernel once."""
    steps(lab)
    for operator in OPERATORS:
        use, kinds = use_of(operator, lab)
        results(use, kinds, lab, "triton")


def test_alone(lab: Lab) -> None:
    """What sanitizers look at runs without them."""
    everything(Lab(lab.device, tiny=True))


@pytest.mark.parametrize("tool", ["streams", "memcheck", "racecheck"])
def test_sanitizer(tool: str, lab: Lab, finding: Finding) -> None:
    """Sanitizers find no access to memory that no event orders, no wrong one, no race in shared memory."""
    if not lab.on_gpu:
        pytest.skip("needs a CUDA device")
    command = [sys.executable, "-c", _MODULE % ("steps" if tool == "streams" else "everything")]
    if tool != "streams":
        path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
        if (program := shutil.which("compute-sanitizer", path=path)) is None:
            pytest.skip("compute-sanitizer is not installed")
        command = [program, "--tool", tool, "--target-processes", "all", *command]
    variable = {"memcheck": "PYTORCH_NO_CUDA_MEMORY_CACHING", "streams": "TORCH_CUDA_SANITIZER"}.get(tool)
    environment = {**os.environ, **({variable: "1"} if variable else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    printed = done.stdout + done.stderr
    counted = [int(count) for count in _SUMMARY.findall(printed)]  # by NVIDIA's, at its end
    finding.numbers["faults"] = faults = sum(counted) + printed.count("CSAN detected")
    if not faults and (done.returncode or (tool != "streams" and not counted)):  # silence says nothing then
        pytest.skip(f"exit code {done.returncode}: {printed.strip()[-200:]}")
    assert not faults, next(filter(_FAULT.search, printed.splitlines()), "")
