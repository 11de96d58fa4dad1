"""What nvcc made of the CUDA kernels gives the bytes of the CPU kernels: tests/cpp/ptx runs its launchers and its PTX.

`make cuda` and `make cuda-short` run this with their build.
"""

import os
import pathlib
import re
import subprocess

import pytest

BUILD = pathlib.Path(os.environ.get("JAXCGX_CUDA_BUILD", ""))

pytestmark = pytest.mark.skipif(
    not os.environ.get("JAXCGX_CUDA_BUILD"), reason="needs nvcc's PTX, and programs that run it (`make cuda`)"
)


def start(program, ptx):
    # By lines: a test that needs one failure only ends the program at its first.
    command = ["stdbuf", "-oL", BUILD / "make/tests/cpp/ptx" / program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAXCGX_PTX": str(ptx)})


def test_every_kernel_gives_the_bytes_of_the_cpu():
    launches = {}
    for program in ("ptx_test_cuda", "ptx_test_cuda_topk"):
        with start(program, BUILD / "ptx") as process:
            output = process.stdout.read()
        assert process.returncode == 0, output
        print(re.search(r"\d+ passed", output)[0])
        for kernel, count in re.findall(r"^ptx: (\w+): \d+ instructions in (\d+) launches$", output, re.MULTILINE):
            launches[kernel] = launches.get(kernel, 0) + int(count)
    assert launches and not [kernel for kernel, count in launches.items() if count == 0]


@pytest.mark.parametrize(
    ("instruction", "broken"),
    [
        (r"(lop3\.b32 [^;]*, )(\d+);", lambda m: f"{m[1]}{int(m[2]) ^ 0x80};"),
        (r"fma\.rn\.f32 +\t?([^,]+), ([^,]+), ([^,]+), ([^;]+);", r"mul.rn.f32 \1, \2, \3; add.rn.f32 \1, \1, \4;"),
    ],
    ids=("lop3", "fma"),
)
def test_a_broken_instruction_is_noticed(tmp_path, instruction, broken):
    for file in (BUILD / "ptx").iterdir():
        (tmp_path / file.name).symlink_to(file)
    decode = tmp_path / "decode.ptx"
    text = decode.read_text()
    decode.unlink()
    text, count = re.subn(instruction, broken, text, count=1)
    assert count == 1
    decode.write_text(text)
    with start("ptx_test_cuda", tmp_path) as process:
        noticed = any(".h:" in line for line in process.stdout)
        process.kill()
    assert noticed
