"""Tests that nvcc's output for the CUDA kernels gives the bytes of the CPU kernels.

tests/cpp/ptx runs its launchers and its PTX. `make cuda` and `make cuda-short` run these tests with their build.
"""

import collections
import contextlib
import os
import pathlib
import re
import subprocess

import pytest

BUILD = pathlib.Path(os.environ.get("JAXCGX_CUDA_BUILD", ""))

pytestmark = pytest.mark.skipif(
    not os.environ.get("JAXCGX_CUDA_BUILD"), reason="needs nvcc's PTX, and programs that run it (`make cuda`)"
)


FEW = "16"  # a 16th of the codecs is tested
WHOLE = BUILD.name == "cuda"  # every codec with every bucket size, so that every kernel runs


def start(ptx, program, *arguments):
    # Lines are not buffered, so that a test that needs only one failure can end the program after the first one.
    command = ["stdbuf", "-oL", BUILD / "make/tests/cpp/ptx" / program, *arguments]
    env = os.environ | {"JAXCGX_PTX": str(ptx)} | ({"JAXCGX_TEST_FULL": "yes"} if WHOLE else {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_the_bytes_are_those_of_the_cpu():
    launches = collections.Counter()
    commands = ["ptx_test_cuda", "1" if WHOLE else FEW], ["ptx_test_cuda_topk"], ["ptx_test_patch"]
    with contextlib.ExitStack() as stack:  # they run at the same time
        running = [stack.enter_context(start(BUILD / "ptx", *command)) for command in commands]
        outputs = [process.stdout.read() for process in running]
    for command, process, output in zip(commands, running, outputs):
        assert process.returncode == 0, output
        print(command, re.search(r"\d+ passed", output)[0])
        for kernel, count in re.findall(r"^ptx: (\w+): \d+ instructions in (\d+) launches$", output, re.MULTILINE):
            launches[kernel] += int(count)
    assert launches.total()
    if WHOLE:
        assert not [kernel for kernel, count in launches.items() if count == 0]


FUSED = r"fma\.rn\.f32\s+([^,]+), ([^,]+), ([^,]+), ([^;]+);"
DIFFERS = ".h:"  # a check of cuda_message.h that failed


@pytest.mark.parametrize(
    ("instruction", "broken", "message"),
    [
        (r"(lop3\.b32\s[^;]*, )\w+;", r"\g<1>0;", DIFFERS),
        (FUSED, r"mul.rn.f32 \1, \2, \3; add.rn.f32 \1, \1, \4;", DIFFERS),
        (FUSED, r"fma.rn.ftz.f32 \1, \2, \3, \4;", "ptx: unknown instruction: fma.rn.ftz.f32"),
    ],
    ids=("lop3 whose table is 0", "fma in two", "fma that the translator doesn't know"),
)
def test_a_broken_instruction_is_noticed(tmp_path, instruction, broken, message):
    for file in (BUILD / "ptx").iterdir():
        (tmp_path / file.name).symlink_to(file)
    decode = tmp_path / "decode.ptx"
    before, kernel, after = decode.read_text().partition("decode_kernelINS_6LevelsELi4ELb0E")
    after, count = re.subn(instruction, broken, after, count=1)
    assert kernel and count == 1
    decode.unlink()
    decode.write_text(before + kernel + after)
    with start(tmp_path, "ptx_test_cuda", FEW) as process:
        noticed = any(message in line for line in process.stdout)
        process.kill()
    assert noticed
