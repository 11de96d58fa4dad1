"""What CMake says of JAXCGX_CUDA, and scripts/cuda.py of a machine that can't compile it."""
import os
import pathlib
import shutil
import subprocess

import pytest

from helpers import load_script

ROOT = pathlib.Path(__file__).parent.parent
PATH = f"{ROOT / '.venv/build/bin'}:{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=PATH)

needs_cmake = pytest.mark.skipif(not CMAKE, reason="there is no cmake on the PATH or in .venv/build")


@needs_cmake
@pytest.mark.parametrize(("value", "status", "words"), [
    ("MAYBE", 1, "JAXCGX_CUDA: expected AUTO, ON or OFF, got 'MAYBE'"),
    ("ON", 1, "JAXCGX_CUDA=ON, but no CUDA compiler was found that works: put nvcc on the PATH"),
    ("AUTO", 0, "CUDA half: none"),
    ("OFF", 0, "CUDA half: none"),
])  # fmt: skip
def test_without_a_cuda_compiler(tmp_path, value, status, words):
    env = os.environ | {"PATH": PATH, "CUDACXX": "/bin/false"}
    result = subprocess.run([CMAKE, "-S", ROOT, "-B", tmp_path, f"-DJAXCGX_CUDA={value}", "-DJAXCGX_MODULE=OFF"],
                            capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == status and words in " ".join((result.stdout + result.stderr).split()), result.stderr


@needs_cmake
@pytest.mark.skipif(not shutil.which("nvcc") or any(pathlib.Path("/dev").glob("nvidia[0-9]*")), reason="needs nvcc and no GPU")
def test_the_architecture_of_a_gpu_that_is_not_there(tmp_path):
    result = subprocess.run([CMAKE, "-S", ROOT, "-B", tmp_path, "-DCMAKE_CUDA_ARCHITECTURES=native", "-DJAXCGX_MODULE=OFF"],
                            capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": PATH})
    assert result.returncode == 1 and "CMAKE_CUDA_ARCHITECTURES=native, but no GPU was found" in result.stderr


def test_a_machine_that_cannot_compile_it(tmp_path, monkeypatch, capfd):
    cuda = load_script(ROOT / "scripts/cuda.py", monkeypatch)
    with pytest.raises(SystemExit, match="cuda: the build failed; .*kernels.txt has what is above"):
        cuda.build(tmp_path, "/bin/false", "nvcc")
    assert not (tmp_path / "kernels").exists()
    monkeypatch.setattr(cuda, "BUILD_ENV", tmp_path)
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setattr(cuda.matrix, "pip", lambda *_: subprocess.run("/bin/false", check=True))
    cuda.main()
    assert "cuda: SKIPPED: there is no CUDA compiler (nvcc) on the PATH, and pip could not install one" in capfd.readouterr().out
